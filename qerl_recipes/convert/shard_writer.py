"""Write the files of a checkpoint: shards (one tensor at a time), their index, the config, and copies of the rest."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from qerl_vllm_plugin.weights.checkpoint import CONFIG, INDEX, SINGLE
from qerl_vllm_plugin.weights.formats import OWN_FILE
from qerl_vllm_plugin.wire.safetensors_file import header_bytes

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
OWN = (CONFIG, OWN_FILE, "README.md", "quantize_report.json")  # describe one checkpoint, so they are not copied


@dataclass(frozen=True)
class Entry:
    """Name, dtype and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """A safetensors file that is being written: first the header for ``entries``, then their tensors in that order.

    ``write`` raises ValueError if a tensor is not the next entry; the end of the block does if entries are missing.
    """

    def __init__(self, file: Path, entries: Sequence[Entry]) -> None:
        self._entries = list(entries)
        self._next = 0
        self._stream = file.open("wb")
        self._stream.write(header_bytes((entry.name, entry.dtype, entry.shape) for entry in self._entries))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor."""
        entry = Entry(name, tensor.dtype, tuple(tensor.shape))
        expected = self._entries[self._next] if self._next < len(self._entries) else None
        if entry != expected:
            raise ValueError(f"the next tensor of {self._stream.name} is {expected}, not {entry}")
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


def write_index(folder: Path, places: Mapping[str, str], total: int) -> None:
    """Write the index of the shards, unless there is a single file.

    ``places`` maps each tensor to its file; ``total`` is the size of all tensors in bytes.
    """
    if set(places.values()) != {SINGLE}:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_config(folder: Path, source: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> None:
    """Write config.json from the source's, for BF16 weights or, with its ``quantization`` config, for packed ones."""
    config = {key: value for key, value in source.items() if key not in ("torch_dtype", "quantization_config")}
    config |= {"dtype": "bfloat16"} | ({} if quantization is None else {"quantization_config": quantization})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy the top-level files that hold no weights: tokenizer, generation config, chat template, licence and so on.

    Hidden files stay behind, and those that describe the source alone (``OWN``).
    """
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not file.name.startswith(".") and file.name not in OWN:
            shutil.copyfile(file, folder / file.name)
