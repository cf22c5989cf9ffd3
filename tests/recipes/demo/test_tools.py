"""Test the demo's recipes with a calculator and with a game, on the model that the repository holds."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import acting
import pytest

from qerl_recipes import cli
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import running_sum
from qerl_recipes.train import run

RECIPES = Path(__file__).parents[3] / "recipes"
FEW = ("--per_device_train_batch_size", "8", "--num_generations", "4")


@pytest.fixture
def trained(tmp_path, monkeypatch, read_metrics, train_main):
    """Return trained(name, steps), which trains a recipe and returns the lines of its metrics."""

    def train(name, steps, *changes):
        monkeypatch.chdir(RECIPES.parent)
        flags = ["--output_dir", str(tmp_path), "--max_steps", str(steps), "--disable_tqdm", "true"]
        flags += ["--save_strategy", "no", *changes]
        train_main("--config", str(RECIPES / "demo" / "tools" / f"{name}.yaml"), *flags)
        return read_metrics(tmp_path)

    return train


@pytest.mark.parametrize("python", [[], ["--environment_python", sys.executable]])
def test_a_reset_that_fails_is_refused_before_the_engine_starts(python, trained, monkeypatch):
    monkeypatch.setattr(run, "build", lambda *given: pytest.fail("the engine starts"))
    monkeypatch.setenv("PYTHONPATH", str(Path(acting.__file__).parent))
    flags = ["--environments", "acting.Jammed", *python, "--reward_funcs", "format", "--reward_weights", "1.0"]
    with pytest.raises(ConfigError, match=r"with the first row: environment (acting\.)?Jammed: reset failed \(OSError"):
        trained("higher_lower", 1, *flags)


@pytest.mark.integration
def test_an_environment_in_its_own_interpreter_trains_alike(trained, tmp_path):
    here = trained("higher_lower", 2, *FEW)
    there = ("--environments", "qerl_recipes.tasks.higher_lower:HigherLower", "--environment_python", sys.executable)
    shutil.rmtree(tmp_path / "adapter")
    apart = trained("higher_lower", 2, *FEW, *there)
    assert [record.pop("environments_lost") for record in apart] == [0.0, 0.0] and apart == here


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "task", "calls"),
    [("calculator", "tools", (0.5, 1.2)), ("higher_lower", "environment:higher_lower", (1.0, 2.5))],
    ids=str,
)
def test_the_starting_model_calls_its_tool_and_the_printed_command_plays_held_out_episodes(
    name, task, calls, trained, capfd, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")
    data = []
    if name == "calculator":
        rows = [json.dumps({**row, "level": i}) + "\n" for i, row in enumerate(running_sum.training_set(64, 0))]
        for split in ("train", "test"):
            (tmp_path / f"{split}.jsonl").write_text("".join(rows))
        data = ["--dataset_name", str(tmp_path), "--dataset_size", "64"]
    first, second = trained(name, 2, *data, "--per_device_train_batch_size", "32")
    assert calls[0] < first["tool_calls"] < calls[1] and first["turns"] > 1.5 and first["tool_failures"] < 0.5
    assert 0 < first["reward"] < 0.6 and first["frac_reward_zero_std"] < 1 and second["logp_diff_mean"] < 0.03
    (printed,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("  qerl evaluate "))
    cli.app([*shlex.split(printed)[1:], "--max_samples", "12", "--temperature", "1"], standalone_mode=False)
    printed = capfd.readouterr().out
    result = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert "mean reward" in printed
    for figures in result["tasks"][task].values():
        assert figures["n"] == 12 and 0.2 < figures["calls"] < 5 and 0 <= figures["reward"]["value"] < 0.7
    lines = [json.loads(line) for line in (tmp_path / "evaluation" / "answers.jsonl").read_text().splitlines()]
    starts = [[line["prompt"] for line in lines if line["model"] == model] for model in ("base", "adapter")]
    assert starts[0] == starts[1]
    held_out = tmp_path / "held_out.jsonl"
    levels = [json.loads(line)["level"] for line in held_out.read_text().splitlines()] if held_out.is_file() else None
    assert levels == ([*range(64)] if name == "calculator" else None)


@pytest.mark.integration
def test_a_run_goes_on_without_the_environments_that_die(trained, tmp_path, monkeypatch, caplog):
    (tmp_path / "deadly.py").write_text(
        "import os\n"
        "from qerl_recipes.tasks.higher_lower import HigherLower\n"
        "class Deadly(HigherLower):\n"
        "    def guess(self, number: int) -> str:\n"
        "        'Guess.\\n\\nArgs:\\n    number: The guess.'\n"
        "        os._exit(1) if number > 4 else None\n"
        "        return super().guess(number)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    there = ("--environments", "deadly.Deadly", "--environment_python", sys.executable)
    first, second = trained("higher_lower", 2, *FEW, *there)
    lost = [record.message for record in caplog.records if "process has ended (code 1) in guess" in record.message]
    assert lost and first["tool_failures"] > 0 and second["reward"] > 0, "the next rollout has all environments again"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reward"), [("calculator", 0.85), ("higher_lower", 0.5)])
def test_a_model_learns_to_use_its_tool(name, reward, trained):
    lines = trained(name, 30)
    rewards = [line["reward"] for line in lines]
    assert sum(rewards[:3]) / 3 < 0.4 and sum(rewards[-5:]) / 5 > reward
    assert lines[-1]["tool_calls"] > 2 * lines[0]["tool_calls"]
