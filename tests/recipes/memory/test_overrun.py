"""What a user reads when the GPU's memory runs out, wherever it does, and how the run goes on.

The error is made by hand: a real one needs a GPU that is full.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_recipes.machine.gpu import GB, Gpu
from qerl_recipes.memory.overrun import OutOfMemory, explained
from qerl_recipes.memory.parts import Plan
from qerl_recipes.memory.plan import make
from qerl_recipes.recipe.configs import parse
from qerl_recipes.train import run as train

RECIPE = Path(__file__).parents[3] / "recipes/Qwen2.5-7B-Instruct/grpo/nvfp4_lora.yaml"
ORIGINAL = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture(scope="module")
def plan() -> Plan:
    settings = parse(["--config", str(RECIPE), "--use_cpu", "true", "--bf16", "false"])
    return make(*settings, gpu=Gpu(48 * GB, is_hopper=False))


def failing(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError(ORIGINAL)


def in_training(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "compute_loss", failing)


def in_rollout(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.vllm_generation.llm, "enqueue", failing)


@pytest.mark.parametrize(
    ("phase", "fail", "parts"),
    [
        (
            "training",
            in_training,
            (
                "more unless another program holds memory: activations 23.",  # all are kept, for they fit
                "recompute_layers: 28 (activations, 23.",
                "pack_tokens: 2560 (at work,",
            ),
        ),
        pytest.param(
            "rollout",
            in_rollout,
            ("engine's scratch 0.", "vllm_gpu_memory_utilization below 0.3 (KV cache, "),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_running_out_says_the_phase_the_plan_the_key_and_how_to_go_on(
    phase: str,
    fail: Callable[..., None],
    parts: tuple[str, ...],
    plan: Plan,
    make_trainer: Any,
    make_nvfp4: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run is stopped in its second rollout, after a checkpoint, and then goes on from it to the end."""
    base = make_nvfp4("qwen2")
    trainer = make_trainer(base, save_strategy="steps", save_steps=1, lr_scheduler_type="constant", max_steps=1)
    trainer.train()
    trainer = make_trainer(base, save_strategy="steps", save_steps=1, lr_scheduler_type="constant", max_steps=2)
    output = trainer.args.output_dir
    with monkeypatch.context() as broken, pytest.raises(OutOfMemory) as error:
        fail(trainer, broken)
        with explained(plan, output, trainer):
            trainer.train(resume_from_checkpoint=True)
    message = str(error.value)
    assert f"out of memory in {phase}, after step 1" in message
    assert f"planned: {plan.total(phase) / GB:.1f} GB of 48.0 GB; " in message
    assert "measured: " in message
    assert not [words for words in parts if words not in message], message
    assert f"nothing up to {output}/checkpoint-1 is lost" in message
    assert "--resume_from_checkpoint true" in message
    assert not {"lora_r", "optim"} & set(re.findall(r"\w+", message))  # the checkpoint would not survive the change
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    assert str(error.value.__cause__) == ORIGINAL
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2


class Failing:
    """Stands in for a trainer whose third step has passed."""

    state, vllm_generation = SimpleNamespace(global_step=3), None
    train = staticmethod(failing)

    def add_callback(self, callback: Any) -> None:
        """It has no loop to call it in."""


@pytest.mark.parametrize(
    ("build", "where"),
    [(failing, "while engine and model were loaded"), (lambda *a: Failing(), "in training, after step 3")],
    ids=["loading", "training"],
)
def test_the_command_explains_where_memory_ran_out(
    build: Any, where: str, make_nvfp4: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {
        "model_name_or_path": make_nvfp4("qwen2"),
        "output_dir": tmp_path / "run",
        "dataset_name": "running_sum",
        "dataset_size": 16,
        "reward_funcs": "running_sum_format",
        "max_completion_length": 12,
        "use_cpu": "true",
        "bf16": "false",
    }
    monkeypatch.setattr(train, "build", build)
    with pytest.raises(OutOfMemory, match=rf"{where}\n.*run holds no checkpoint yet"):
        train.main([word for key, value in settings.items() for word in (f"--{key}", str(value))])


@pytest.mark.parametrize(
    "text",
    ["CUDA Error: out of memory at cumem_allocator.cpp:62", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"],
)
def test_errors_of_vllm_and_cublas_count_too(text: str, plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory), explained(plan, str(tmp_path)):
        raise RuntimeError(text)


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("out of memory is no word of this error")])
def test_other_errors_pass_through(error: Exception, plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, explained(plan, str(tmp_path)):
        raise error
    assert raised.value is error
