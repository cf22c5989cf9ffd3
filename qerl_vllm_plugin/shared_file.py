"""Tensors for workers in other processes of this machine: a file in shared memory, which each of them maps.

The file has no name. Whatever dies, and whenever, nothing of it is left: the kernel frees it with the last process that
has it open or mapped. Others open it as /proc/PID/fd/NUMBER, which takes the same user on the same machine.
"""

import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

SHARED_MEMORY = Path("/dev/shm")
PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")  # of a file without a name, which only its sender writes
MEDIA_TYPE = "application/vnd.qerl.shared-file+json"  # of a request that names a file
SEGMENT, READ, THREADS = 16 << 20, 1 << 20, 8
ROOM = 1 << 20  # left free beside the file: its header, and what others write


def fits(size: int) -> bool:
    """Whether a file of ``size`` bytes can be put there."""
    with suppress(OSError):
        free = os.statvfs(SHARED_MEMORY)
        return os.access(SHARED_MEMORY, os.W_OK) and free.f_bavail * free.f_frsize > size + ROOM
    return False


@contextmanager
def unnamed() -> Iterator[tuple[IO[bytes], str]]:
    """An empty file for ``append`` and the path under which workers can open it, until the end of the block.

    Raises OSError.
    """
    file, path = create()
    with file:
        yield file, path


def create() -> tuple[IO[bytes], str]:
    """``unnamed``, until the file is closed. Raises OSError."""
    # no buffer: closing it must not fail again
    file = tempfile.TemporaryFile(buffering=0, dir=SHARED_MEMORY)  # noqa: SIM115, the caller's to close
    return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


def machine() -> str:
    """What tells this machine, since it was started, from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextmanager
def proof(content: bytes) -> Iterator[str]:
    """The path of an unnamed file that holds ``content``: for ``is_proof``, until the end of the block."""
    with unnamed() as (file, path):
        append(file, content)
        yield path


def is_proof(path: str, content: bytes) -> bool:
    """Whether ``path`` is one that ``open_ours`` opens, and holds ``content``."""
    file = open_ours(path)
    if file is None:
        return False
    with file:
        return secrets.compare_digest(os.pread(file.fileno(), len(content) + 1, 0), content)


def open_ours(path: str) -> IO[bytes] | None:
    """An unnamed file of a running process of this user on this machine, to be read; None for any other path.

    Nobody else can make one: the path leads through /proc of this machine, and the file is this user's. Nothing else is
    opened, whatever a caller gives as a path.
    """
    if not PATH.fullmatch(path):
        return None
    try:
        if not re.fullmatch(rf"{SHARED_MEMORY}/[^/]+ \(deleted\)", os.readlink(path)):
            return None
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(number)
        return None
    return open(number, "rb", buffering=0)


def append(file: IO[bytes], given: Any) -> None:
    """Writes all of a buffer, of which the kernel takes 2 GiB at a time at most. Raises OSError."""
    left = memoryview(given)
    while left:
        left = left[file.write(left) :]


class Digest:
    """SHA-256 over the SHA-256 of each ``SEGMENT`` of a file, by several threads, while the file is being written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._number = file.fileno()
        self._threads = ThreadPoolExecutor(max_workers=THREADS)
        self._begun: list[Future[bytes]] = []

    def grow(self, size: int) -> None:
        """``size`` bytes are written and stay as they are."""
        while (len(self._begun) + 1) * SEGMENT <= size:
            self._begin((len(self._begun) + 1) * SEGMENT)

    def finish(self, size: int) -> str:
        """The digest of the file, which has ``size`` bytes."""
        self.grow(size)
        if len(self._begun) * SEGMENT < size:
            self._begin(size)
        return hashlib.sha256(b"".join(future.result() for future in self._begun)).hexdigest()

    def close(self) -> None:
        """Waits for what has begun; the file may be closed then."""
        self._threads.shutdown(cancel_futures=True)

    def _begin(self, end: int) -> None:
        self._begun.append(self._threads.submit(self._of, len(self._begun) * SEGMENT, end))

    def _of(self, start: int, end: int) -> bytes:
        sha = hashlib.sha256()
        for offset in range(start, end, READ):
            sha.update(os.pread(self._number, min(READ, end - offset), offset))
        return sha.digest()


def content(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as uint8, as a file has them; not copied where they lie so in memory."""
    return tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
