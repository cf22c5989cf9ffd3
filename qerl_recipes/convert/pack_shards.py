"""Pack a checkpoint in two passes, with one tensor in memory at a time.

The first pass finds the largest magnitude of each weight. It is needed because q/k/v share a tensor scale, as do
gate/up, and their parts may lie in different shards. The second pass packs and writes. FP16 and FP32 tensors of the
model become BF16 first, so the bytes are those of quantizing the same model while it is loaded.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from qerl_kernels.nvfp4 import GROUP_SIZE, NVFP4Weight, dequantize, divisor_from_amax
from rich.progress import track

from qerl_recipes.convert.plan import Plan
from qerl_recipes.convert.report import LayerError
from qerl_recipes.convert.shard_writer import Entry, ShardWriter, write_index
from qerl_vllm_plugin.weights.checkpoint import CheckpointReport
from qerl_vllm_plugin.wire.safetensors_file import DTYPES, CheckpointError, TensorHeader, read_tensor

CHUNK_ELEMENTS = 1 << 20  # packed at once; this bounds the memory of the fp32 intermediates
HALF_OR_FULL = ("F16", "F32")


def _load(tensor: TensorHeader, plan: Plan) -> torch.Tensor:
    """Read a tensor, in BF16 if it is an FP16 or FP32 tensor of the model.

    Others, such as the constants that some checkpoints carry, stay as they are.
    """
    value = read_tensor(tensor)
    return value.bfloat16() if _becomes_bf16(tensor, plan) else value


def _becomes_bf16(tensor: TensorHeader, plan: Plan) -> bool:
    module = tensor.name.removesuffix(".weight")
    return tensor.dtype in HALF_OR_FULL and (tensor.name in plan.parameters or module in plan.linears)


def find_divisors(report: CheckpointReport, plan: Plan, device: str) -> dict[str, torch.Tensor]:
    """Run the first pass and return the divisor of each packed layer, which the layers of a group share.

    Raise CheckpointError for a tensor with a NaN, an infinity or a value too large for BF16.
    """
    largest: dict[str, torch.Tensor] = {}
    for name, tensor in _progress(report.tensors.items(), "reading"):
        value = _load(tensor, plan).to(device)
        if not value.is_floating_point() or value.numel() == 0:
            continue
        low, high = torch.aminmax(value)
        amax = torch.maximum(-low, high).cpu()
        if not torch.isfinite(amax):
            count = int((~torch.isfinite(value)).sum())
            raise CheckpointError(
                f"{tensor.file}: tensor {name} holds {count} values that are NaN, infinite or too large for BF16; a"
                " checkpoint must be finite: repair or download it again"
            )
        if (group := plan.linears.get(name.removesuffix(".weight"))) is not None and name.endswith(".weight"):
            largest[group] = torch.maximum(largest.get(group, amax), amax)
    return {name: divisor_from_amax(largest[group]) for name, group in plan.linears.items()}


def packed_entries(report: CheckpointReport, plan: Plan, file: Path) -> list[Entry]:
    """Return the tensors of the packed copy of one shard, the wider dtypes first so that every tensor is aligned."""
    scales, plain, packed = [], [], []
    for name, tensor in report.tensors.items():
        module = name.removesuffix(".weight")
        if tensor.file != file:
            continue
        if module in plan.linears and module != name:
            N, K = tensor.shape
            scales.append(Entry(f"{module}.weight_global_scale", torch.float32, (1,)))
            packed.append(Entry(f"{module}.weight_packed", torch.uint8, (N, K // 2)))
            packed.append(Entry(f"{module}.weight_scale", torch.float8_e4m3fn, (N, K // GROUP_SIZE)))
        else:
            dtype = torch.bfloat16 if _becomes_bf16(tensor, plan) else DTYPES[tensor.dtype]
            plain.append(Entry(name, dtype, tensor.shape))
    return scales + sorted(plain, key=lambda entry: -entry.dtype.itemsize) + packed


def write_shards(
    report: CheckpointReport,
    plan: Plan,
    divisors: dict[str, torch.Tensor],
    partial: Path,
    pack: Callable[[torch.Tensor, torch.Tensor], NVFP4Weight],
    device: str,
) -> list[LayerError]:
    """Run the second pass: write the shards and their index into ``partial``, and return each layer's error."""
    layers: dict[str, LayerError] = {}
    places: dict[str, str] = {}
    total = 0
    for file in _progress(report.files, "packing"):
        entries = packed_entries(report, plan, file)
        with ShardWriter(partial / file.name, entries) as writer:
            for entry in entries:
                places[entry.name] = file.name
                total += entry.nbytes
                module, _, kind = entry.name.rpartition(".")
                if kind == "weight_global_scale" and module in divisors:
                    writer.write(entry.name, divisors[module].reshape(1))
                elif kind == "weight_packed" and module in divisors:
                    w = _load(report.tensors[f"{module}.weight"], plan)
                    weight, error = _pack_in_chunks(w, divisors[module], pack, device)
                    layers[module] = LayerError(module, tuple(w.shape), error)
                    writer.write(entry.name, weight.codes)
                    writer.write(f"{module}.weight_scale", weight.block_scales)
                elif not (kind == "weight_scale" and module in divisors):  # written with its codes
                    writer.write(entry.name, _load(report.tensors[entry.name], plan))
    write_index(partial, places, total)
    return [layers[module] for module in plan.linears]  # in the model's order, whatever the order of the files


