"""Read which kernels an engine's linear layers run on, and check that an arm of a rollout runs what its name says.

vLLM may fall back to another kernel than was asked for, and the layers themselves tell. Read in vLLM 0.26 and 0.31:
``model_executor.layers.quantization.online.fp8``, ``.compressed_tensors`` and ``model_executor.kernels.linear``.
"""

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm import LLM

# arm -> what "METHOD, KERNEL" of every linear layer must match. A 16-bit layer has no kernel of its own to name.
# FP8 is W8A8 with a scale for each output channel and each token; Marlin would multiply by 16-bit activations.
UNQUANTIZED, FP8 = r"Unquantized\w*Method", r"Fp8Ptpc\w*Method, (?!marlin|none).+"
EXPECTED = {
    "bf16_merged": UNQUANTIZED,
    "bf16": UNQUANTIZED,
    "fp8_merged": FP8,
    "fp8": FP8,
    "nf4": r"BitsAndBytes\w*Method",
    "stock_nvfp4": r"CompressedTensors\w*Method, marlin.*",
    "stock_nvfp4_humming": r"CompressedTensors\w*Method, humming.*",
    "stock_nvfp4_humming_slots": r"CompressedTensors\w*Method, humming.*",
    "qerl_nvfp4_slots_marlin": r"Qerl\w*Method, marlin.*",
}
OURS = r"Qerl\w*Method|_\w+Experts"  # the other arms: whichever kernel the plugin chooses, which the figures name


def chosen(llm: "LLM") -> list[dict[str, Any]]:
    """Return method, kernel and number of layers, the most frequent first; what is 16-bit in all arms is left out."""
    return llm.apply_model(_of_model)[0]


def check(arm: str, found: list[dict[str, Any]]) -> None:
    """Raise RuntimeError if any layer of ``found`` (``chosen``) runs on something else than the arm's name says."""
    expected = re.compile(EXPECTED.get(arm, OURS), re.IGNORECASE)
    others = [row for row in found if not expected.match(f"{row['method']}, {row['kernel']}")]
    if others or not found:
        runs = "; ".join(f"{row['layers']} layers on {row['method']}, {row['kernel']}" for row in others)
        raise RuntimeError(
            f"vLLM runs another kernel than arm {arm} names: {runs or 'no linear layer'}. Its rates would stand under "
            "a wrong name, so it is not measured; the engine's messages above say why that kernel was not chosen"
        )


def _of_model(model: "torch.nn.Module") -> list[dict[str, Any]]:
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
    from vllm.model_executor.layers.linear import LinearMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layers: Counter[tuple[str, str]] = Counter()
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if hasattr(layer, "base_layer") or name.endswith(".mlp.gate") or isinstance(layer, VocabParallelEmbedding):
            continue  # the first is vLLM's LoRA slots around a layer
        if isinstance(method, LinearMethodBase | FusedMoEMethodBase):
            layers[type(method).__name__, _kernel(layer, method)] += 1
    return [{"method": method, "kernel": kernel, "layers": n} for (method, kernel), n in layers.most_common()]


def _kernel(layer: Any, method: Any) -> str:
    """Return the name of the kernel's class, for experts the backend's; "none" where the method itself multiplies."""
    scheme = getattr(layer, "scheme", None)
    for holder, attribute in ((method, "layout"), (method, "fp8_linear"), (scheme, "kernel")):
        if (kernel := getattr(holder, attribute, None)) is not None:
            return type(kernel).__name__
    for attribute in ("nvfp4_backend", "fp8_backend"):
        if (backend := getattr(method, attribute, None)) is not None:
            return str(backend.name)
    return "none"
