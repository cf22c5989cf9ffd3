"""Keep files of tensors in shared memory and rewrite them for each send.

A policy in training sends the same number of bytes each time. Giving a new file its pages, and taking them back, takes
longer than writing it. So a file that all workers have read is kept, mapped, for the next send of its size. Several
threads write it at a time, which the kernel allows only through a mapping. Like any file here, it has no name and ends
with the processes that have it open or mapped.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate
from typing import TypeVar

import torch

from qerl_vllm_plugin.wire import shared_file
from qerl_vllm_plugin.wire.safetensors_file import header_bytes

THREADS = 8
GROUP = 8 << 20  # bytes that one thread copies at once
UNSURE = ("", "lost", "engine_dead")  # a worker may still read after a refusal for these reasons; a proxy gives none

T = TypeVar("T")


class NoRoomError(OSError):
    """Report that shared memory has no room left."""


class Segment:
    """Hold a file in shared memory, which workers open at ``path``; ``content: (size,)`` is its memory here, uint8."""

    def __init__(self, size: int) -> None:
        """Raise NoRoomError if there is no room."""
        if not shared_file.fits(size):
            raise NoRoomError(f"{shared_file.SHARED_MEMORY} has no room for {size} bytes")
        self.file, self.path = shared_file.create()
        try:
            # here a lack of room is an error; writing to a mapping that has no room ends the process
            os.posix_fallocate(self.file.fileno(), 0, size)
        except OSError as error:
            self.file.close()
            raise NoRoomError(f"{shared_file.SHARED_MEMORY} is full: {error.strerror}") from error
        weakref.finalize(self, self.file.close)  # closes the file when its holder is gone, without a ResourceWarning
        self.content = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        self._memory = memoryview(self.content.numpy())

    def write(self, chunk: bytes, start: int) -> None:
        """Write ``chunk`` from byte ``start`` on."""
        self._memory[start : start + len(chunk)] = chunk

    def shorten(self, size: int) -> None:
        """Keep the first ``size`` bytes alone, and give back the memory of the others."""
        os.ftruncate(self.file.fileno(), size)
        self.content = self.content[:size]

    def free(self) -> None:
        """Give the memory back although workers have it mapped; they must not read it any more."""
        os.ftruncate(self.file.fileno(), 0)
        self.file.close()


class Segments:
    """Hold the segments of one sender, of which at most one is kept between sends.

    The kept one ends with the sender, once no worker has it mapped any more. Any number of threads and tasks may send
    at a time, each with a segment of its own. Whoever takes the kept segment is its only holder until it is put back,
    and only its holder frees a segment.

    ``refusal``: the error that a sender gets when its workers have answered no.
    """

    def __init__(self, refusal: type[Exception]) -> None:
        self._refusal = refusal
        self._kept: Segment | None = None
        self._lock = threading.Lock()  # guards ``_kept``: senders run in several threads

    @contextmanager
    def of(self, size: int) -> Iterator[Segment]:
        """Yield a segment of ``size`` bytes, at least one, with arbitrary content.

        When the block ends, all workers must have answered; the segment is then kept. After an error it is not kept:
        unless the error is a refusal, nobody knows whether a worker still reads it. Raises NoRoomError.
        """
        found = self._keep(None)
        if found is not None and len(found.content) != size:
            found.free()
            found = None
        found = found or Segment(size)
        try:
            yield found
        except BaseException as error:
            if isinstance(error, self._refusal) and getattr(error, "reason", "refused") not in UNSURE:
                found.free()
            else:
                found.file.close()  # a worker may still read it
            raise
        if (surplus := self._keep(found)) is not None:  # two segments were in use at a time
            surplus.free()

    def _keep(self, segment: Segment | None) -> Segment | None:
        """Keep this segment, and return the one that was kept before; the caller is then its only holder."""
        with self._lock:
            kept, self._kept = self._kept, segment
        return kept

    @contextmanager
    def filled(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[str]:
        """Copy ``tensors`` into a safetensors file; yield its path, under the same rules as ``of``.

        Raises NoRoomError, and ValueError for a dtype that the format has no name for.
        """
        header = header_bytes(((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()), metadata)
        with self.of(len(header) + sum(tensor.nbytes for tensor in tensors.values())) as segment:
            segment.content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            _fill(segment.content[len(header) :], tensors.values())
            yield segment.path


async def enter(block: AbstractContextManager[T], held: ExitStack) -> T:
    """Enter a context manager in a thread, because entering one like ``filled`` takes a while; ``held`` leaves it.

    A thread cannot be cancelled. If the task is, the thread finishes entering, and the context is left after that.
    """
    own = ExitStack()
    begun = asyncio.ensure_future(asyncio.to_thread(own.enter_context, block))
    try:
        found = await asyncio.shield(begun)
    except asyncio.CancelledError:
        begun.add_done_callback(lambda _: own.close())
        raise
    held.enter_context(own)
    return found


def _fill(memory: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Write the bytes of all tensors to ``memory``, one behind the other."""
    groups = list(_groups(tensors))
    ends = list(accumulate(sum(tensor.nbytes for tensor in group) for group in groups))

    def write(group: list[torch.Tensor], end: int) -> None:
        given = [shared_file.content(tensor) for tensor in group]
        torch.cat(given, out=memory[end - sum(map(len, given)) : end])

    # a few groups at a time: tensors on a GPU need not all fit into CPU memory twice
    with ThreadPoolExecutor(max_workers=THREADS) as threads:
        list(threads.map(write, groups, ends))


def _groups(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group consecutive tensors up to ``GROUP`` bytes: hundreds of small ones take longer one by one."""
    group: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > GROUP:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group
