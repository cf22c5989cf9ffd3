"""Test shared memory that is written again: its bits, what is kept, and when nothing of it is left."""

import asyncio
import contextlib
import errno
import multiprocessing
import os
import random
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from waiting import PATIENCE

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.wire import shared_file, shared_segment
from qerl_vllm_plugin.wire.safetensors_file import header_bytes
from qerl_vllm_plugin.wire.shared_segment import NoRoomError, Segments

FORK = multiprocessing.get_context("fork")
A = torch.arange(12.0).reshape(3, 4)
TENSORS = {
    "plain": A,
    "the_same_memory": A,
    "a_view": A.t(),
    "half": A.bfloat16(),
    "eight_bits": A.to(torch.float8_e4m3fn),
    "whole": torch.arange(5),
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "odd": torch.ones(3, dtype=torch.uint8),
}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("group", [1, 48, 1 << 20])
def test_it_has_the_bits_of_the_tensors(group, monkeypatch):
    monkeypatch.setattr(shared_segment, "GROUP", group)
    with Segments(AdapterError).filled(TENSORS) as path:
        found = {name: tensor.clone() for name, tensor in load_file(path).items()}
        assert str(Path(path).readlink()).startswith(f"{shared_file.SHARED_MEMORY}/")
        assert os.stat(path).st_nlink == 0
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bits(found[name]).equal(bits(tensor))


def test_a_segment_ends_with_its_keeper_without_a_warning():
    segments = Segments(AdapterError)
    with segments.filled({"a": A}) as path:
        link = os.readlink(path)
    assert Path(path).exists() and holders(link) == {os.getpid()}, "it is kept"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del segments
    assert not Path(path).exists() and holders(link) == set() and not said


def test_the_same_size_is_the_same_file_with_new_bits():
    segments = Segments(AdapterError)
    with segments.filled({"a": A}) as path:
        first = os.stat(path)
    with segments.filled({"a": A + 1}) as path:
        again = os.stat(path)
        assert load_file(path)["a"].equal(A + 1)
    with segments.filled({"a": A[:2]}) as path:
        assert os.stat(path).st_size < first.st_size and load_file(path)["a"].equal(A[:2])
    assert (again.st_ino, again.st_size) == (first.st_ino, first.st_size)


class Refused(Exception):
    def __init__(self, reason):
        self.reason = reason


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, *map(Refused, ("", "lost", "engine_dead"))])
def test_what_workers_may_still_read_is_not_written_again(error):
    """Check also a refusal by a proxy, and by a server whose engine has not answered."""
    segments = Segments(Refused)
    with pytest.raises(Refused if isinstance(error, Refused) else error):
        with segments.filled({"a": A}) as path:
            found, number = load_file(path)["a"], os.open(path, os.O_RDONLY)
            raise error
    assert os.fstat(number).st_size, "to read what is given back would end this process"
    os.close(number)
    with segments.filled({"a": A + 1}) as path:
        assert load_file(path)["a"].equal(A + 1) and found.equal(A)


def test_two_at_a_time_have_a_file_each_and_one_is_kept():
    segments = Segments(AdapterError)
    with segments.filled({"a": A}) as first, segments.filled({"a": A + 1}) as second:
        assert load_file(first)["a"].equal(A) and load_file(second)["a"].equal(A + 1)
        paths = {path: os.stat(path).st_ino for path in (first, second)}
        of_a_worker = os.open(second, os.O_RDONLY)
    left = [path for path, inode in paths.items() if Path(path).exists() and os.stat(path).st_ino == inode]
    assert left == [first]
    assert os.fstat(of_a_worker).st_size == 0, "the other's memory is given back, whoever has it"
    os.close(of_a_worker)


class Slow(Segments):
    """Let other tasks run between two looks at the kept segment."""

    @property
    def _kept(self):
        kept = self.__dict__.get("kept")
        time.sleep(0.0001)
        return kept

    @_kept.setter
    def _kept(self, kept):
        self.__dict__["kept"] = kept


def send_at_once(seconds, answer):
    """Send tensors of two sizes from eight tasks at once, as a server and an asynchronous client do.

    A segment is entered in a thread and left in the event loop's thread.
    """
    truncate, end, sent = os.ftruncate, time.monotonic() + seconds, []
    segments, opened = Slow(AdapterError), len(os.listdir("/proc/self/fd"))

    def slowly(*given):
        truncate(*given)
        time.sleep(0.01)  # others have the interpreter meanwhile, as they may have while the kernel frees pages

    os.ftruncate = slowly

    async def send(number):
        chance = random.Random(number)
        while time.monotonic() < end:
            tensor = torch.full((chance.choice([50_000, 60_000]),), float(len(sent) * 8 + number))
            content = header_bytes([("a", tensor.dtype, tensor.shape)]) + tensor.numpy().tobytes()
            with contextlib.suppress(AdapterError), contextlib.ExitStack() as stack:
                if number % 2:
                    path = await asyncio.to_thread(stack.enter_context, segments.filled({"a": tensor}))
                else:
                    segment = await asyncio.to_thread(stack.enter_context, segments.of(len(content)))
                    for start in range(0, len(content), 65536):
                        segment.write(content[start : start + 65536], start)
                        await asyncio.sleep(0)
                    path = segment.path
                for _ in range(chance.randrange(4)):
                    assert await asyncio.to_thread(Path(path).read_bytes) == content
                sent.append(number)
                if chance.random() < 0.1:
                    raise AdapterError

    async def all_of_them():
        await asyncio.gather(*map(send, range(8)))

    asyncio.run(all_of_them())
    answer.send((len(sent), len(os.listdir("/proc/self/fd")) - opened))


@pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_overlapping_senders_never_touch_memory_that_is_gone(seconds):
    """Send in a process of its own, since access to freed memory would end it (SIGBUS)."""
    answer, there = FORK.Pipe(duplex=False)
    sender = FORK.Process(target=send_at_once, args=(seconds, there))
    sender.start()
    sender.join(PATIENCE)
    assert sender.exitcode == 0, f"ended by {sender.exitcode}"
    swaps, left = answer.recv()
    assert swaps > 8 * seconds and left <= 2, "what is not kept is closed"


def test_a_cancelled_task_leaves_its_segment_to_the_next(monkeypatch):
    fill, is_writing, may_end = shared_segment._fill, threading.Event(), threading.Event()

    def slow(*given):
        is_writing.set()
        assert may_end.wait(PATIENCE)
        fill(*given)

    async def run():
        segments = Segments(AdapterError)
        with contextlib.ExitStack() as held:
            path = await shared_segment.enter(segments.filled({"a": A}), held)
            first = os.stat(path).st_ino
        monkeypatch.setattr(shared_segment, "_fill", slow)
        with contextlib.ExitStack() as held:
            task = asyncio.create_task(shared_segment.enter(segments.filled({"a": A}), held))
            await asyncio.to_thread(is_writing.wait, PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        monkeypatch.setattr(shared_segment, "_fill", fill)
        with segments.filled({"a": A + 1}) as path:
            other = os.stat(path).st_ino
            may_end.set()  # the thread writes on, into a file that no other task uses
            async with asyncio.timeout(PATIENCE):
                while segments._kept is None:
                    await asyncio.sleep(0.01)
            assert os.stat(segments._kept.path).st_ino == first != other
            assert load_file(path)["a"].equal(A + 1)

    asyncio.run(run())


@pytest.mark.parametrize("error", [None, AdapterError, RuntimeError])
def test_a_file_of_unknown_size_is_shortened(error):
    """After an error that is no refusal a worker may still read the file."""
    segments = Segments(AdapterError)
    said = pytest.raises(error) if error else contextlib.nullcontext()
    with said, segments.of(100) as segment:
        of_a_worker = os.open(segment.path, os.O_RDONLY)
        for start, chunk in ((0, b"three"), (5, b" pieces"), (12, b".")):
            segment.write(chunk, start)
        segment.shorten(13)
        with open(segment.path, "rb") as file:
            assert file.read() == b"three pieces."
        if error:
            raise error
    assert os.fstat(of_a_worker).st_size == (0 if error is AdapterError else 13)
    os.close(of_a_worker)
    with segments.of(13) as again:
        assert (again is segment) is (error is None), "it is kept at its own size"
        again.content.zero_()


def test_small_tensors_are_copied_in_groups(monkeypatch):
    monkeypatch.setattr(shared_segment, "GROUP", 48)
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in (16, 32, 8, 100, 4, 44, 1)]
    assert [[len(tensor) for tensor in group] for group in shared_segment._groups(tensors)] == [
        [16, 32],
        [8],
        [100],
        [4, 44],
        [1],
    ]


def holders(link):
    """Return the processes that have an unnamed file open or mapped; ``link`` is the kernel's name for it. Other files
    in shared memory, as of parallel tests, do not affect it."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            opened = (os.readlink(entry) for entry in (folder / "fd").iterdir())
            if link in opened or link in (folder / "maps").read_text():
                found.add(int(folder.name))
    return found


@pytest.mark.parametrize("is_refused", [False, True])
def test_memory_that_no_worker_needs_is_given_back(is_refused):
    """Check after another size and after a refusal. Shared memory that is just large enough must take the next
    adapter."""
    segments, large = Segments(AdapterError), torch.ones(64 << 20, dtype=torch.uint8)
    with contextlib.suppress(AdapterError), segments.filled({"a": large}) as path:
        mapped = load_file(path)["a"]
        number = os.open(path, os.O_RDONLY)
        assert mapped[0] == 1 and os.fstat(number).st_blocks * 512 >= large.nbytes
        if is_refused:
            raise AdapterError
    with segments.filled({"a": large[:1000]}):
        assert os.fstat(number).st_blocks == 0
    os.close(number)
    del mapped


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_cannot_be_held_is_refused_and_leaves_nothing(monkeypatch):
    segments = Segments(AdapterError)
    with pytest.raises(NoRoomError, match=f"has no room for {1 << 60} bytes"), segments.of(1 << 60):
        pass
    with pytest.raises(ValueError, match="tensor a has dtype"), segments.filled({"a": A.cfloat()}):
        pass
    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoomError, match="is full: No space left"), segments.filled({"a": A}):
        pass
    assert len(os.listdir("/proc/self/fd")) <= opened, "fewer where garbage was collected meanwhile"


def hold_a_segment(answer):
    segments = Segments(ValueError)
    with segments.filled({"a": torch.ones(9)}) as path:
        answer.send((path, os.readlink(path)))
    time.sleep(600)


def test_a_segment_ends_with_its_sender_though_that_is_killed():
    """Another process can read the segment until then."""
    answer, there = FORK.Pipe(duplex=False)
    sender = FORK.Process(target=hold_a_segment, args=(there,), daemon=True)
    sender.start()
    path, link = answer.recv()
    assert load_file(path)["a"].equal(torch.ones(9))
    assert link.startswith(f"{shared_file.SHARED_MEMORY}/") and holders(link) == {sender.pid}
    sender.kill()
    sender.join()
    assert holders(link) == set()
