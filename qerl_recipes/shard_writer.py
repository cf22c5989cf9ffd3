"""A safetensors file written one tensor at a time: the memory needed is one tensor, not one file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from qerl_vllm_plugin.safetensors_header import DTYPE_NAMES


@dataclass(frozen=True)
class Entry:
    """A tensor to come: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """Writes the header for ``entries``, then takes the tensors in that order.

    Raises ValueError where a tensor is not the next entry, or at the end where entries are missing.
    """

    def __init__(self, file: Path, entries: Sequence[Entry]) -> None:
        self._entries = list(entries)
        self._next = 0
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in self._entries:
            begin, end = end, end + entry.nbytes
            header[entry.name] = {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as the safetensors library aligns them
        self._stream = file.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor."""
        given = Entry(name, tensor.dtype, tuple(tensor.shape))
        expected = self._entries[self._next] if self._next < len(self._entries) else None
        if given != expected:
            raise ValueError(f"the next tensor of {self._stream.name} is {expected}, not {given}")
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        self._stream.write(memoryview(flat.view(torch.uint8).numpy()))
        self._next += 1

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        if kind is None and self._next != len(self._entries):
            raise ValueError(f"{self._stream.name}: tensor {self._entries[self._next].name} was never written")
