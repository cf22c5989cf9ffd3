"""Say what the trainer cannot do with a model family, from the model's config and before anything is built.

The table of qerl_vllm_plugin/compatibility.md lists what is supported; tests/recipes/train/test_families.py checks it.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from qerl_vllm_plugin.weights.expected import experts

# vLLM 0.31 runs these by transformers' own classes, and changes those classes for the whole process
SHARED_CLASSES = ("olmo2", "smollm3")
MIXTURES = ("qwen3_moe",)
EXPERTS_FIRST = (
    "experts of a BF16 checkpoint are not quantized on the way in; quantize the model first: qerl quantize SOURCE "
    "DESTINATION"
)
OF_EXPERTS = ("all-linear", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "gate")
FUSED_TARGETS = {"glm4": ("gate_up_proj", "q_proj, k_proj, v_proj, o_proj, down_proj")}
NOISE_TARGETS = dict.fromkeys(("gemma2", "gemma3_text"), ("post_attention_layernorm", "pre_feedforward_layernorm"))


def obstacles(config: Mapping[str, Any], attention: str | None) -> Iterator[str]:
    """Yield one line for each reason why a model with this config.json cannot be trained at all.

    ``attention`` is the attn_implementation; None means transformers' choice.
    """
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
    config: Mapping[str, Any], adapted: Collection[str], noisy: Collection[str], arm: str = "qerl_nvfp4"
) -> Iterator[str]:
    """Yield one line for each key of a recipe that this family cannot honour.

    ``adapted`` holds the lora_target_modules, and ``noisy`` the noise_targets of a run with noise or trained norms.
    """
    kind = str(config.get("model_type"))
    if experts(config):
        yield from _of_experts(config, adapted, arm)
    fused, instead = FUSED_TARGETS.get(kind, ("", ""))
    if fused and {fused, "all-linear"} & set(adapted):
        yield (
            f"lora_target_modules: {kind} stores {fused} as one linear, which the engine holds as two, so that it "
            f"carries no adapter; use [{instead}]"
        )
    follows, feeds = NOISE_TARGETS.get(kind, ("", ""))
    if follows in noisy and feeds not in noisy:
        yield (
            f"noise_targets: {follows} of {kind} feeds no linear, but {feeds} does; use "
            f"[{', '.join(feeds if name == follows else name for name in noisy)}]"
        )


def _of_experts(config: Mapping[str, Any], adapted: Collection[str], arm: str) -> Iterator[str]:
    if arm == "nf4":
        yield "quantization: nf4 leaves experts in BF16 (it takes linear layers alone); use qerl_nvfp4 or bf16"
    if arm == "qerl_nvfp4" and config.get("quantization_config") is None:
        yield f"quantization: {arm}: {EXPERTS_FIRST}"
    if named := [name for name in OF_EXPERTS if name in adapted]:
        yield (
            f"lora_target_modules: {', '.join(named)} means the experts or the router of this model (to PEFT, "
            "all-linear too), which carry no adapter; use [q_proj, k_proj, v_proj, o_proj]"
        )
