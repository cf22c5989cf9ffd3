"""Pack a checkpoint: choose the tensors that become NVFP4, find their tensor scales, and write the shards.

The ``nn.Linear`` modules of the model's class are packed, except the output head, the routers of a mixture of experts,
and those that the family keeps in BF16 (``families.KEPT``). Experts are packed, too: transformers holds them in
``experts.gate_up_proj (E, 2I, H)`` and ``experts.down_proj (E, H, I)``, checkpoints in ``experts.<e>.gate_proj.weight``
and so on.

Packing takes two passes, with one tensor in memory at a time. The first finds the largest magnitude of each weight,
because q/k/v share a tensor scale, as do gate/up, and their parts may lie in different shards. FP16 and FP32 tensors of
the model become BF16 first, so the bytes are those of quantizing the same model while it is loaded.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from qerl_kernels.nvfp4 import GROUP_SIZE, NVFP4Weight, dequantize, divisor_from_amax
from rich.progress import track

from qerl_recipes.convert.shards import Entry, write_shards
from qerl_recipes.model.families import on_meta, routers
from qerl_vllm_plugin.weights.checkpoint import CheckpointReport, Nvfp4Scheme
from qerl_vllm_plugin.weights.expected import MODEL_TYPES, fused_with
from qerl_vllm_plugin.weights.families import kept_in_bf16, of_images
from qerl_vllm_plugin.weights.formats import COMPRESSED, matches
from qerl_vllm_plugin.wire.safetensors_file import DTYPES, CheckpointError, TensorHeader, read_tensor

CHUNK_ELEMENTS = 1 << 20  # packed at once; this bounds the memory of the fp32 intermediates

Pack = Callable[[torch.Tensor, torch.Tensor], NVFP4Weight]  # (weight, divisor) -> packed weight


@dataclass(frozen=True)
class LayerError:
    """Hold a packed layer's name, shape (N, K) and relative error |w - packed| / |w| (Frobenius norms)."""

    name: str
    shape: tuple[int, ...]
    relative_error: float


@dataclass(frozen=True)
class Plan:
    """Say which modules become NVFP4, each with the group whose tensor scale it shares, and which linears do not."""

    linears: Mapping[str, str]
    ignore: tuple[str, ...]
    parameters: frozenset[str]


def make_plan(report: CheckpointReport, ignore: Sequence[str]) -> Plan:
    """Plan a checked, unquantized checkpoint; ``ignore`` holds module names and ``re:`` patterns.

    Raise CheckpointError for a model without a layer to pack, a layer that is not the checkpoint's or cannot be packed,
    and a pattern that matches no linear layer or splits a fused group.
    """
    if reason := of_images(report.config):
        raise CheckpointError(f"{report.folder}: {reason}")
    try:
        model = on_meta(report.config)
    except ValueError as error:
        raise CheckpointError(f"{report.folder}: {error}; only transformers' own models are quantized") from error
    head = model.get_output_embeddings()
    kept = (*routers(model), *(name for name, module in model.named_modules() if module is head))
    shapes = dict(_packable(model, kept))
    patterns = kept_in_bf16(report.config.get("model_type"))
    gates = [name for name in shapes if any(matches(pattern, name) for pattern in patterns)]
    shapes, kept = {name: shape for name, shape in shapes.items() if name not in gates}, (*kept, *gates)
    if not shapes:
        raise CheckpointError(
            f"{report.folder}: {type(model).__name__} has no linear layer (torch.nn.Linear) to pack: this architecture "
            f"is not supported; known to work are {', '.join(MODEL_TYPES)}"
        )
    for pattern in ignore:
        alone = Nvfp4Scheme(ignore=(pattern,))
        if pattern != "lm_head" and all(alone.is_quantized(name) for name in (*shapes, *kept)):
            raise CheckpointError(f"ignore: {pattern!r} matches no linear layer of {report.folder}; leave it out")
    scheme = Nvfp4Scheme(ignore=tuple(ignore))
    groups = {name: fused_with(name, shapes)[0] for name in shapes}
    packed = {name: group for name, group in groups.items() if scheme.is_quantized(name)}
    for name, shape in shapes.items():
        if name not in packed and groups[name] in packed.values():
            parts = [other for other in shapes if groups[other] == groups[name]]
            raise CheckpointError(f"ignore: vLLM stacks {', '.join(parts)} into one matrix; ignore all of them or none")
        _check_layer(report, name, shape, name in packed)
    ignored = tuple(name for name in shapes if name not in packed)
    return Plan(packed, (*kept, *ignored), frozenset(name for name, _ in model.named_parameters()))


