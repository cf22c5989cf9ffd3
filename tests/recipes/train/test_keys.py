"""Test that keys which TRL or transformers carry out change what is trained."""

import os

import pytest
import scripted_rollouts
import torch
import transformers.trainer
from digit_rewards import digits
from trl.generation import vllm_generation
from vllm.model_executor.layers import utils

from qerl_recipes.train import stock_trl

SAPO, VESPO = ({"loss_type": name, "steps_per_generation": 4, "max_steps": 4} for name in ("sapo", "vespo"))
ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0}  # above any entropy here
# a key and its value -> what the recipe has beside it
CHANGES = {
    ("shuffle_dataset", False): {},
    ("weight_decay", 0.5): {},
    ("adam_beta1", 0.1): {},
    ("adam_beta2", 0.1): {},
    ("adam_epsilon", 1e-2): {},
    ("max_grad_norm", 1e-4): {},
    ("scale_rewards", "none"): {},
    ("sapo_temperature_pos", 9.0): SAPO,
    ("sapo_temperature_neg", 9.0): SAPO,
    ("vespo_k_pos", 9.0): VESPO,
    ("vespo_lambda_pos", 9.0): VESPO,
    ("vespo_k_neg", 9.0): VESPO,
    ("vespo_lambda_neg", 9.0): VESPO,
    ("entropy_coef_max", 0.05): ENTROPY,
    ("entropy_coef_delta", 0.5): ENTROPY,
    ("lr_scheduler_kwargs", '{"min_lr_rate": 0.9}'): {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
    },
}


@pytest.fixture
def train(scripted, make_trainer, make_nvfp4):
    """Return train(**settings) -> the trainer after two steps in fp32 on scripted rollouts."""

    def run(**settings):
        short = {"dtype": torch.float32, "rollout_engine": scripted_rollouts.NAME, "max_steps": 2}
        trainer = make_trainer(make_nvfp4("qwen2"), digits, **{**short, "learning_rate": 1e-3, **settings})
        trainer.train()
        return trainer

    return run


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0])
def test_a_key_changes_the_adapter(change, train):
    adapters = []
    for settings in (CHANGES[change], CHANGES[change] | dict([change])):
        model = train(**settings).model
        adapters.append({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})
    assert max((adapters[1][name] - weight).abs().max() for name, weight in adapters[0].items()) > 1e-6


def test_the_adaptive_weight_of_entropy_does_not_fall_below_its_least(train):
    log = train(**{**ENTROPY, "entropy_target": 0.1, "entropy_coef_min": 0.097}).state.log_history
    assert [entry["entropy_coef"] for entry in log if "loss" in entry] == pytest.approx([0.097, 0.097])


def test_torchs_cache_is_emptied_as_often_as_asked(train, monkeypatch):
    emptied = []
    monkeypatch.setattr(transformers.trainer, "clear_device_cache", lambda: emptied.append(1))
    train(torch_empty_cache_steps=1)
    assert len(emptied) == 2


def test_full_determinism_outlasts_the_trainers_start(train):
    try:
        train(full_determinism=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let tf32 be asked for here, and torch's settings be as they were afterwards."""
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def test_tf32_outlasts_the_start_of_the_engine(as_on_a_gpu, train, monkeypatch):
    start = scripted_rollouts.ScriptedRollouts.__init__

    def as_vllm(*arguments, **options):
        torch.set_float32_matmul_precision("highest")  # by a worker in this process
        start(*arguments, **options)

    monkeypatch.setattr(scripted_rollouts.ScriptedRollouts, "__init__", as_vllm)
    train(tf32=True)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_tf32_outlasts_the_start_of_stock_trls_engine(as_on_a_gpu, write_recipe, make_bf16, monkeypatch):
    class Started:
        def __init__(self, *_):
            torch.set_float32_matmul_precision("highest")  # by a worker in this process

        def train(self):
            raise InterruptedError(torch.backends.cuda.matmul.fp32_precision)

    monkeypatch.setattr(stock_trl, "_trainer", Started)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    recipe = write_recipe(model_name_or_path=str(make_bf16("qwen2")), quantization="bf16")
    with pytest.raises(InterruptedError, match="tf32"):
        stock_trl.main(["--config", recipe, "--use_cpu", "true", "--bf16", "false", "--tf32", "true"])


def test_stock_trls_run_has_the_recipes_wandb_project(write_recipe, make_bf16, monkeypatch):
    def started(*_):
        raise InterruptedError(os.environ["WANDB_PROJECT"])

    monkeypatch.setattr(stock_trl, "_trainer", started)
    for name, value in (("VLLM_PLUGINS", ""), ("WANDB_PROJECT", "another")):
        monkeypatch.setenv(name, value)
    recipe = write_recipe(model_name_or_path=str(make_bf16("qwen2")), quantization="bf16", wandb_project="mine")
    with pytest.raises(InterruptedError, match="mine"):
        stock_trl.main(["--config", recipe, "--use_cpu", "true", "--bf16", "false"])


def test_stock_trls_engine_computes_in_the_recipes_dtype(write_recipe, make_bf16, monkeypatch):
    def started(**_):
        raise InterruptedError(vllm_generation.LLM.keywords["dtype"])

    monkeypatch.setattr("trl.GRPOTrainer", started)
    monkeypatch.setattr(vllm_generation, "LLM", vllm_generation.LLM)  # put back afterwards
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    recipe = write_recipe(model_name_or_path=str(make_bf16("qwen2")), quantization="bf16", dtype="float32")
    with pytest.raises(InterruptedError, match="float32"):
        stock_trl.main(["--config", recipe, "--use_cpu", "true", "--bf16", "false"])
