"""Test the command line itself: the spelling of its options, and its message where it cannot run at all."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from qerl_recipes import cli
from qerl_recipes.convert import calibrate
from qerl_recipes.evaluate import run as evaluate
from qerl_recipes.memory import table
from qerl_recipes.train import mismatch, run


def commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        elif name != "train" or path:  # recipe/test_help.py tests its help, which lists the recipe's keys
            yield (*path, name), command


@pytest.mark.parametrize(("path", "command"), commands(typer.main.get_command(cli.app)), ids=lambda given: str(given))
def test_the_help_has_every_option_in_full_and_once(path, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    done = CliRunner().invoke(cli.app, [*path, "--help"], terminal_width=120)
    assert done.exit_code == 0
    words = [word for line in done.stdout.splitlines() for word in line.replace("*", " ").strip("│ ").split()[:1]]
    for option in command.params:
        if option.param_type_name == "option":
            assert all("_" not in name for name in option.opts)
            assert words.count(option.opts[0]) == (not option.hidden), option.opts


def test_no_garbage_is_collected_while_a_command_imports(monkeypatch):
    seen = []
    monkeypatch.setattr(run, "main", lambda _: seen.append(gc.isenabled()))
    monkeypatch.setattr(evaluate, "evaluate_each", lambda _: seen.append(gc.isenabled()) or 1 / 0)
    CliRunner().invoke(cli.app, ["train"])
    CliRunner().invoke(cli.app, ["evaluate", "a_base", "--tasks", "pick_number", "--output-dir", "out"])
    CliRunner().invoke(cli.app, ["evaluate-each", "[]"])
    assert seen == [False] * 3 and gc.isenabled()


@pytest.mark.parametrize("option", ["--gpu-memory", "--gpu_memory"])
def test_an_option_is_spelt_as_a_recipe_or_as_vllm_does_and_what_follows_stays_as_it_is(option, monkeypatch):
    seen = []
    monkeypatch.setattr(table, "run", lambda *given: seen.append(given) or 0)
    following = ["--max_steps", "4", "--output_dir=runs/a_b"]
    done = CliRunner().invoke(cli.app, ["doctor", "--recipe", "a_recipe.yaml", option, "24", *following])
    assert done.exit_code == 0, done.output
    ((recipe, rest, memory),) = seen
    assert (str(recipe), rest, memory) == ("a_recipe.yaml", following, 24.0)


def test_the_doctor_compares_log_probabilities_by_either_name(monkeypatch):
    seen = []
    monkeypatch.setattr(mismatch, "run", lambda *given: seen.append(given) or 0)
    CliRunner().invoke(cli.app, ["doctor", "--logprobs", "a_run", "--seed", "4"])
    with pytest.warns(FutureWarning, match="--mismatch is called --logprobs now"):
        CliRunner().invoke(cli.app, ["doctor", "--mismatch", "a_run", "--seed", "4"])
    assert seen == [(Path("a_run"), ["--seed", "4"], 16)] * 2
    assert "keep one" in CliRunner().invoke(cli.app, ["doctor", "--mismatch", "a_run", "--logprobs", "a_run"]).output
    for ignored in (["--recipe", "a_recipe.yaml"], ["--gpu-memory", "24"]):
        assert "remove --recipe" in CliRunner().invoke(cli.app, ["doctor", "--logprobs", "a_run", *ignored]).output


def test_keys_of_the_recipe_may_follow_the_options_of_calibration_texts(monkeypatch):
    seen = []
    monkeypatch.setattr(calibrate, "write_own_answers", lambda *given, **more: seen.append((*given, more)) or "written")
    following = ["--model_name_or_path=a_b"]
    options = ["--config", "a_recipe.yaml", "--output", "texts.jsonl", "--samples", "8", "--seed", "4"]
    done = CliRunner().invoke(cli.app, ["calibration-texts", *options, "--gpu_memory_utilization", "0.4", *following])
    assert done.exit_code == 0, done.output
    assert done.stdout == "written\n"
    recipe = ["--config", "a_recipe.yaml", "--seed", "4", "--model_name_or_path=a_b"]
    assert seen == [(recipe, Path("texts.jsonl"), 8, {"gpu_memory_utilization": 0.4})]


def test_without_vllm_it_is_said_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import qerl_recipes.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("qerl: the package typer is missing") and "vLLM" in done.stderr
