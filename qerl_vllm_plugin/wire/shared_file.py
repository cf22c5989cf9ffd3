"""Tensors for workers in other processes of this machine: a file in shared memory, which each of them maps.

The file has no name. Whatever dies, and whenever, nothing of it is left: the kernel frees it with the last process that
has it open or mapped. Others open it as /proc/PID/fd/NUMBER, which takes the same user on the same machine.

A server opens such a path for a caller only where the caller has made the file. Content does not show that: whoever
may send a body chooses the content of a file of the server's, and process and file numbers can be guessed. So a client
creates its files under a random name, removes the name at once, and tells it with the path (a ticket). The kernel
goes on showing the name that a file was created under, next to the path. A caller over HTTP cannot choose it, for the
server's own files are created without one, and cannot guess that of another process's file. Neither an old path, whose
number is another file's by now, nor a file meant for another server is opened in its place.
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
TICKET = re.compile(rf"({PATH.pattern})/(qerl-[0-9a-f]{{32}})")  # a path, and the name that its file was created under
MEDIA_TYPE = "application/vnd.qerl.shared-file+json"  # of a request that names a file
SEGMENT, READ, THREADS = 16 << 20, 1 << 20, 8
ROOM = 1 << 20  # left free beside the file: its header, and what others write


def fits(size: int) -> bool:
    """Whether a file of ``size`` bytes can be put there."""
    with suppress(OSError):
        free = os.statvfs(SHARED_MEMORY)
        return os.access(SHARED_MEMORY, os.W_OK) and free.f_bavail * free.f_frsize > size + ROOM
    return False


def create() -> tuple[IO[bytes], str]:
    """An empty file for ``append``, and the path under which workers can open it until it is closed. Raises OSError."""
    # no buffer: closing it must not fail again
    file = tempfile.TemporaryFile(buffering=0, dir=SHARED_MEMORY)  # noqa: SIM115, the caller's to close
    return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


def create_for_server() -> tuple[IO[bytes], str]:
    """``create`` for a file of which ``ticket`` tells a server that it was made for it. Raises OSError.

    It has its name for a moment: an empty file is left of a process that is killed just then.
    """
    name = f"{SHARED_MEMORY}/qerl-{secrets.token_hex(16)}"
    number = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(name)
    return open(number, "r+b", buffering=0), f"/proc/{os.getpid()}/fd/{number}"


def ticket(path: str) -> str:
    """What opens the file ``path`` of ``create_for_server`` to a server of this user and machine. Raises OSError."""
    return f"{path}/{Path(os.readlink(path)).name.removesuffix(' (deleted)')}"


def machine() -> str:
    """What tells this machine, since it was started, from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextmanager
def proof(content: bytes) -> Iterator[str]:
    """The ticket of a file that holds ``content``: for ``is_proof``, until the end of the block. Raises OSError."""
    file, path = create_for_server()
    with file:
        append(file, content)
        yield ticket(path)


def is_proof(given: str, content: bytes) -> bool:
    """Whether ``open_ticket`` opens the file of this ticket, and it holds ``content``."""
    file = open_ticket(given)
    if file is None:
        return False
    with file:
        return secrets.compare_digest(os.pread(file.fileno(), len(content) + 1, 0), content)


def open_ticket(given: str) -> IO[bytes] | None:
    """The file of a ticket, to be read; None for any other text.

    Its maker is a process of this user on this machine, for the file is this user's and the path leads through /proc
    of this machine; it has told the caller the ticket, or is the caller. Any other file is looked at, and not opened.
    """
    if not (parts := TICKET.fullmatch(given)):
        return None
    path, name = parts.groups()
    try:
        number = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        here, found = f"/proc/self/fd/{number}", os.fstat(number)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 0
        expected = f"{SHARED_MEMORY}/{name} (deleted)".encode()
        is_so_named = secrets.compare_digest(os.fsencode(os.readlink(here)), expected)
        return open(here, "rb", buffering=0) if is_ours and is_so_named else None
    finally:
        os.close(number)


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
