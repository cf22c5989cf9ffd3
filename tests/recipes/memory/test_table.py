"""Test what a user reads of a plan: from the doctor, when a run starts or is refused, and when GPU memory runs out.

The out-of-memory error is made by hand, because a real one needs a full GPU.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from typer.testing import CliRunner

from qerl_recipes import cli
from qerl_recipes.files.base_model import read_config
from qerl_recipes.files.run_state import recorded
from qerl_recipes.machine import gpu as machine_gpu
from qerl_recipes.machine.gpu import GB, Gpu
from qerl_recipes.memory import table as memory_table
from qerl_recipes.memory.plan import Plan, make
from qerl_recipes.memory.table import OutOfMemory, explained
from qerl_recipes.model import loading as model
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import flags
from qerl_recipes.recipe.shapes import full_name
from qerl_recipes.tasks import prompts
from qerl_recipes.train import preflight
from qerl_recipes.train import run as train

RECIPES = Path(__file__).parents[3] / "recipes"
CPU = ["--use_cpu", "true", "--bf16", "false"]
NVFP4_32B = RECIPES / "Qwen2.5-32B-Instruct/grpo/nvfp4_lora_aqn.yaml"
NVFP4_7B = RECIPES / "Qwen2.5-7B-Instruct/grpo/nvfp4_lora.yaml"
HOPPER = Gpu(80 * GB, is_hopper=True)
ORIGINAL = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture
def small_run(make_nvfp4: Any, tmp_path: Path) -> list[str]:
    """Return the flags of a run on a tiny checkpoint."""
    settings = {
        "model_name_or_path": make_nvfp4("qwen2"),
        "output_dir": tmp_path / "run",
        "dataset_name": "running_sum",
        "dataset_size": 16,
        "reward_funcs": "running_sum_format",
        "max_prompt_length": 32,
        "max_completion_length": 12,
        "bf16": "false",
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def doctor(*flags: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["doctor", *flags])


def test_the_doctor_prints_a_recipes_plan_with_overrides() -> None:
    result = doctor("--recipe", str(NVFP4_32B), "--gpu_memory", "80", "--lora_r", "64")
    assert result.exit_code == 0
    for word in ("engine's weights", "KV cache", "activations", "rank 64", "80.0 GB: it fits in rows of"):
        assert word in result.output


@pytest.mark.parametrize(
    ("recipe", "smallest", "status"),
    [("Qwen2.5-3B-Instruct/grpo/nvfp4_lora.yaml", 24, 0), ("Qwen2.5-32B-Instruct/grpo/bf16_lora.yaml", None, 1)],
)
def test_without_a_gpu_the_doctor_tries_common_sizes(recipe: str, smallest: int | None, status: int) -> None:
    result = doctor("--recipe", str(RECIPES / recipe))
    assert result.exit_code == status
    fitting = re.findall(r"^(\d+)\.0 GB: it fits", result.output, re.MULTILINE)
    assert (int(fitting[0]) if fitting else None) == smallest
    assert all(f"{size}.0 GB: " in result.output for size in memory_table.COMMON_SIZES)


def test_the_page_has_the_table_of_what_fits_and_marks_what_ran() -> None:
    """Compare with the command; a cell is bold where kernels/results has steps of the model in that memory."""
    ran = set()
    for file in (RECIPES.parent / "kernels/results").glob("train_*_NVIDIA_H200.json"):
        result = json.loads(file.read_text())
        if "qerl_nvfp4" in result["summary"]:
            ran.add((full_name(result["shape"]), (result.get("memory_limit") or 141 * GB) // GB))
    printed = [
        re.findall(r"[^\s|]+", row) for row in doctor("--recipe", str(RECIPES)).output.splitlines() if "|" in row
    ]
    rows = [row for row in printed if "Qwen" in row[0]]
    for row in rows:
        of_model = {memory for name, memory in ran if row[0].removesuffix("-Instruct") == name}
        sizes = zip(memory_table.COMMON_SIZES, row[1:], strict=True)
        row[1:] = [f"**{cell}**" if size in of_model else cell for size, cell in sizes]
    section = (RECIPES.parent / "README.md").read_text().split("## What fits")[1]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if "| Qwen" in line]
    page = [[name, *cells] for names, *cells in lines for name in names.split(", ")]  # models alike share a line
    assert page == rows and len(rows) == 10


def test_a_table_is_refused_without_models_and_with_keys_that_it_decides(tmp_path: Path) -> None:
    decided = doctor("--recipe", str(RECIPES), "--pack-tokens", "4096", "--max_completion_length=64")
    assert "max_completion_length, pack_tokens: the table of a folder decides this" in str(decided.exception)
    assert "holds no MODEL/grpo/nvfp4_lora.yaml" in str(doctor("--recipe", str(tmp_path)).exception)


def test_the_longest_completion_fits_and_a_longer_one_does_not() -> None:
    """Check the figure of a model by the plan of a recipe with that completion, on one of its GPUs."""
    config = read_config("Qwen/Qwen2.5-32B-Instruct")
    recipe = ["--config", str(NVFP4_32B), *CPU, "--generation_batch_size", "8", "--vllm_enable_sleep_mode", "true"]
    longest = memory_table.longest_completion(parse(recipe), HOPPER, config)
    for completion, fits in ((longest, True), (longest + memory_table.STEP, False)):
        cache = 8 * (512 + completion) * 256 * 1024  # as many bytes a token
        keys = {"max_completion_length": completion, "vllm_kv_cache_memory_bytes": cache, "recompute_layers": 64}
        planned = make(*parse([*recipe, *flags({**keys, "vllm_max_model_length": 512 + completion})]), gpu=HOPPER)
        assert not planned.problem and planned.remark == ""
        assert (planned.peak <= 0.97 * HOPPER.memory) is fits


@pytest.mark.parametrize(
    "flags", [["--gpu_memory", "80"], ["--lora_r", "8"], ["--recipe", str(NVFP4_32B), "--gpu_memory", "0"]]
)
def test_senseless_flags_of_the_doctor_are_refused(flags: list[str]) -> None:
    assert doctor(*flags).exit_code not in (0, 1) or "GB, such as 80" in str(doctor(*flags).exception)


def test_a_run_that_does_not_fit_is_refused(small_run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_gpu, "this_gpu", lambda: Gpu(GB, is_hopper=True))
    for module, name in ((train, "build"), (model, "load")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("something was loaded"))
    with pytest.raises(ValueError, match=r"does not fit on a GPU of 1\.0 GB: .*not enough GPU memory: .* GB more"):
        train.main([*small_run, "--use_cpu", "false"])


@pytest.fixture
def reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan recipes without reading their models, which are not here, or their data, which are on the hub."""
    rows = Dataset.from_dict({"prompt": ["1"] * 64, "answer": ["1"] * 64, "solution": ["1"] * 64})
    monkeypatch.setattr(prompts, "read", lambda script, loaders, **options: (rows, rows))


