"""Provide engines on a tiny checkpoint with a random adapter."""

import peft
import pytest
import torch
from accelerate import Accelerator
from peft.utils import get_peft_model_state_dict

from qerl_recipes.model import loading
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.rollout.engine import VLLMRollouts
from qerl_recipes.rollout.interface import Snapshot


@pytest.fixture(scope="session")
def randomize():
    """Return randomize(model, seed), which makes an adapter larger than training would make it."""

    def fill(model, seed):
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)

    return fill


@pytest.fixture(scope="module")
def policy(make_nvfp4, randomize):
    """Return the trainer's side: a model with a random adapter."""
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(loading.load(make_nvfp4("qwen2"), torch.float32), lora)
    randomize(model, 0)
    return model


@pytest.fixture(scope="module")
def start_engine(policy, make_nvfp4, tmp_path_factory, light_engines):
    def snapshot():
        tensors = get_peft_model_state_dict(policy, save_embedding_layers=False)
        return Snapshot(tensors, policy.peft_config["default"].to_dict())

    def start_for(sequences, **settings):
        training = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("run")),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=sequences,
            max_completion_length=16,
            noise_mode="both",
            seed=5,
            **{"num_generations": 4, "vllm_max_model_length": 64, **settings},
        )
        options = {"rank": 4, "dtype": torch.float32, "snapshot": snapshot, "accelerator": Accelerator(cpu=True)}
        return VLLMRollouts(str(make_nvfp4("qwen2")), training, **options)

    return start_for


@pytest.fixture(scope="module")
def engine(start_engine):
    engine = start_engine(16)
    yield engine
    engine.close()
