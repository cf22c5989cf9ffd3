"""An adapter on the tiny Qwen2, without training one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture(scope="session")
def save_adapter() -> Callable[..., Path]:
    """save_adapter(folder, seed, **state) -> folder with a random LoRA of rank 4, large enough to change most answers.

    It lies on q_proj and down_proj; ``state`` becomes qerl_state.json.
    """

    def save(folder: Path, seed: int, **state: object) -> Path:
        folder.mkdir(exist_ok=True)
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(2):
            for module, inputs, outputs in (("self_attn.q_proj", 64, 64), ("mlp.down_proj", 96, 64)):
                name = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
                tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        if state:
            (folder / "qerl_state.json").write_text(json.dumps(state))
        return folder

    return save
