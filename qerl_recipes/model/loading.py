"""Load the trainer's model: a Hugging Face causal language model whose frozen linears are NVFP4, BF16 or NF4."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import init_empty_weights
from qerl_kernels import nvfp4
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from qerl_recipes.model import families, frozen, norms, rounding, shared
from qerl_recipes.model.frozen import FrozenNVFP4Experts, FrozenNVFP4Linear, PackedExperts
from qerl_vllm_plugin.weights.checkpoint import CheckpointReport, check_tensors, inspect_folder
from qerl_vllm_plugin.weights.expected import fused_with
from qerl_vllm_plugin.weights.families import kept_in_bf16
from qerl_vllm_plugin.weights.formats import matches
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError, read_tensor

if TYPE_CHECKING:  # frozen_weights imports vllm
    from qerl_vllm_plugin.weights.frozen_weights import FrozenWeights

HEAD = "lm_head"  # is not quantized while loading: the loss multiplies by its weight directly


def load(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    *,
    quantization: str | None = None,
    attn_implementation: str | None = None,
    weights: "FrozenWeights | None" = None,
) -> PreTrainedModel:
    """Load a causal language model from a checkpoint folder, with every parameter frozen.

    ``quantization`` is the arm: ``qerl_nvfp4`` (a BF16 checkpoint is quantized while loading, one layer at a time),
    ``bf16`` or ``nf4`` (bitsandbytes). None takes the weights as the checkpoint has them. With ``weights``, of an
    engine that serves the same checkpoint under qerl_nvfp4, the model reads them in place and copies only the norms and
    what the engine cannot lend. Norms round like those of the arm's engine, and dropout is off.

    Raises CheckpointError for a checkpoint that is damaged or of another format, and ValueError for what cannot be
    trained here.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        for reason in families.obstacles(AutoConfig.from_pretrained(folder).to_dict(), attn_implementation):
            raise ValueError(reason)
    report = inspect_folder(folder)
    arm = quantization or ("bf16" if report.scheme is None else "qerl_nvfp4")
    if weights is not None and arm != "qerl_nvfp4":
        raise ValueError(f"quantization={arm} cannot read an engine's NVFP4 weights; use qerl_nvfp4")
    if arm == "qerl_nvfp4":
        model = _load_nvfp4(report, dtype, attn_implementation, weights)
    elif report.scheme is not None:
        raise ValueError(f"{folder} is an NVFP4 checkpoint; quantization={arm} starts from the BF16 checkpoint")
    elif arm == "bf16":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attn_implementation)
    elif arm == "nf4":
        model = _load_nf4(folder, dtype, attn_implementation)
    else:
        raise ValueError(f"quantization is {arm!r}; it is qerl_nvfp4, bf16 or nf4")
    norms.replace(model, rounded=arm != "qerl_nvfp4")
    rounding.replace_mlps(model)
    frozen.replace_routers(model)
    for module in model.modules():  # the engine drops nothing, whatever config.json says
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    model.requires_grad_(False)
    return model.eval() if weights is None else model.to(weights.device).eval()


def blocks_that_keep(model: torch.nn.Module, checkpointed: int | None) -> list[GradientCheckpointingLayer]:
    """Return the blocks that keep their activations: all after the first ``checkpointed``, or none for None.

    The last blocks keep them, because their memory is free again when the first ones recompute theirs. Without a plan
    of `qerl train`, -1 ("as few as fit") gives no blocks and a warning. Raises ValueError if there are fewer blocks.
    """
    if checkpointed is None:
        return []
    from qerl_recipes.recipe.configs import AS_FEW_AS_FIT  # imports TRL, which a trainer of another stack does not need

    if checkpointed == AS_FEW_AS_FIT:
        warnings.warn(
            "recompute_layers: -1 follows from the memory plan of `qerl train`, and there is none here: the "
            "activations of all blocks are recomputed; name a number to keep some",
            stacklevel=2,
        )
        return []
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if checkpointed > len(blocks):
        raise ValueError(f"recompute_layers is {checkpointed}, and this model has {len(blocks)}")
    return blocks[checkpointed:]


def _load_nf4(folder: Path, dtype: torch.dtype, attn_implementation: str | None) -> PreTrainedModel:
    if not torch.cuda.is_available():
        raise ValueError("quantization=nf4 (bitsandbytes) needs a CUDA GPU; on this machine use qerl_nvfp4 or bf16")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    # transformers copies weights to the GPU in other threads, on the default stream, and quantizes them in this thread,
    # which vLLM has put on another stream. On two streams a weight's memory could be reused before the weight is read.
    default = torch.cuda.default_stream()
    with torch.cuda.stream(default):
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            quantization_config=config,
            attn_implementation=attn_implementation,
            device_map={"": torch.cuda.current_device()},
        )
    torch.cuda.current_stream().wait_stream(default)
    return model


