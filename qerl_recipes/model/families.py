"""What the trainer cannot do with a family of models, told from its config before anything is built.

The table of qerl_vllm_plugin/README.md says what holds; tests/recipes/train/test_families.py shows it.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from qerl_vllm_plugin.expected_tensors import experts

# vLLM 0.31 runs them by transformers' own classes, which it changes for the whole process
SHARED_CLASSES = ("olmo2", "smollm3")
FUSED_TARGETS = {"glm4": ("gate_up_proj", "q_proj, k_proj, v_proj, o_proj, down_proj")}
NOISE_TARGETS = dict.fromkeys(("gemma2", "gemma3_text"), ("post_attention_layernorm", "pre_feedforward_layernorm"))


def obstacles(config: Mapping[str, Any], attention: str | None) -> Iterator[str]:
    """One line for each thing that stands against training a model with this config.json at all.

    ``attention`` is the attn_implementation, None for transformers' choice.
    """
    kind = config.get("model_type")
    if count := experts(config):
        yield (
            f"{kind} with {count} is a mixture of experts: it can be served and evaluated, but not trained yet; train "
            "a dense model of the Qwen2, Qwen3, Llama or Mistral family"
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


def misfits(config: Mapping[str, Any], adapted: Collection[str], noisy: Collection[str]) -> Iterator[str]:
    """One line for each key of a recipe that this family cannot honour.

    ``adapted`` are the lora_target_modules, ``noisy`` the noise_targets of a run with noise or trained norms.
    """
    kind = str(config.get("model_type"))
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
