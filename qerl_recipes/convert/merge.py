"""Merge base and adapter into one BF16 checkpoint: w = bf16(code * block scale / divisor + alpha / r * B A).

The sum is computed in fp32, with one tensor in memory at a time. The shards keep the base's names. Merging rounds each
weight to BF16 once more, so the merged policy differs from the trained one by that rounding.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from qerl_kernels.nvfp4 import dequantize
from rich.progress import track

from qerl_recipes.convert.shard_writer import Entry, ShardWriter, copy_other_files, write_config, write_index
from qerl_vllm_plugin.adapter.check import AdapterError, CheckedAdapter, Target
from qerl_vllm_plugin.weights.checkpoint import CheckpointReport, check_tensors
from qerl_vllm_plugin.wire.safetensors_file import DTYPES, read_tensor

PACKED, SCALES, DIVISOR = ".weight_packed", ".weight_scale", ".weight_global_scale"
NOT_LINEAR = ("embed_tokens", "lm_head")


def targets(report: CheckpointReport) -> dict[str, Target]:
    """Return the linear layers of a checkpoint that an adapter may change, by module name."""
    layers = {}
    for name, tensor in report.tensors.items():
        module, _, kind = name.rpartition(".")
        is_matrix = len(tensor.shape) == 2 and module.rpartition(".")[2] not in NOT_LINEAR
        if is_matrix and kind in ("weight", "weight_packed"):
            columns = tensor.shape[1] * (2 if kind == "weight_packed" else 1)
            layers[module] = Target(module, 0, columns, tensor.shape[0])
    return layers


def check_norms(report: CheckpointReport, norms: Mapping[str, torch.Tensor]) -> None:
    """Raise AdapterError if the checkpoint has no tensor of the name and shape of a trained norm."""
    for name, weight in norms.items():
        tensor = report.tensors.get(name)
        if tensor is None or tensor.shape != tuple(weight.shape):
            shape = "no such tensor" if tensor is None else f"shape {list(tensor.shape)}"
            raise AdapterError(f"trained norm {name} {list(weight.shape)}: the base has {shape}")


def write(report: CheckpointReport, adapter: CheckedAdapter, norms: Mapping[str, torch.Tensor], partial: Path) -> None:
    """Write the merged checkpoint into the folder ``partial``; copy the tokenizer and other small files."""
    files: dict[str, str] = {}
    total = 0
    for file in track(report.files, description="merging", transient=True):
        entries = list(_entries(report, file, norms))
        if not entries:
            continue
        with ShardWriter(partial / file.name, entries) as writer:
            for entry in entries:
                writer.write(entry.name, _tensor(report, entry, adapter, norms))
                files[entry.name], total = file.name, total + entry.nbytes
    write_index(partial, files, total)
    write_config(partial, report.config, None)
    copy_other_files(report.folder, partial)


def _entries(report: CheckpointReport, file: Path, norms: Mapping[str, torch.Tensor]) -> Iterator[Entry]:
    """Return the tensors of the merged copy of one shard; a packed layer's weight is where its codes were."""
    plain = []
    for name, tensor in report.tensors.items():
        if tensor.file != file or name.endswith((SCALES, DIVISOR)):
            continue
        if name.endswith(PACKED):
            N, half = tensor.shape
            plain.append(Entry(name.removesuffix(PACKED) + ".weight", torch.bfloat16, (N, 2 * half)))
        else:
            dtype = torch.bfloat16 if tensor.dtype in ("F16", "F32") or name in norms else DTYPES[tensor.dtype]
            plain.append(Entry(name, dtype, tensor.shape))
    return iter(sorted(plain, key=lambda entry: -entry.dtype.itemsize))  # wider first keeps all aligned


def _tensor(
    report: CheckpointReport, entry: Entry, adapter: CheckedAdapter, norms: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if entry.name in norms:
        return norms[entry.name].to(torch.bfloat16)
    module = entry.name.removesuffix(".weight")
    if module + PACKED in report.tensors:
        parts = (read_tensor(report.tensors[module + kind]) for kind in (PACKED, SCALES, DIVISOR))
        codes, scales, divisor = parts
        check_tensors(module, codes, scales, divisor)
        w = dequantize(codes, scales).float() / divisor
    else:
        w = read_tensor(report.tensors[entry.name])
    if module in adapter.pairs:
        a, b = adapter.pairs[module]
        w = w.float() + adapter.scaling * (b.float() @ a.float())
    return w.to(entry.dtype)
