"""Give vLLM's options for each of the three arms (variants) of an experiment.

An arm says in what format the engine holds the frozen weights, and where it holds the adapter.
"""

import os
from collections.abc import Mapping
from typing import Any

from qerl_recipes.files.adapter import engine_rank
from qerl_recipes.files.base_model import read_config
from qerl_recipes.machine.environment import runs_on_cuda
from qerl_recipes.recipe.shapes import ATTENTION
from qerl_vllm_plugin.weights.expected import experts

# the recipe's ``quantization`` -> vLLM's ``quantization``
ENGINE_QUANTIZATION: dict[str, str | None] = {"qerl_nvfp4": "qerl_nvfp4", "bf16": None, "nf4": "bitsandbytes"}
# Options of every engine on a CPU. With chunked prefill vLLM sets back the generator of a seeded request, which torch's
# CPU generator cannot do.
ENGINE_ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False}


def engine_on_cpu(base: str) -> dict[str, Any]:
    """Return ENGINE_ON_CPU; linear attention also goes without a prefix cache, for which vLLM needs chunked prefill."""
    is_hybrid = "linear_attention" in (read_config(base).get("layer_types") or ())
    return {**ENGINE_ON_CPU, **({"enable_prefix_caching": False} if is_hybrid else {})}


def engine_options(arm: str, rank: int | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which ``vllm.LLM`` serves an arm with an adapter of up to ``rank`` (None: without one).

    The NVFP4 arm holds the adapter in its layers, where it costs least; the others use vLLM's LoRA slots, in a mixture
    of experts (``config``) of attention alone. Raises ValueError for a rank above vLLM's largest, and LoRA slots in a
    mixture of experts on a CPU.
    """
    options: dict[str, Any] = {"quantization": ENGINE_QUANTIZATION[arm]}
    if rank is None:
        return options
    allowed = engine_rank(rank)
    if arm == "qerl_nvfp4":
        return {**options, "additional_config": {"qerl": {"policy_adapter": {"rank": allowed}}}}
    options |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": allowed}
    if not experts(config):
        return options
    if not runs_on_cuda(os.environ):
        raise ValueError(
            f"quantization: {arm} keeps the adapter in vLLM's LoRA slots, and with those vLLM runs no mixture of "
            "experts on a CPU; use quantization: qerl_nvfp4, or a GPU"
        )
    return {**options, "lora_target_modules": list(ATTENTION)}
