"""Share tensors with workers in other processes of this machine: a file in shared memory, which each of them maps.

The file has no name. Whichever process dies, and whenever, nothing of it is left: the kernel frees it with the last
process that has it open or mapped. Others open it as /proc/PID/fd/NUMBER, which takes the same user on the same
machine.

A server opens such a path for a caller only if the caller has made the file. The file's content cannot show that:
whoever may send a body chooses the content of a file of the server's, and process and file numbers can be guessed. So
files are created under a random name, which is removed at once. A client tells it with the path (a ticket).

The kernel goes on showing the name that a file was created under, next to the path. A caller over HTTP cannot choose or
guess that name, neither of the server's own files nor of another process's. An old path, whose number is another file's
by now, is not opened, and neither is a file that was meant for another server.
"""

import hashlib
import os
import re
import secrets
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch

SHARED_MEMORY = Path("/dev/shm")
PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")  # a file without a name, which only its sender writes
TICKET = re.compile(rf"({PATH.pattern})/(qerl-[0-9a-f]{{32}})")  # a path, and the name that its file was created under
MEDIA_TYPE = "application/vnd.qerl.shared-file+json"  # content type of a request that names a file
SEGMENT, READ, THREADS = 16 << 20, 1 << 20, 8
ROOM = 1 << 20  # bytes left free beside the file, for its header and other programs


def fits(size: int) -> bool:
    """Return True if shared memory is writable and has room for a file of ``size`` bytes."""
    with suppress(OSError):
        free = os.statvfs(SHARED_MEMORY)
        return os.access(SHARED_MEMORY, os.W_OK) and free.f_bavail * free.f_frsize > size + ROOM
    return False


def create() -> tuple[IO[bytes], str]:
    """Return an empty file, with the path at which workers open it until it is closed.

    The file has its name for a moment: a process that is killed just then leaves an empty file. Raises OSError.
    """
    name = f"{SHARED_MEMORY}/qerl-{secrets.token_hex(16)}"
    number = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(name)
    # unbuffered: closing it must not write, and so cannot fail again
    return open(number, "r+b", buffering=0), f"/proc/{os.getpid()}/fd/{number}"


def ticket(path: str) -> str:
    """Return the ticket by which a server opens a file of ``create`` on this machine; raise OSError."""
    return f"{path}/{Path(os.readlink(path)).name.removesuffix(' (deleted)')}"


def machine() -> str:
    """Return the kernel's boot id, which tells this machine, since it was started, from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def open_ticket(given: str) -> IO[bytes] | None:
    """Open the file of a ticket for reading; return None for any other text.

    The file was made by a process of this user on this machine, for this user owns it and its path leads through this
    machine's /proc. That process has told the caller the ticket, or is the caller. Any other file is only inspected,
    and not opened for reading.
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


class Digest:
    """Compute a file's digest, the SHA-256 over that of each ``SEGMENT``, in threads while it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._number = file.fileno()
        self._threads = ThreadPoolExecutor(max_workers=THREADS)
        self._begun: list[Future[bytes]] = []

    def grow(self, size: int) -> None:
        """Note that the first ``size`` bytes are written and will not change; start to hash their whole segments."""
        while (len(self._begun) + 1) * SEGMENT <= size:
            self._begin((len(self._begun) + 1) * SEGMENT)

    def finish(self, size: int) -> str:
        """Return the digest of the finished file of ``size`` bytes, in hexadecimal."""
        self.grow(size)
        if len(self._begun) * SEGMENT < size:
            self._begin(size)
        return hashlib.sha256(b"".join(future.result() for future in self._begun)).hexdigest()

    def close(self) -> None:
        """Wait for the hashing that has begun and cancel the rest; after that the file may be closed."""
        self._threads.shutdown(cancel_futures=True)

    def _begin(self, end: int) -> None:
        self._begun.append(self._threads.submit(self._of, len(self._begun) * SEGMENT, end))

    def _of(self, start: int, end: int) -> bytes:
        sha = hashlib.sha256()
        for offset in range(start, end, READ):
            sha.update(os.pread(self._number, min(READ, end - offset), offset))
        return sha.digest()


def content(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as uint8, as a file stores them; a contiguous tensor on the CPU is not copied."""
    return tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
