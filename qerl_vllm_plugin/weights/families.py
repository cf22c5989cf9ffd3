"""List the model families that were compared with transformers on the same weights, and refuse others by default.

A feature that a family lacks is refused when it is requested. Noise is refused where the targets name no norm that
feeds a linear, and an adapter where the checkpoint's linears are not vLLM's (GLM-4). SmolLM3's norms stay in BF16,
which rounds a part of the noise away; the warning of ``set_noise`` says how much.
"""

from collections.abc import Mapping
from typing import Any

FAMILIES = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
    "glm4",
    "granite",
    "olmo2",
    "smollm3",
    "qwen3_5_text",
)
# linears that stay in BF16, as in the public NVFP4 checkpoints: they have few rows and gate linear attention's state
KEPT = {"qwen3_5_text": (r"re:.*\.linear_attn\.in_proj_[ab]$",)}
# vLLM 0.31 makes LoRA slots for the parts that it fuses; they outnumber the checkpoint's linears, so no adapter fits
WITHOUT_SLOTS = ("qwen3_5_text",)
# vision-language models -> the family of their language model, which `qerl text-model` extracts
LANGUAGE_MODELS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
# families of which no NVFP4 checkpoint can be made here -> why, and what to do
WITHOUT_NVFP4 = {
    "gpt_oss": "its experts lie in one tensor a projection, with biases, which nothing here packs as NVFP4; its own "
    "MXFP4 weights are 4-bit already: serve them with vLLM's own method, without --quantization qerl_nvfp4",
}
ANYWAY = """--additional-config '{"qerl": {"untested_models": true}}'"""


def kept_in_bf16(model_type: object) -> tuple[str, ...]:
    """Return patterns of linears that stay in BF16, in `qerl quantize` and when a BF16 checkpoint is loaded."""
    return KEPT.get(str(model_type), ())


def of_images(config: Mapping[str, Any]) -> str:
    """Say what to do with a checkpoint of a model that also reads images or sound; "" for a text model."""
    model_type = config.get("model_type")
    if model_type in LANGUAGE_MODELS:
        return (
            f"{model_type} reads images, too; take its language model: qerl text-model SOURCE DESTINATION writes it as "
            f"a checkpoint of {LANGUAGE_MODELS[model_type]}"
        )
    parts = [part for part in ("vision_config", "audio_config") if config.get(part)]
    return f"{model_type} has a {parts[0]}: models that also read images or sound are not supported" if parts else ""


def never_compared(model_type: object) -> str:
    """Say why qerl_nvfp4 refuses a family and which option serves it untested; "" for a family that was compared."""
    if model_type in LANGUAGE_MODELS:
        return f"{of_images({'model_type': model_type})}. {ANYWAY} serves all of it untested"
    if model_type in FAMILIES:
        return ""
    if model_type in WITHOUT_NVFP4:
        return f"model_type {model_type!r}: {WITHOUT_NVFP4[str(model_type)]}"
    return (
        f"model_type {model_type!r}: qerl_nvfp4 was never compared with transformers on this family; tested are "
        f"{', '.join(FAMILIES)}. {ANYWAY} serves it all the same: compare its answers before you rely on them"
    )


def check_family(model_type: str, untested_models: bool) -> None:
    """Raise ValueError for a family without NVFP4, and for one never compared unless ``untested_models`` is true."""
    if (reason := never_compared(model_type)) and (model_type in WITHOUT_NVFP4 or not untested_models):
        raise ValueError(reason)
