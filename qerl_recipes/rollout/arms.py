"""The three arms of an experiment: in what form the engine keeps the frozen weights, and where it keeps the adapter."""

import os
from collections.abc import Mapping
from typing import Any

from qerl_recipes.files.adapter import engine_rank
from qerl_recipes.machine.environment import runs_on_cuda
from qerl_recipes.memory.model_size import read_config
from qerl_recipes.recipe.shapes import ATTENTION
from qerl_vllm_plugin.expected_tensors import experts

# the recipe's ``quantization`` -> vLLM's
ENGINE_QUANTIZATION: dict[str, str | None] = {"qerl_nvfp4": "qerl_nvfp4", "bf16": None, "nf4": "bitsandbytes"}
# What every engine needs on a CPU: a prompt that is computed in parts sets the generator of a seeded request back,
# which torch's cannot do there.
ENGINE_ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False}


def engine_on_cpu(base: str) -> dict[str, Any]:
    """ENGINE_ON_CPU for the checkpoint ``base``; vLLM caches no prefixes of linear attention without such parts."""
    is_hybrid = "linear_attention" in (read_config(base).get("layer_types") or ())
    return {**ENGINE_ON_CPU, **({"enable_prefix_caching": False} if is_hybrid else {})}


def engine_options(arm: str, rank: int | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``vllm.LLM`` needs to serve an arm with an adapter of up to ``rank`` (None: without one).

    The NVFP4 arm keeps the adapter in its layers, where it costs least; stock vLLM has its LoRA slots for it: in a
    mixture of experts, as the ``config`` of the base tells, for attention alone, or it would give every expert some.

    Raises ValueError for an unknown arm, a rank above vLLM's largest, and slots in a mixture of experts on a CPU.
    """
    if arm not in ENGINE_QUANTIZATION:
        raise ValueError(f"quantization is {arm!r}; it is one of {', '.join(ENGINE_QUANTIZATION)}")
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