def _packable(model: torch.nn.Module, kept: Collection[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and shape (N, K) of every linear layer but those ``kept``; checkpoints use the same names."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if name not in kept:
                yield name, (module.out_features, module.in_features)
        elif name.endswith(".experts") and getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3:
            count, inner, hidden = module.gate_up_proj.shape
            for expert in range(count):
                yield f"{name}.{expert}.gate_proj", (inner // 2, hidden)
                yield f"{name}.{expert}.up_proj", (inner // 2, hidden)
                yield f"{name}.{expert}.down_proj", (hidden, inner // 2)


def _check_layer(report: CheckpointReport, name: str, shape: tuple[int, int], packed: bool) -> None:
    tensor = report.tensors.get(f"{name}.weight")
    if tensor is None or tensor.shape != shape:
        found = "no such tensor" if tensor is None else f"shape {list(tensor.shape)}"
        raise CheckpointError(
            f"{report.folder}: the model has a linear layer {name} {list(shape)}, but the checkpoint has {found} for"
            f" {name}.weight; only checkpoints that name their tensors as the model class does are quantized"
        )
    if packed and tensor.dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(f"{tensor.file}: {name}.weight is {tensor.dtype}; start from BF16, FP16 or FP32 weights")
    if packed and shape[1] % GROUP_SIZE:
        raise CheckpointError(
            f"{name}.weight has {shape[1]} columns, and NVFP4 needs a multiple of {GROUP_SIZE}; keep it in BF16:"
            f" `--ignore {name}`, together with the layers that vLLM stacks with it"
        )


def _load(tensor: TensorHeader, plan: Plan) -> torch.Tensor:
    """Read a tensor, in BF16 if it is an FP16 or FP32 one of the model; other constants stay as they are."""
    return read_tensor(tensor).to(_dtype(tensor, plan))


def _dtype(tensor: TensorHeader, plan: Plan) -> torch.dtype:
    is_of_model = tensor.name in plan.parameters or tensor.name.removesuffix(".weight") in plan.linears
    return torch.bfloat16 if tensor.dtype in ("F16", "F32") and is_of_model else DTYPES[tensor.dtype]


def find_divisors(report: CheckpointReport, plan: Plan, device: str) -> dict[str, torch.Tensor]:
    """Return each packed layer's divisor, shared in a group; raise CheckpointError for what BF16 cannot hold."""
    largest: dict[str, torch.Tensor] = {}
    for name, tensor in track(report.tensors.items(), "reading", transient=True):
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


def packed_shards(report: CheckpointReport, plan: Plan) -> dict[str, list[Entry]]:
    """Return the tensors of the packed copy of each shard; those of a packed layer lie where its weight was."""
    shards: dict[str, list[Entry]] = {file.name: [] for file in report.files}
    for name, tensor in report.tensors.items():
        module = name.removesuffix(".weight")
        if module in plan.linears and module != name:
            N, K = tensor.shape
            shards[tensor.file.name] += [
                Entry(f"{module}.{COMPRESSED.tensor_scale}", torch.float32, (1,)),
                Entry(f"{module}.{COMPRESSED.codes}", torch.uint8, (N, K // 2)),
                Entry(f"{module}.{COMPRESSED.block_scales}", torch.float8_e4m3fn, (N, K // GROUP_SIZE)),
            ]
        else:
            shards[tensor.file.name].append(Entry(name, _dtype(tensor, plan), tensor.shape))
    return shards


def write_packed(
    report: CheckpointReport, plan: Plan, divisors: Mapping[str, torch.Tensor], folder: Path, pack: Pack, device: str
) -> list[LayerError]:
    """Run the second pass: write the shards and their index into ``folder``, and return each layer's error."""
    layers: dict[str, LayerError] = {}
    block_scales: dict[str, torch.Tensor] = {}  # of the layer whose codes were written last

    def tensor(entry: Entry) -> torch.Tensor:
        module, _, kind = entry.name.rpartition(".")
        if module not in divisors or kind not in COMPRESSED.packed_names:
            return _load(report.tensors[entry.name], plan)
        if kind == COMPRESSED.tensor_scale:
            return divisors[module].reshape(1)
        if kind == COMPRESSED.block_scales:
            return block_scales.pop(module)
        w = _load(report.tensors[f"{module}.weight"], plan)
        weight, error = _pack_in_chunks(w, divisors[module], pack, device)
        layers[module] = LayerError(module, tuple(w.shape), error)
        block_scales[module] = weight.block_scales
        return weight.codes

    write_shards(folder, packed_shards(report, plan), tensor, "packing")
    return [layers[module] for module in plan.linears]  # in the model's order, whatever the order of the files


def _pack_in_chunks(w: torch.Tensor, divisor: torch.Tensor, pack: Pack, device: str) -> tuple[NVFP4Weight, float]:
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
    for name in track(plan.linears, "measuring", transient=True):
        w = _load(source.tensors[f"{name}.weight"], plan)
        parts = (read_tensor(packed.tensors[f"{name}.{part}"]) for part in COMPRESSED.packed_names)
        layers.append(LayerError(name, tuple(w.shape), _ratio(*_squares(w, NVFP4Weight(*parts)))))
    return layers
