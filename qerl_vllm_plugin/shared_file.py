"""Tensors for workers in other processes of this machine: one file in shared memory, which each of them maps."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARED_MEMORY = Path("/dev/shm")
ROOM = 1 << 20  # left free beside the file: its header, and what others write


def fits(size: int) -> bool:
    """Whether a file of ``size`` bytes can be put there."""
    with suppress(OSError):
        free = os.statvfs(SHARED_MEMORY)
        return os.access(SHARED_MEMORY, os.W_OK) and free.f_bavail * free.f_frsize > size + ROOM
    return False


@contextmanager
def shared(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The path of a safetensors file with copies of ``tensors``, readable by this user alone, until the end of the
    block; raises OSError if there is no room left."""
    handle, path = tempfile.mkstemp(prefix="qerl-", suffix=".safetensors", dir=SHARED_MEMORY)
    os.close(handle)
    try:
        # copies: safetensors refuses tensors that share memory, such as one A under two names
        save_file({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, path)
        yield path
    finally:
        os.unlink(path)
