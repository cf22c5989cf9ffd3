"""Files of tensors in shared memory that are written again and again.

A policy in training sends as many bytes each time. To give a new file its pages, and to take them back, takes longer
than to write it: a file that all workers have read is kept for the next of its size, mapped, and written by several
threads at a time, which the kernel does not let them do but through a mapping. Like any file here it has no name and
ends with the processes that have it.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate
from typing import IO, TypeVar

import torch

from qerl_vllm_plugin.wire import shared_file
from qerl_vllm_plugin.wire.safetensors_file import header_bytes

THREADS = 8
GROUP = 8 << 20  # bytes that are copied together
UNSURE = ("", "lost", "engine_dead")  # reasons of a refusal after which a worker may still read; a proxy gives none

T = TypeVar("T")
Create = Callable[[], tuple[IO[bytes], str]]  # a file and its path, as ``shared_file.create``


class NoRoomError(OSError):
    """Shared memory has no room left."""


class Segment:
    """A file of ``size`` bytes: ``content: (size,)`` is its memory here, as uint8, ``path`` where workers open it."""

    def __init__(self, size: int, create: Create = shared_file.create) -> None:
        """Raises NoRoomError."""
        check_room(size)
        self.file, self.path = create()
        try:
            # here, where it is an error: to write to a mapping for which there is no room ends the process
            os.posix_fallocate(self.file.fileno(), 0, size)
        except OSError as error:
            self.file.close()
            raise NoRoomError(f"{shared_file.SHARED_MEMORY} is full: {error.strerror}") from error
        weakref.finalize(self, self.file.close)  # the end of who keeps it is its end, and nobody's neglect
        self.content = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        self._memory = memoryview(self.content.numpy())

    def write(self, chunk: bytes, start: int) -> None:
        """Bytes from byte ``start`` on."""
        self._memory[start : start + len(chunk)] = chunk

    def free(self) -> None:
        """Gives the memory back though workers have it mapped, who must not look at it any more."""
        os.ftruncate(self.file.fileno(), 0)
        self.file.close()


class Growing:
    """A file of a size that nobody has said, of at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        """Raises NoRoomError."""
        check_room(limit)
        self.file, self.path = shared_file.create()

    def write(self, chunk: bytes, start: int) -> None:
        """As ``Segment``'s, where the last write has ended. Raises NoRoomError."""
        try:
            shared_file.append(self.file, chunk)
        except OSError as error:  # others have filled it since
            raise NoRoomError(f"{shared_file.SHARED_MEMORY} is full: {error.strerror}") from error

    def free(self) -> None:
        """As ``Segment``'s."""
        os.ftruncate(self.file.fileno(), 0)
        self.file.close()


def check_room(size: int) -> None:
    """Raises NoRoomError."""
    if not shared_file.fits(size):
        raise NoRoomError(f"{shared_file.SHARED_MEMORY} has no room for {size} bytes")


class Segments:
    """Those of one sender; at most one is kept, and gone with the sender once no worker has it mapped any more.

    Any number of threads and tasks may send at a time. Each has a segment of its own: whoever takes the kept one is its
    only holder until it is put back, and only its holder frees one.

    ``refusal`` is the error by which the sender learns that its workers have answered, and which says no; ``create``
    makes the files.
    """

    def __init__(self, refusal: type[Exception], create: Create = shared_file.create) -> None:
        self._refusal, self._create = refusal, create
        self._kept: Segment | None = None
        self._lock = threading.Lock()  # of ``_kept``: senders are in several threads

    @contextmanager
    def of(self, size: int) -> Iterator[Segment]:
        """One of ``size`` bytes, more than none, of whatever content, until the end of the block.

        At its end all workers must have answered, and it is kept. After an error it is not: after one that is no
        refusal nobody knows whether a worker still reads. Raises NoRoomError.
        """
        found = self._keep(None)
        if found is not None and len(found.content) != size:
            found.free()
            found = None
        found = found or Segment(size, self._create)
        with self._until_an_error(found):
            yield found
        if (surplus := self._keep(found)) is not None:  # two were in use
            surplus.free()

    def _keep(self, segment: Segment | None) -> Segment | None:
        """Keeps this one from now on, and gives the one that was kept to the caller, who is then its only holder."""
        with self._lock:
            kept, self._kept = self._kept, segment
        return kept

    @contextmanager
    def growing(self, limit: int) -> Iterator[Growing]:
        """One of at most ``limit`` bytes, as ``of``; it is not kept, for the next one has another size."""
        found = Growing(limit)
        with self._until_an_error(found):
            yield found
        found.free()

    @contextmanager
    def _until_an_error(self, found: "Segment | Growing") -> Iterator[None]:
        """Frees it after a refusal. After another error, or a refusal whose reason is ``UNSURE``, a worker may still
        read it, and it is only closed here."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, self._refusal) and getattr(error, "reason", "refused") not in UNSURE:
                found.free()
            else:
                found.file.close()
            raise

    @contextmanager
    def filled(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[str]:
        """The path of a safetensors file with copies of ``tensors``, as ``of``.

        Raises NoRoomError, and ValueError for a dtype that the format has no name for.
        """
        header = header_bytes(((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()), metadata)
        with self.of(len(header) + sum(tensor.nbytes for tensor in tensors.values())) as segment:
            segment.content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            _fill(segment.content[len(header) :], tensors.values())
            yield segment.path


async def enter(block: AbstractContextManager[T], held: ExitStack) -> T:
    """Enters a block in a thread, for the beginning of one like ``filled`` takes a while; ``held`` leaves it.

    A thread cannot be cancelled: it ends what it has begun for a task that was, and the block is left after it.
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
    """The bytes of all tensors, one behind the other."""
    groups = list(_groups(tensors))
    ends = list(accumulate(sum(tensor.nbytes for tensor in group) for group in groups))

    def write(group: list[torch.Tensor], end: int) -> None:
        given = [shared_file.content(tensor) for tensor in group]
        torch.cat(given, out=memory[end - sum(map(len, given)) : end])

    # a few at a time: those that are on a GPU need not all fit the CPU twice
    with ThreadPoolExecutor(max_workers=THREADS) as threads:
        list(threads.map(write, groups, ends))


def _groups(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """One behind the other, as many as make up ``GROUP`` bytes: hundreds of small ones take longer by themselves."""
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