def _pack_in_chunks(
    w: torch.Tensor,
    divisor: torch.Tensor,
    pack: Callable[[torch.Tensor, torch.Tensor], NVFP4Weight],
    device: str,
) -> tuple[NVFP4Weight, float]:
    """Pack ``w: (N, K)`` some rows at a time, which changes no bit; also return the error |w - packed| / |w|."""
    codes, scales, error_squares, weight_squares = [], [], 0.0, 0.0
    for rows in w.split(max(1, CHUNK_ELEMENTS // w.shape[1])):
        rows = rows.to(device)
        part = pack(rows, divisor.to(device))
        codes.append(part.codes.cpu())
        scales.append(part.block_scales.cpu())
        chunk_error, chunk_weight = _squares(rows, part)
        error_squares, weight_squares = error_squares + chunk_error, weight_squares + chunk_weight
    return NVFP4Weight(torch.cat(codes), torch.cat(scales), divisor), _ratio(error_squares, weight_squares)


def _squares(w: torch.Tensor, weight: NVFP4Weight) -> tuple[float, float]:
    """Return the sums of squares of the error and of the weight."""
    exact = w.double()  # in fp32 the square of 1e20 is infinite, and that of 1e-23 is 0
    restored = dequantize(weight.codes, weight.block_scales).double().div_(weight.divisor)
    weight_squares = exact.square().sum()
    return float(restored.sub_(exact).square_().sum()), float(weight_squares)


def _ratio(error_squares: float, weight_squares: float) -> float:
    return (error_squares / weight_squares) ** 0.5 if weight_squares > 0 else 0.0


def measure(source: CheckpointReport, packed: CheckpointReport, plan: Plan) -> list[LayerError]:
    """Return the error of each layer of ``packed``, a checkpoint that another program made from ``source``."""
    layers = []
    for name in _progress(plan.linears, "measuring"):
        w = _load(source.tensors[f"{name}.weight"], plan)
        codes, scales, divisor = (
            read_tensor(packed.tensors[f"{name}.{part}"])
            for part in ("weight_packed", "weight_scale", "weight_global_scale")
        )
        layers.append(LayerError(name, tuple(w.shape), _ratio(*_squares(w, NVFP4Weight(codes, scales, divisor)))))
    return layers


def _progress(items: Iterable[Any], text: str) -> Iterable[Any]:
    return track(list(items), description=text, transient=True)
