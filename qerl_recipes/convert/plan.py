"""Choose the tensors of a checkpoint that become NVFP4, from the model class that config.json names.

The model is built on the meta device, which takes no memory. Its ``nn.Linear`` modules are packed, except the output
head, the routers of a mixture of experts, and those that the family keeps in BF16 (``families.KEPT``).

Experts are packed, too. transformers holds them in two three-dimensional parameters, ``experts.gate_up_proj
(E, 2I, H)`` and ``experts.down_proj (E, H, I)``. Checkpoints hold one tensor for each matrix,
``experts.<e>.gate_proj.weight`` and so on.

The checkpoint must have each of these names, with the shape of the model class. Everything else stays in BF16.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from qerl_kernels.nvfp4 import GROUP_SIZE

from qerl_vllm_plugin.weights.checkpoint import CheckpointReport, Nvfp4Scheme
from qerl_vllm_plugin.weights.expected import MODEL_TYPES, fused_with
from qerl_vllm_plugin.weights.families import kept_in_bf16, of_images
from qerl_vllm_plugin.weights.formats import matches
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError


@dataclass(frozen=True)
class Plan:
    """The tensors of a checkpoint that become NVFP4, and those that do not.

    ``linears`` maps each packed module to the name of the group whose tensor scale it shares. ``ignore`` names the
    linear layers that stay in BF16. ``parameters`` are the names of the model class's parameters.
    """

    linears: Mapping[str, str]
    ignore: tuple[str, ...]
    parameters: frozenset[str]


def make_plan(report: CheckpointReport, ignore: Sequence[str]) -> Plan:
    """Plan a checked, unquantized checkpoint; ``ignore`` holds module names and ``re:`` patterns.

    Raise CheckpointError for a model that transformers does not know, that reads more than text, or that has no linear
    layer to pack. Also raise it if a layer's name or shape is not the checkpoint's, or a pattern matches no linear
    layer or splits a fused group. A packed layer must be BF16, FP16 or FP32, with a multiple of 16 columns.
    """
    if reason := of_images(report.config):
        raise CheckpointError(f"{report.folder}: {reason}")
    model = _meta_model(report)
    shapes, kept = dict(_packable(model)), tuple(_kept(model))
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


def _meta_model(report: CheckpointReport) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(report.folder)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, AttributeError, ImportError, OSError) as error:
        raise CheckpointError(
            f"{report.folder}: transformers cannot build a causal language model from its config.json ({error}); only"
            " models that transformers has built in are quantized"
        ) from error


def _is_router(name: str, module: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Return True for a direct child of a mixture-of-experts block that has a matrix of its own.

    Such a block is a module with a child ``experts``.
    """
    parent, _, _ = name.rpartition(".")
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, torch.nn.Parameter) and weight.dim() == 2
    return is_matrix and bool(parent) and hasattr(model.get_submodule(parent), "experts")


def _packable(model: torch.nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and shape (N, K) of every linear layer that can be packed; checkpoints use the same names."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if module is not head and not _is_router(name, module, model):
                yield name, (module.out_features, module.in_features)
        elif name.endswith(".experts") and getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3:
            count, inner, hidden = module.gate_up_proj.shape
            for expert in range(count):
                yield f"{name}.{expert}.gate_proj", (inner // 2, hidden)
                yield f"{name}.{expert}.up_proj", (inner // 2, hidden)
                yield f"{name}.{expert}.down_proj", (hidden, inner // 2)


def _kept(model: torch.nn.Module) -> Iterator[str]:
    """Yield the linear layers that stay in BF16 in every family: the output head and the routers."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head or _is_router(name, module, model):
            yield name


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
