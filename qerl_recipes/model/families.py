"""Say what a recipe and the trainer cannot do with a model, from its config.json and before anything is built.

tests/recipes/train/test_families.py checks the table of qerl_vllm_plugin/compatibility.md.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from qerl_recipes.recipe.generation import wrong_bias
from qerl_vllm_plugin.weights.checkpoint import read_quantization
from qerl_vllm_plugin.weights.expected import experts
from qerl_vllm_plugin.weights.families import FAMILIES, WITHOUT_NVFP4, WITHOUT_SLOTS, of_images

if TYPE_CHECKING:  # it imports TRL, which a trainer of another stack does not need
    import torch
    from transformers import PreTrainedModel

    from qerl_recipes.recipe.configs import GRPOConfig, ModelConfig, ScriptArguments

# vLLM 0.31 runs these by transformers' own classes, and changes those classes for the whole process
SHARED_CLASSES = ("olmo2", "smollm3")
MIXTURES = ("qwen3_moe",)
EXPERTS_FIRST = "experts in BF16 are not quantized while loading; quantize first: qerl quantize SOURCE DESTINATION"
OF_EXPERTS = ("all-linear", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "gate")
FUSED_TARGETS = {"glm4": ("gate_up_proj", "q_proj, k_proj, v_proj, o_proj, down_proj")}
NOISE_TARGETS = dict.fromkeys(("gemma2", "gemma3_text"), ("post_attention_layernorm", "pre_feedforward_layernorm"))


def on_meta(config: Mapping[str, Any]) -> "PreTrainedModel":
    """Build the model of a config.json without its weights; raise ValueError if transformers cannot."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    kind = config.get("model_type")
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
        return model
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"transformers cannot build a causal language model of type {kind!r} ({error})") from error


def routers(model: "torch.nn.Module") -> dict[str, "torch.nn.Module"]:
    """Return the routers by name: the children with a matrix of their own of each block that has ``experts``."""
    return {
        f"{parent}.{name}": child
        for parent, block in model.named_modules()
        if hasattr(block, "experts")
        for name, child in block.named_children()
        if getattr(getattr(child, "weight", None), "ndim", 0) == 2
    }


def obstacles(config: Mapping[str, Any], attention: str | None) -> Iterator[str]:
    """Yield a line for each reason why this model cannot be trained with ``attention`` (None: transformers' choice)."""
    kind = config.get("model_type")
    if (count := experts(config)) and kind not in MIXTURES:
        yield (
            f"{kind} with {count} is a mixture of experts whose training was never compared with the engine; trained "
            f"are {', '.join(MIXTURES)} and dense models"
        )
    if kind in SHARED_CLASSES:
        yield (
            f"{kind} is served but not trained: vLLM runs it by transformers' own classes and changes them, so that "
            "the trainer cannot build its model in the same process; train a model of another family"
        )
    softcap = config.get("attn_logit_softcapping", 50.0 if kind == "gemma2" else None)
    if softcap is not None and attention in (None, "sdpa"):
        yield (
            f"attn_implementation: sdpa leaves out attn_logit_softcapping ({softcap:g}) of {kind}, so that the trainer "
            "would learn from other log-probabilities than were sampled from; use attn_implementation: eager"
        )


def misfits(
    config: Mapping[str, Any], script: "ScriptArguments", training: "GRPOConfig", model: "ModelConfig"
) -> Iterator[str]:
    """Yield one line for each key of a recipe that the model with this config.json cannot honour."""
    name = str(model.model_name_or_path)
    yield from _family_misfits(config, name, training, model)
    yield from _quantization_misfits(config, name, training)
    yield from _length_misfits(config, name, script, training)
    sampling, tokens = training.generation_kwargs or {}, config.get("vocab_size")
    named = {key: sampling.get(key) for key in ("stop_token_ids", "allowed_token_ids")}
    named["logit_bias"] = None if wrong_bias(sampling) is not None else [*map(int, sampling.get("logit_bias") or ())]
    for key, ids in named.items():
        known = [token for token in ids if isinstance(token, int)] if isinstance(ids, list) else []
        largest = max(known, default=0)
        if isinstance(tokens, int) and largest >= tokens:
            yield f"generation_kwargs: {key} has the token {largest}, and {name} has {tokens}; remove it"


