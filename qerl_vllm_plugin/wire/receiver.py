"""Read what a sender has sent to a worker: tensors as they are, a description of GPU memory, or a safetensors file.

A sender's file in shared memory stays mapped for as long as the sender rewrites the same file. Mapping the file again
costs a page fault for every few of its pages, and reading its header takes longer than all checks of an adapter. From
the file's second use on, its memory is registered with the GPU's driver, which then copies it at the speed of the
bus. Memory that is not registered goes through a buffer of the driver's.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, load_file
from vllm.logger import init_logger

from qerl_vllm_plugin.wire import cuda_ipc, gpu_memory, spans
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.wire.safetensors_file import DTYPES, Tensors, read_header
from qerl_vllm_plugin.wire.shared_file import PATH
from qerl_vllm_plugin.wire.spans import Copied, Fetch

logger = init_logger("vllm.qerl")

Identity = tuple[int, int, int]  # device, inode, size: no other file has them while this one is mapped


@dataclass
class _Mapped:
    """Hold a mapped file: ``memory`` is all of it, as uint8, ``tensors`` are views of it at the places in ``header``.

    ``header`` is empty if some of the tensors are copies. ``is_tried``: registration with the driver has been
    attempted.
    """

    identity: Identity
    memory: torch.Tensor
    header: bytes = b""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    is_tried: bool = False
    registered_for: torch.device | None = None  # the GPU whose driver reads the memory directly

    def bytes(self, size: int) -> bytes:
        return self.memory[:size].numpy().tobytes()

    def is_as_read(self) -> bool:
        """Return True if the file still has the header that was read: the same tensors, whatever their values."""
        return bool(self.header) and self.bytes(len(self.header)) == self.header


class MappedFile:
    """Hold the file that was opened last, until another one is opened."""

    def __init__(self) -> None:
        self._mapped: _Mapped | None = None

    def open(self, path: str, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the tensors of the safetensors file ``path`` as views of it; misaligned ones are copies.

        The sender may rewrite the file once this worker has answered.

        Raises OSError, SafetensorError for a file that is not safetensors, ValueError for a dtype that is not
        supported, and CudaIPCError.
        """
        found = os.stat(path)
        identity = (found.st_dev, found.st_ino, found.st_size)
        if self._mapped is not None and self._mapped.identity != identity:
            self.close()
        mapped = self._mapped
        is_known = mapped is not None and mapped.is_as_read()
        if not is_known:
            with safe_open(path, framework="pt"):  # raises for a file that breaks the format
                pass
        if mapped is None:
            memory = torch.from_file(path, shared=True, size=found.st_size, dtype=torch.uint8)
            mapped = self._mapped = _Mapped(identity, memory)
        elif device.type == "cuda" and not mapped.is_tried:
            _register(mapped, device)
        if not is_known:
            self._read(mapped, path)
        return dict(mapped.tensors)

    def _read(self, mapped: _Mapped, path: str) -> None:
        mapped.header, mapped.tensors = b"", {}
        is_aligned = True
        for name, entry in read_header(Path(path)).items():
            dtype, raw = DTYPES[entry.dtype], mapped.memory[entry.offset : entry.offset + entry.nbytes]
            if entry.offset % dtype.itemsize:
                raw, is_aligned = raw.clone(), False
            mapped.tensors[name] = raw.view(dtype).view(entry.shape)
        if is_aligned:  # a copy holds this file's current bytes, and must be made again next time
            mapped.header = mapped.bytes(8 + int.from_bytes(mapped.bytes(8), "little"))

    @property
    def is_whole(self) -> bool:
        """Return True if ``fetch`` can be used: every tensor is a view of the file, and none a copy."""
        return self._mapped is not None and bool(self._mapped.header)

    def fetch(self, pieces: Sequence[torch.Tensor], device: torch.device) -> Copied:
        """Copy the file's tensors, or rows or columns of them, to ``device``, and wait for the copies to finish."""
        assert self._mapped is not None and self.is_whole
        memory = self._mapped.memory
        planned = spans.plan(pieces, len(memory))
        room = torch.empty(planned.size, dtype=torch.uint8, device=device)
        for source, target, size in planned.spans:
            room[target : target + size].copy_(memory[source : source + size], non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return Copied(pieces, planned.starts, room)

    def close(self) -> None:
        """Forget the file, and unregister its memory. Raises CudaIPCError."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None and mapped.registered_for is not None:
            cuda_ipc.unregister(mapped.memory, mapped.registered_for)


@contextmanager
def decoded(sent: Any, device: torch.device, file: MappedFile) -> Iterator[tuple[Tensors | None, Fetch | None]]:
    """Yield the tensors that were sent, by name, and what copies them or parts of them to ``device``.

    ``sent`` is what ``Sender.deliver`` sends (sender.py), the path of any other safetensors file, or None. Tensors in
    another process's GPU memory are on the meta device. For tensors that this process has itself, there is nothing that
    copies them. All of it is valid inside the ``with`` block.

    Raises SafetensorError for what is no safetensors file, ValueError for a damaged description of GPU memory, and
    CudaIPCError for memory that this worker cannot read.
    """
    if isinstance(sent, str) and sent.startswith("{"):
        with gpu_memory.mapped(sent, device) as found:
            yield found.tensors, found.fetch
    elif isinstance(sent, str) and PATH.fullmatch(sent):
        tensors = file.open(sent, device)
        yield tensors, file.fetch if file.is_whole and device.type == "cuda" else None
    elif isinstance(sent, str):
        yield load_file(sent), None
    else:
        yield load(bytes(sent)) if isinstance(sent, bytes | bytearray | memoryview) else sent, None


def _register(mapped: _Mapped, device: torch.device) -> None:
    """Register the file's memory, which pays only for a sender that comes again; log a failure once."""
    mapped.is_tried = True
    try:
        cuda_ipc.register(mapped.memory, device)
        mapped.registered_for = device
    except CudaIPCError as error:
        logger.warning_once("adapters reach the GPU through a buffer of its driver, which is slower: %s", str(error))