def test_a_run_starts_with_its_plan_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reads_nothing: None, tmp_path: Path
) -> None:
    class Started(Exception):
        pass

    monkeypatch.setattr(machine_gpu, "this_gpu", lambda: HOPPER)
    monkeypatch.setattr(preflight, "resume_point", Mock(side_effect=Started))
    flags = ["--config", str(NVFP4_32B), "--output_dir", str(tmp_path), "--vllm_enable_sleep_mode", "false"]
    flags += ["--optim", "adamw_torch", "--use_cpu"]
    with pytest.raises(Started):
        train.main([*flags, "false", "--bf16", "false"])
    line = r"^memory plan: \d+\.\d GB of 80\.0 GB \(.*\), in rows of 5,120 tokens \(enough to be fast\), \d+ of 64 "
    assert re.search(line, capsys.readouterr().err, re.MULTILINE)
    with pytest.raises(Started):
        train.main([*flags, "true", "--bf16", "false"])
    assert "memory plan" not in capsys.readouterr().err


def test_the_plan_settles_tokens_of_a_row_and_blocks(reads_nothing: None) -> None:
    flags = ["--recompute_layers", "-1", "--vllm_enable_sleep_mode", "false", "--optim", "adamw_torch"]
    settings = parse(["--config", str(NVFP4_32B), *CPU, *flags])
    assert preflight.check(*settings).plan is None
    assert settings[1].recompute_layers is None, "a CPU has no plan, and all blocks are the default"
    assert settings[1].pack_tokens == 4096
    settings[1].recompute_layers = settings[1].pack_tokens = -1
    planned = preflight.check(*settings, HOPPER).plan
    assert planned is not None and settings[1].recompute_layers == planned.checkpointed < 64
    assert settings[1].pack_tokens == planned.pack_tokens == 5120
    chosen = {"recompute_layers": planned.checkpointed, "pack_tokens": 5120}
    assert chosen.items() <= recorded(*settings).items(), "a checkpoint says what was chosen"


@pytest.fixture(scope="module")
def plan() -> Plan:
    flags = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "32"]
    settings = parse(["--config", str(NVFP4_7B), *CPU, *flags])
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
                "more unless another program holds memory: activations 23.",  # all are kept because they fit
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
def test_running_out_names_phase_plan_key_and_resumption(
    phase: str,
    fail: Callable[..., None],
    parts: tuple[str, ...],
    plan: Plan,
    make_trainer: Any,
    make_nvfp4: Any,
    monkeypatch: pytest.MonkeyPatch,
    resume,
) -> None:
    """Stop the run in its second rollout, after a checkpoint, and resume it to the end."""
    base = make_nvfp4("qwen2")
    trainer = make_trainer(base, save_strategy="steps", save_steps=1, lr_scheduler_type="constant", max_steps=1)
    trainer.train()
    trainer = make_trainer(base, save_strategy="steps", save_steps=1, lr_scheduler_type="constant", max_steps=2)
    output = trainer.args.output_dir
    with monkeypatch.context() as broken, pytest.raises(OutOfMemory) as error:
        fail(trainer, broken)
        with explained(plan, output, trainer):
            resume(trainer)
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
    resume(trainer)
    assert trainer.state.global_step == 2


class Failing:
    """Stand in for a trainer whose third step has passed."""

    state, vllm_generation = SimpleNamespace(global_step=3), None
    train = staticmethod(failing)

    def add_callback(self, callback: Any) -> None:
        """Ignore the callback, because there is no loop to call it in."""


@pytest.mark.parametrize(
    ("build", "where"),
    [(failing, "while engine and model were loaded"), (lambda *a: Failing(), "in training, after step 3")],
    ids=["loading", "training"],
)
def test_the_command_explains_where_memory_ran_out(
    build: Any, where: str, small_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "build", build)
    with pytest.raises(OutOfMemory, match=rf"{where}\n.*run holds no checkpoint yet"):
        train.main([*small_run, "--use_cpu", "true"])
