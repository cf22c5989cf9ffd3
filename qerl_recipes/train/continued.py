"""Refuse a recipe whose rank, scaling or modules differ from those of the adapter or checkpoint to go on from."""

from pathlib import Path

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qerl_recipes.files.adapter import AdapterFolder
from qerl_recipes.recipe.file import ConfigError

KEYS = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora"}
ALL_LINEAR = "all-linear"


def check_settings(adapter: AdapterFolder, recipe: PeftConfig, base: Path, what: str) -> None:
    """Raise ConfigError, naming each key that differs, if ``recipe`` does not describe the adapter to go on from.

    ``what`` begins the message and says where that adapter comes from.
    """
    existing = LoraConfig.from_pretrained(str(adapter.path))
    differences = [
        f"{key} is {getattr(recipe, name)} and the adapter's {getattr(existing, name)}"
        for key, name in KEYS.items()
        if getattr(recipe, name) != getattr(existing, name)
    ]
    wanted, trained = (_adapted_layers(config, base) for config in (recipe, existing))
    if wanted != trained:
        kinds = sorted({name.rpartition(".")[2] for name in trained})
        differences.append(
            f"lora_target_modules has {len(wanted)} layers and the adapter {len(trained)} ({', '.join(kinds)})"
        )
    if differences:
        raise ConfigError(
            f"{what}: {'; '.join(differences)}. Give these keys the adapter's values, name an adapter that has them as "
            "adapter_name_or_path, or train a new one"
        )


def _adapted_layers(config: PeftConfig, base: Path) -> set[str]:
    """Return the names of the linear layers, without the head, that ``config`` adapts in the model ``base``."""
    described = AutoConfig.from_pretrained(base)
    if hasattr(described, "quantization_config"):
        del described.quantization_config
    with init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(described)
    head = model.get_output_embeddings()
    names = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    if config.target_modules == ALL_LINEAR:
        return names
    return {name for name in names if check_target_module_exists(config, name)}
