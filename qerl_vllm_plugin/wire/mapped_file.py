"""A file in shared memory as a worker sees it: mapped as long as its sender writes it again, and known again.

To map it anew takes a page fault for every few pages of it, and to read its header takes longer than all checks of an
adapter. From its second use on its memory is registered with the GPU's driver, which then copies it at the speed of the
bus; memory that is not goes through a buffer of the driver's.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.logger import init_logger

from qerl_vllm_plugin.wire import cuda_ipc, spans
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.wire.safetensors_file import DTYPES, read_header
from qerl_vllm_plugin.wire.spans import Copied

logger = init_logger("vllm.qerl")

Identity = tuple[int, int, int]  # device, inode, size: of no other file while this one is mapped


@dataclass
class _Mapped:
    """A mapped file: ``memory`` is all of it, as uint8, and ``tensors`` lie in it as ``header`` says, which is empty
    where some of them are copies."""

    identity: Identity
    memory: torch.Tensor
    header: bytes = b""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    is_tried: bool = False
    registered_for: torch.device | None = None  # whose driver reads the memory itself

    def bytes(self, size: int) -> bytes:
        return self.memory[:size].numpy().tobytes()

    def is_as_read(self) -> bool:
        """Whether the tensors of before are those that the file has now, whatever their values."""
        return bool(self.header) and self.bytes(len(self.header)) == self.header


class MappedFile:
    """The file that was found last, until another one is."""

    def __init__(self) -> None:
        self._mapped: _Mapped | None = None

    def open(self, path: str, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of the safetensors file ``path``, where they lie: its sender may write it again once this worker
        has answered.

        Raises OSError, SafetensorError for a file that is none, ValueError for a type that no tensor here has, and
        CudaIPCError.
        """
        found = os.stat(path)
        identity = (found.st_dev, found.st_ino, found.st_size)
        if self._mapped is not None and self._mapped.identity != identity:
            self.close()
        mapped = self._mapped
        is_known = mapped is not None and mapped.is_as_read()
        if not is_known:
            with safe_open(path, framework="pt"):  # refuses what the format does not allow
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
        if is_aligned:  # a copy is of this time's bytes, and must be made again
            mapped.header = mapped.bytes(8 + int.from_bytes(mapped.bytes(8), "little"))

    @property
    def is_whole(self) -> bool:
        """Whether ``fetch`` can be used: the tensors lie in the file, all of them; some may be copies otherwise."""
        return self._mapped is not None and bool(self._mapped.header)

    def fetch(self, pieces: Sequence[torch.Tensor], device: torch.device) -> Copied:
        """Copies on ``device`` of these tensors, or of rows or columns of them; done when it returns."""
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
        """Lets go of the file. Raises CudaIPCError."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None and mapped.registered_for is not None:
            cuda_ipc.unregister(mapped.memory, mapped.registered_for)


def _register(mapped: _Mapped, device: torch.device) -> None:
    """For a sender that comes again: it takes longer than one copy."""
    mapped.is_tried = True
    try:
        cuda_ipc.register(mapped.memory, device)
        mapped.registered_for = device
    except CudaIPCError as error:
        logger.warning_once("adapters reach the GPU through a buffer of its driver, which is slower: %s", str(error))
