"""Write the files of a checkpoint: shards, their index, the config, and copies of the rest.

``repack`` rewrites a checkpoint that has NVFP4 weights in another form as compressed-tensors W4A16. Codes and block
scales are copied byte by byte, and ModelOpt's tensor scales become divisors. FP8 layers become BF16. The scales of
activations and of the KV cache are left out.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from rich.progress import track

from qerl_vllm_plugin.weights.checkpoint import CONFIG, INDEX, SINGLE, CheckpointReport, check_tensors
from qerl_vllm_plugin.weights.formats import COMPRESSED, FP8, NVFP4, OWN_FILE, Nvfp4Scheme, expand_fp8
from qerl_vllm_plugin.wire.safetensors_file import DTYPES, TensorHeader, header_bytes, read_tensor

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
OWN = (CONFIG, OWN_FILE, "README.md", "quantize_report.json")  # describe one checkpoint, so they are not copied
LEFT_OUT = ("input_scale", "input_global_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Entry:
    """Name, dtype and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_shards(
    folder: Path, shards: Mapping[str, Sequence[Entry]], tensor: Callable[[Entry], torch.Tensor], progress: str
) -> None:
    """Write safetensors files and, unless there is a single one, their index, with one tensor in memory at a time.

    ``shards`` maps each file's name to its tensors, and ``tensor`` returns their values: in a file of the wider dtypes
    first, which keeps every tensor aligned. ``progress`` names the work on the terminal.
    """
    places: dict[str, str] = {}
    total = 0
    for name, entries in track(shards.items(), progress, transient=True):
        ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
        if not ordered:
            continue
        with (folder / name).open("wb") as stream:
            stream.write(header_bytes((entry.name, entry.dtype, entry.shape) for entry in ordered))
            for entry in ordered:
                write_tensor(stream, entry, tensor(entry))
                places[entry.name], total = name, total + entry.nbytes
    if set(places.values()) != {SINGLE}:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_tensor(stream: BinaryIO, entry: Entry, tensor: torch.Tensor) -> None:
    """Append the values of one entry to a safetensors file."""
    if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
        raise ValueError(f"{entry.name} is {tensor.dtype} {list(tensor.shape)}, but its header says {entry}")
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    stream.write(memoryview(flat.view(torch.uint8).numpy()))


def write_config(folder: Path, source: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> None:
    """Write config.json from the source's, for BF16 weights or, with its ``quantization`` config, for packed ones."""
    config = {key: value for key, value in source.items() if key not in ("torch_dtype", "quantization_config")}
    config |= {"dtype": "bfloat16"} | ({} if quantization is None else {"quantization_config": quantization})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy the top-level files without weights, but for hidden ones and those about the source alone (``OWN``)."""
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not file.name.startswith(".") and file.name not in OWN:
            shutil.copyfile(file, folder / file.name)


@contextlib.contextmanager
def naming_target(target: Path) -> Iterator[None]:
    """Add the destination and the free space to an OSError, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(target.parent).free
        raise OSError(
            error.errno, f"{target} could not be written ({error}; {free / 1e6:,.0f} MB free); nothing was changed"
        ) from error


def repack(report: CheckpointReport, folder: Path) -> tuple[str, ...]:
    """Write the shards and their index; return the layers left unpacked. Raises CheckpointError for bad values."""
    scheme = report.scheme
    assert scheme is not None
    sources = {name: t for t in report.tensors.values() if (name := _repacked_name(t, scheme)) is not None}
    shards: dict[str, list[Entry]] = {}
    for name, tensor in sources.items():
        shards.setdefault(tensor.file.name, []).append(_repacked_entry(name, tensor))
    write_shards(
        folder, dict(sorted(shards.items())), lambda entry: _repacked(sources[entry.name], entry, report), "rewriting"
    )
    for module in report.layers_as(NVFP4):
        parts = (read_tensor(report.tensors[f"{module}.{part}"]) for part in scheme.format.packed_names)
        codes, block_scales, scale = parts
        check_tensors(module, codes, block_scales, scheme.format.divisor(module, scale))
    dense = [name for name in report.layers_as(None) if not name.endswith("embed_tokens")]
    return tuple(dict.fromkeys((*dense, *report.layers_as(FP8), "lm_head")))


def _repacked_name(tensor: TensorHeader, scheme: Nvfp4Scheme) -> str | None:
    """Return the name of a tensor in the new files, or None if it is left out."""
    module, _, suffix = tensor.name.rpartition(".")
    kind = scheme.kind(module)
    if suffix in LEFT_OUT or (kind == FP8 and suffix == "weight_scale"):
        return None
    names = dict(zip(scheme.format.packed_names, COMPRESSED.packed_names, strict=True))
    is_packed = kind == NVFP4 and (suffix != "weight" or tensor.dtype == "U8")
    return f"{module}.{names.get(suffix, suffix)}" if is_packed else tensor.name


def _repacked_entry(name: str, tensor: TensorHeader) -> Entry:
    if name.endswith(f".{COMPRESSED.tensor_scale}"):
        return Entry(name, torch.float32, (1,))
    is_fp8 = tensor.dtype == "F8_E4M3" and name.endswith(".weight")
    return Entry(name, torch.bfloat16 if is_fp8 else DTYPES[tensor.dtype], tensor.shape)


def _repacked(tensor: TensorHeader, entry: Entry, report: CheckpointReport) -> torch.Tensor:
    assert report.scheme is not None
    module, _, suffix = entry.name.rpartition(".")
    value = read_tensor(tensor)
    if suffix == COMPRESSED.tensor_scale:
        return report.scheme.format.divisor(module, value.reshape(1))
    if tensor.dtype == "F8_E4M3" and suffix == "weight":
        return expand_fp8(module, value, read_tensor(report.tensors[f"{module}.weight_scale"]))
    return value
