"""Who asks for a plan: the doctor, of a recipe, and a run, which is refused because of it or starts with it."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from datasets import Dataset
from typer.testing import CliRunner

from qerl_recipes import cli
from qerl_recipes.machine import gpu as machine_gpu
from qerl_recipes.machine.gpu import GB, Gpu
from qerl_recipes.memory import table as memory_table
from qerl_recipes.model import loading as model
from qerl_recipes.recipe.configs import parse
from qerl_recipes.tasks import prompts
from qerl_recipes.train import preflight
from qerl_recipes.train import run as train

RECIPES = Path(__file__).parents[3] / "recipes"
CPU = ["--use_cpu", "true", "--bf16", "false"]
NVFP4_32B = RECIPES / "Qwen2.5-32B-Instruct/grpo/nvfp4_lora_aqn.yaml"
HOPPER = Gpu(80 * GB, is_hopper=True)


def doctor(*flags: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["doctor", *flags])


def test_the_doctor_prints_a_recipes_plan_with_overrides() -> None:
    result = doctor("--recipe", str(NVFP4_32B), "--gpu_memory", "80", "--lora_r", "64")
    assert result.exit_code == 0
    for word in ("engine's weights", "KV cache", "activations", "rank 64", "80.0 GB: it fits, with"):
        assert word in result.output


def test_the_doctor_says_what_to_change() -> None:
    flags = ["--gpu_memory", "60", "--share_weights", "false", "--vllm_gpu_memory_utilization", "0.6"]
    result = doctor("--recipe", str(NVFP4_32B), *flags)
    assert result.exit_code == 1
    assert "too much in training" in result.output
    assert "way out: " in result.output


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


@pytest.mark.parametrize(
    "flags", [["--gpu_memory", "80"], ["--lora_r", "8"], ["--recipe", str(NVFP4_32B), "--gpu_memory", "0"]]
)
def test_flags_of_the_doctor_that_make_no_sense_are_refused(flags: list[str]) -> None:
    assert doctor(*flags).exit_code not in (0, 1) or "GB, such as 80" in str(doctor(*flags).exception)


def test_a_run_that_does_not_fit_is_refused(make_nvfp4: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "model_name_or_path": make_nvfp4("qwen2"),
        "output_dir": tmp_path,
        "dataset_name": "running_sum",
        "dataset_size": 16,
        "reward_funcs": "running_sum_format",
        "max_prompt_length": 32,
        "max_completion_length": 16,
    }
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    monkeypatch.setattr(machine_gpu, "this_gpu", lambda: Gpu(GB, is_hopper=True))
    for module, name in ((train, "build"), (model, "load")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("something was loaded"))
    with pytest.raises(ValueError, match=r"does not fit on a GPU of 1\.0 GB: .* GB too much in"):
        train.main([*flags, "--use_cpu", "false", "--bf16", "false"])


@pytest.fixture
def reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes of models that are not here, and whose data the hub has, are planned without both."""
    rows = Dataset.from_dict({"prompt": ["1"] * 64, "answer": ["1"] * 64, "solution": ["1"] * 64})
    monkeypatch.setattr(prompts, "read", lambda script, loaders: (rows, rows))


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
    assert re.search(r"^memory plan: \d+\.\d GB of 80\.0 GB \(", capsys.readouterr().err, re.MULTILINE)
    with pytest.raises(Started):
        train.main([*flags, "true", "--bf16", "false"])
    assert "memory plan" not in capsys.readouterr().err


def test_the_plan_settles_how_many_blocks_are_recomputed(reads_nothing: None) -> None:
    flags = ["--recompute_layers", "-1", "--vllm_enable_sleep_mode", "false", "--optim", "adamw_torch"]
    settings = parse(["--config", str(NVFP4_32B), *CPU, *flags])
    assert preflight.check(*settings).plan is None
    assert settings[1].recompute_layers is None, "a CPU has no plan, and all blocks are the default"
    settings[1].recompute_layers = -1
    planned = preflight.check(*settings, HOPPER).plan
    assert planned is not None and settings[1].recompute_layers == planned.checkpointed < 64
