"""Finds the rank of the adapter that a recipe trains, and the linears that PEFT will wrap, before anything loads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from qerl_recipes.files.adapter import open_adapter
from qerl_recipes.memory.model_size import LinearSize, ModelSize
from qerl_recipes.recipe.configs import ModelConfig, ScriptArguments
from qerl_vllm_plugin.adapter.check import AdapterError, named_modules


def trained(script: ScriptArguments, model: ModelConfig, size: ModelSize) -> tuple[int, list[LinearSize]]:
    """Return the rank and the linears of the adapter that the recipe defines or that ``adapter_name_or_path`` names.

    All of PEFT's keys that choose linears count: ``target_modules``, ``exclude_modules``, ``layers_to_transform`` and
    ``layers_pattern``. Raises ValueError if the adapter names no linear of this model, or is not plain LoRA.
    """
    if script.adapter_name_or_path is not None:
        folder = open_adapter(script.adapter_name_or_path)
        folder.check_plain()
        return folder.rank, _named(f"adapter_name_or_path {folder.path}", folder.config, size)
    targets = model.lora_target_modules or "all-linear"
    targets = "all-linear" if targets == ["all-linear"] else targets
    return model.lora_r, _named("lora_target_modules", {"target_modules": targets}, size)


def most_in_a_block(linears: Sequence[LinearSize]) -> int:
    """Return the largest number of ``linears`` in one block; blocks may have different ones, or none."""
    return max(Counter(".".join(linear.name.split(".")[:3]) for linear in linears).values())


def _named(source: str, config: Mapping[str, Any], size: ModelSize) -> list[LinearSize]:
    try:
        names = named_modules(config, [linear.name for linear in size.linears])
    except AdapterError as error:
        raise ValueError(f"{source}: {error}") from error
    return [linear for linear in size.linears if linear.name in names]
