"""Name the engines that ``qerl bench rollout`` compares, and give vLLM's options for each; imports no torch."""

from typing import Any

from qerl_recipes.recipe.keys import QUANTIZATIONS

# The arms of a recipe, and BF16 without an adapter, which is what a merged one runs as. Then NVFP4 in parts: without an
# adapter, with one in LoRA slots on Marlin, and that again without this plugin; these two differ in the fp32 norms
# alone. Then what else one would run without this project: FP8 with the adapter merged and in LoRA slots, and NVFP4 on
# Humming without an adapter and with one in LoRA slots.
ARMS: tuple[str, ...] = (
    "bf16_merged",
    *QUANTIZATIONS,
    "qerl_nvfp4_base",
    "qerl_nvfp4_slots_marlin",
    "qerl_nvfp4_float16",
)
ARMS += ("stock_nvfp4", "fp8_merged", "fp8", "stock_nvfp4_humming", "stock_nvfp4_humming_slots")
# W8A8: a scale for each output channel of a weight, made when it is loaded, and one for each token, made in every step
FP8 = "fp8_per_channel"
HUMMING = {"linear_backend": "humming", "moe_backend": "humming"}  # vLLM's options; the second is for experts
ADAPTERLESS: dict[str, dict[str, Any]] = {  # arms whose engine has room for none, so that no rank changes them
    "bf16_merged": {},
    "fp8_merged": {"quantization": FP8},
    "stock_nvfp4_humming": HUMMING,
    "qerl_nvfp4_base": {"quantization": "qerl_nvfp4"},
}


def is_stock(arm: str) -> bool:
    """Return True for what one would run without this project; it is also asked in vLLM's own way."""
    return not arm.startswith("qerl_")


def options(arm: str, rank: int, config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` that make an engine that arm."""
    from qerl_recipes.rollout.arms import ENGINE_QUANTIZATION, engine_options

    if arm in ADAPTERLESS:
        return ADAPTERLESS[arm]
    if arm == "qerl_nvfp4_float16":
        return {**engine_options("qerl_nvfp4", rank, config), "dtype": "float16"}
    if arm in ENGINE_QUANTIZATION:
        return engine_options(arm, rank, config)
    slots = engine_options("bf16", rank, config)
    own: dict[str, dict[str, Any]] = {
        "fp8": {"quantization": FP8},
        "stock_nvfp4": {"linear_backend": "marlin", "moe_backend": "marlin"},
        "stock_nvfp4_humming_slots": HUMMING,
        "qerl_nvfp4_slots_marlin": {"quantization": "qerl_nvfp4", "additional_config": {"qerl": {"kernel": "marlin"}}},
    }
    return {**slots, **own[arm]}