def _load_nvfp4(
    report: CheckpointReport, dtype: torch.dtype, attn_implementation: str | None, weights: "FrozenWeights | None"
) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(report.folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the linears below are built here: transformers must not look for a quantizer
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    tensors = _Tensors(report)
    if weights is not None:
        tensors.used |= shared.install(model, weights, dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module.weight.is_meta:
            _replace_linear(model, name, module, tensors, dtype)
    for name, module in frozen.dense_experts(model):
        _load_experts(model, name, module, tensors, dtype)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta and name in report.tensors:
            owner, _, leaf = name.rpartition(".")
            loaded = torch.nn.Parameter(tensors.get(name).to(dtype), requires_grad=False)
            setattr(model.get_submodule(owner), leaf, loaded)
    model.tie_weights()
    missing = sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)
    unused = sorted(report.tensors.keys() - tensors.used - set(model._tied_weights_keys or ()))
    unused = [name for name in unused if not name.endswith("rotary_emb.inv_freq")]
    if missing or unused:
        what = f"lacks {missing[0]}" if missing else f"holds {unused[0]}, which the model has no place for"
        raise CheckpointError(f"{report.folder}: the checkpoint {what}; download or quantize it again")
    if (report.folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(report.folder)
    return model


def _replace_linear(
    model: PreTrainedModel, name: str, module: torch.nn.Linear, tensors: "_Tensors", dtype: torch.dtype
) -> None:
    """Put a frozen NVFP4 linear in the place of ``module``, unless the checkpoint keeps this one in BF16."""
    report = tensors.report
    if report.scheme is None:
        kept = kept_in_bf16(report.config.get("model_type"))
        if name == HEAD or any(matches(pattern, name) for pattern in kept):
            return
        if module.in_features % nvfp4.GROUP_SIZE:
            raise ValueError(
                f"{name} has {module.in_features} columns, not a multiple of {nvfp4.GROUP_SIZE}, so NVFP4 cannot hold "
                f"it; quantize without it: qerl quantize SOURCE DESTINATION --ignore {name}"
            )
        # BF16 whatever the model's dtype: the engine and `qerl quantize` round the source and its amax to BF16, too
        weight = tensors.get(f"{name}.weight").bfloat16()
        packed = nvfp4.quantize(weight, nvfp4.divisor_from_amax(_group_amax(name, tensors)))
        parts = (packed.codes, packed.block_scales, packed.divisor)
    elif not report.scheme.is_quantized(name) or f"{name}.weight_packed" not in report.tensors:
        return  # it is kept in BF16, a tied head, or a missing tensor, which _load_nvfp4 reports at its end
    else:
        parts = tuple(tensors.get(f"{name}.weight_{part}") for part in ("packed", "scale", "global_scale"))
    bias = tensors.get(f"{name}.bias") if module.bias is not None else None
    model.set_submodule(name, FrozenNVFP4Linear(*parts, bias, dtype))


def _load_experts(
    model: PreTrainedModel, name: str, module: torch.nn.Module, tensors: "_Tensors", dtype: torch.dtype
) -> None:
    """Replace ``module`` by frozen NVFP4 experts, or fill it with dense weights if the checkpoint has them in BF16."""
    count, linears = module.gate_up_proj.shape[0], ("gate_proj", "up_proj", "down_proj")
    if tensors.report.scheme is None:
        raise ValueError(f"{name}: {families.EXPERTS_FIRST}")
    packed = {tensors.report.scheme.is_quantized(f"{name}.{e}.{part}") for e in range(count) for part in linears}
    if len(packed) > 1:
        raise CheckpointError(f"{name}: some parts of the experts are quantized and some are not; quantize all")
    leaves = ("weight_packed", "weight_scale", "weight_global_scale") if packed == {True} else ("weight",)
    names = [f"{name}.{e}.{part}.{leaf}" for e in range(count) for part in linears for leaf in leaves]
    if missing := [tensor for tensor in names if tensor not in tensors.report.tensors]:
        raise CheckpointError(f"{tensors.report.folder}: the checkpoint lacks {missing[0]}; quantize it again")

    def stacked(leaf: str, *parts: str) -> torch.Tensor:
        return torch.stack(
            [torch.cat([tensors.get(f"{name}.{e}.{part}.{leaf}") for part in parts]) for e in range(count)]
        )

    if packed == {False}:
        for leaf, parts in (("gate_up_proj", linears[:2]), ("down_proj", linears[2:])):
            setattr(module, leaf, torch.nn.Parameter(stacked("weight", *parts).to(dtype), requires_grad=False))
        return
    if dtype == torch.float16:
        raise ValueError(f"{name}: packed experts are not trained in float16; use dtype: bfloat16")
    for e in range(count):
        for part in linears:
            check_tensors(f"{name}.{e}.{part}", *(tensors.get(f"{name}.{e}.{part}.{leaf}") for leaf in leaves))
    gate_up, down = (PackedExperts(*(stacked(leaf, *parts) for leaf in leaves)) for parts in (linears[:2], linears[2:]))
    model.set_submodule(name, FrozenNVFP4Experts(gate_up, down))


def _group_amax(name: str, tensors: "_Tensors") -> torch.Tensor:
    """Return the largest magnitude of what vLLM fuses with this linear; raise CheckpointError if it is not finite."""
    modules = {tensor.removesuffix(".weight") for tensor in tensors.report.tensors}
    amaxes = {part: tensors.get(f"{part}.weight").bfloat16().abs().amax() for part in fused_with(name, modules)}
    if damaged := [part for part, amax in amaxes.items() if not torch.isfinite(amax)]:
        raise CheckpointError(f"{damaged[0]}.weight holds NaN or infinite values; the checkpoint is damaged")
    return torch.stack(list(amaxes.values())).amax()


class _Tensors:
    """Read the tensors of a checkpoint by name, each when requested; ``used`` holds their names."""

    def __init__(self, report: CheckpointReport) -> None:
        self.report, self.used = report, set[str]()

    def get(self, name: str) -> torch.Tensor:
        self.used.add(name)
        return read_tensor(self.report.tensors[name])