def most_positions(config: Mapping[str, Any]) -> int | None:
    """Return the model's longest sequence; None if the config has none or scales RoPE, where the engine decides."""
    positions = config.get("max_position_embeddings")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return positions if isinstance(positions, int) and not scaling.get("factor") else None


def _family_misfits(
    config: Mapping[str, Any], name: str, training: "GRPOConfig", model: "ModelConfig"
) -> Iterator[str]:
    kind, arm = str(config.get("model_type")), training.quantization
    if reason := of_images(config):
        yield f"model_name_or_path: {name}: {reason}"
    elif arm == "qerl_nvfp4" and kind in WITHOUT_NVFP4:
        yield f"model_name_or_path: {name} is a {kind}: {WITHOUT_NVFP4[kind]}"
        return
    elif arm == "qerl_nvfp4" and kind not in FAMILIES:
        yield (
            f"model_name_or_path: {name} is a {kind}, a family that was never compared with transformers under "
            f"qerl_nvfp4; compared are {', '.join(FAMILIES)}"
        )
    if arm != "qerl_nvfp4" and kind in WITHOUT_SLOTS:
        yield f"quantization: {arm}: no adapter of {kind} fits into vLLM's LoRA slots; use quantization: qerl_nvfp4"
    yield from (f"model_name_or_path: {name}: {line}" for line in obstacles(config, model.attn_implementation))
    adapted = model.lora_target_modules or ()
    adapted = [adapted] if isinstance(adapted, str) else adapted
    if experts(config):
        yield from _experts_misfits(config, adapted, arm)
    fused, instead = FUSED_TARGETS.get(kind, ("", ""))
    if fused and {fused, "all-linear"} & set(adapted):
        yield f"lora_target_modules: {fused} of {kind} is two linears in the engine, without adapter; use [{instead}]"
    noisy = training.noise_targets if training.noise_mode != "none" or training.train_norms else ()
    follows, feeds = NOISE_TARGETS.get(kind, ("", ""))
    if follows in noisy and feeds not in noisy:
        yield (
            f"noise_targets: {follows} of {kind} feeds no linear, but {feeds} does; use "
            f"[{', '.join(feeds if target == follows else target for target in noisy)}]"
        )


def _experts_misfits(config: Mapping[str, Any], adapted: Collection[str], arm: str) -> Iterator[str]:
    if arm == "nf4":
        yield "quantization: nf4 leaves experts in BF16 (it takes linear layers alone); use qerl_nvfp4 or bf16"
    if arm == "qerl_nvfp4" and config.get("quantization_config") is None:
        yield f"quantization: {arm}: {EXPERTS_FIRST}"
    if named := [target for target in OF_EXPERTS if target in adapted]:
        yield (
            f"lora_target_modules: {', '.join(named)} means the experts or the router of this model (to PEFT, "
            "all-linear too), which carry no adapter; use [q_proj, k_proj, v_proj, o_proj]"
        )


def _quantization_misfits(config: Mapping[str, Any], name: str, training: "GRPOConfig") -> Iterator[str]:
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict) and training.quantization == "qerl_nvfp4":
        try:
            read_quantization(quantized)
        except ValueError as error:
            yield f"model_name_or_path: {name}: {error}"
    elif quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        yield (
            f"quantization: {training.quantization} starts from a BF16 checkpoint, but {name} is quantized already "
            f"({method}); name the BF16 checkpoint, or use quantization: qerl_nvfp4"
        )


def _length_misfits(
    config: Mapping[str, Any], name: str, script: "ScriptArguments", training: "GRPOConfig"
) -> Iterator[str]:
    positions, longest = most_positions(config), training.vllm_max_model_length
    completion = training.max_completion_length
    if positions is None:
        return
    if longest is not None and longest > positions:
        key = "max_prompt_length + max_completion_length" if script.max_prompt_length else "vllm_max_model_length"
        yield f"{key} is {longest}, but {name} has {positions} positions (max_position_embeddings); lower it to that"
    elif longest is None and completion >= positions:
        yield (
            f"max_completion_length ({completion}) leaves no room for a prompt in the {positions} positions "
            f"(max_position_embeddings) of {name}; lower it"
        )
