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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch

from qerl_vllm_plugin.safetensors_header import header_bytes

SHARED_MEMORY = Path("/dev/shm")
SEGMENT, READ, THREADS = 16 << 20, 1 << 20, 8
GROUP, MOST = 8 << 20, 64  # bytes and tensors that are written together
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
    with tempfile.TemporaryFile(buffering=0, dir=SHARED_MEMORY) as file:  # no buffer: closing it must not fail again
        yield file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


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
    """Whether ``path`` is such a file of a running process of this user on this machine, and holds ``content``.

    Nobody else can make one: the path leads through /proc of this machine, and the file is this user's. Nothing else is
    opened, whatever a caller gives as a path.
    """
    if not re.fullmatch(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}", path):
        return False
    try:
        if not re.fullmatch(rf"{SHARED_MEMORY}/[^/]+ \(deleted\)", os.readlink(path)):
            return False
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(number)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        return is_ours and secrets.compare_digest(os.pread(number, len(content) + 1, 0), content)
    finally:
        os.close(number)


def append(file: IO[bytes], given: Any) -> None:
    """Writes all of a buffer, of which the kernel takes 2 GiB at a time at most. Raises OSError."""
    left = memoryview(given)
    while left:
        left = left[file.write(left) :]


def digest(file: IO[bytes], size: int) -> str:
    """SHA-256 over the SHA-256 of each ``SEGMENT`` of a file of ``size`` bytes, by several threads."""

    def of(start: int) -> bytes:
        sha, end = hashlib.sha256(), min(start + SEGMENT, size)
        for offset in range(start, end, READ):
            sha.update(os.pread(file.fileno(), min(READ, end - offset), offset))
        return sha.digest()

    with ThreadPoolExecutor(max_workers=THREADS) as threads:
        return hashlib.sha256(b"".join(threads.map(of, range(0, size, SEGMENT)))).hexdigest()


@contextmanager
def shared(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The path of a safetensors file with copies of ``tensors``, until the end of the block.

    Raises OSError if there is no room left, ValueError for a dtype that the format has no name for.
    """
    with unnamed() as (file, path):
        header = header_bytes((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        append(file, header)
        groups = list(_groups(tensors.values()))
        ends = accumulate((sum(tensor.nbytes for tensor in group) for group in groups), initial=len(header))

        def write(group: list[torch.Tensor], start: int) -> None:
            write_at(file, [content(tensor) for tensor in group], start)

        # a few at a time: those that are on a GPU need not all fit the CPU twice
        with ThreadPoolExecutor(max_workers=THREADS) as threads:
            list(threads.map(write, groups, ends))
        yield path


def _groups(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """One behind the other, as many as make up ``GROUP`` bytes, and no more than the kernel writes at once: to write
    hundreds of small ones takes longer each by itself."""
    group: list[torch.Tensor] = []
    for tensor in tensors:
        if group and (len(group) == MOST or sum(one.nbytes for one in group) + tensor.nbytes > GROUP):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def write_at(file: IO[bytes], given: Sequence[memoryview], start: int) -> None:
    """Writes buffers one behind the other from byte ``start`` on. Raises OSError."""
    left = [one for one in given if one]
    while left:
        written = os.pwritev(file.fileno(), left, start)
        start += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def content(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, as a file has them; not copied where they lie so in memory."""
    return memoryview(tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy())
