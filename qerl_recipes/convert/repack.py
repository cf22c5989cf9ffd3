"""Rewrite a checkpoint that has NVFP4 weights in another form as compressed-tensors W4A16.

Codes and block scales are copied byte by byte, and ModelOpt's tensor scales become divisors. FP8 layers become BF16.
The scales of activations and of the KV cache are left out.
"""

from pathlib import Path

import torch

from qerl_recipes.convert.shard_writer import Entry, ShardWriter, write_index
from qerl_vllm_plugin.weights.checkpoint import FP8, NVFP4, CheckpointReport, check_tensors
from qerl_vllm_plugin.weights.formats import COMPRESSED, Nvfp4Scheme, expand_fp8
from qerl_vllm_plugin.wire.safetensors_file import DTYPES, TensorHeader, read_tensor

LEFT_OUT = ("input_scale", "input_global_scale", "k_scale", "v_scale")


def repack(report: CheckpointReport, partial: Path) -> tuple[str, ...]:
    """Write the shards and their index into ``partial``, and return the layers that are not packed, for ``ignore``.

    Raise CheckpointError for a packed layer with unusable values; they are checked when the shards are written.
    """
    assert report.scheme is not None
    places: dict[str, str] = {}
    total = 0
    for file in report.files:
        tensors = {_new_name(t, report.scheme): t for t in report.tensors.values() if t.file == file}
        entries = [_entry(name, tensor) for name, tensor in tensors.items() if name is not None]
        entries.sort(key=lambda entry: -entry.dtype.itemsize)  # this keeps every tensor aligned
        if not entries:
            continue
        with ShardWriter(partial / file.name, entries) as writer:
            for entry in entries:
                places[entry.name] = file.name
                total += entry.nbytes
                writer.write(entry.name, _value(entry.name, tensors[entry.name], report))
    write_index(partial, places, total)
    for module in report.layers_as(NVFP4):
        _check_values(report, module)
    dense = [name for name in report.layers_as(None) if not name.endswith("embed_tokens")]
    return tuple(dict.fromkeys((*dense, *report.layers_as(FP8), "lm_head")))


def _new_name(tensor: TensorHeader, scheme: Nvfp4Scheme) -> str | None:
    """Return the name of a tensor in the new files, or None if it is left out."""
    module, _, suffix = tensor.name.rpartition(".")
    if suffix in LEFT_OUT:
        return None
    kind = scheme.kind(module)
    if kind == FP8 and suffix == "weight_scale":
        return None
    names = dict(zip(scheme.format.packed_names, COMPRESSED.packed_names, strict=True))
    is_packed = kind == NVFP4 and (suffix != "weight" or tensor.dtype == "U8")
    return f"{module}.{names.get(suffix, suffix)}" if is_packed else tensor.name


def _entry(name: str, tensor: TensorHeader) -> Entry:
    if name.endswith(f".{COMPRESSED.tensor_scale}"):
        return Entry(name, torch.float32, (1,))
    is_fp8 = tensor.dtype == "F8_E4M3" and name.endswith(".weight")
    return Entry(name, torch.bfloat16 if is_fp8 else DTYPES[tensor.dtype], tensor.shape)


def _value(name: str, tensor: TensorHeader, report: CheckpointReport) -> torch.Tensor:
    assert report.scheme is not None
    module, _, suffix = name.rpartition(".")
    value = read_tensor(tensor)
    if suffix == COMPRESSED.tensor_scale:
        return report.scheme.format.divisor(module, value.reshape(1))
    if tensor.dtype == "F8_E4M3" and suffix == "weight":
        return expand_fp8(module, value, read_tensor(report.tensors[f"{module}.weight_scale"]))
    return value


def _check_values(report: CheckpointReport, module: str) -> None:
    assert report.scheme is not None
    names = report.scheme.format.packed_names
    codes, block_scales, scale = (read_tensor(report.tensors[f"{module}.{name}"]) for name in names)
    check_tensors(module, codes, block_scales, report.scheme.format.divisor(module, scale))
