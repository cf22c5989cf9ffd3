"""Committed measurements: every file is named, its command is one, and what the page says of it is in it."""

import importlib
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from statistics import median

import pytest
import typer

from qerl_recipes.cli import app
from qerl_recipes.recipe.configs import GRPOConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "kernels" / "results"
PAGE = (RESULTS / "README.md").read_text()
USAGE_ERROR = typer.BadParameter.__base__  # of unknown options, too; typer has no public name for it
PAGES = PAGE + (ROOT / "kernels" / "README.md").read_text()
FILES = {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def row_of(name):
    """The line of a table of the page that has a file in its second column."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| ") and f" | `{name}.json` | " in line]
    return line


def commands():
    """Every command that a file or the page says something was made by, with where it stands."""
    for name, data in FILES.items():
        if "command" in data:
            yield data["command"].partition(" (")[0], name
    for line in re.findall(r"`((?:qerl|python) [^`]+)`", PAGES):
        yield line, "README.md"


def check_qerl(words):
    """Raises where the words are no command, an option is none, or a value is not of its type."""
    command = typer.main.get_command(app)
    parent = command.context_class(command, **command.context_settings)  # how options may be spelt
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    with command.make_context(command.name, list(words), parent=parent) as context:
        keys = {word.removeprefix("--") for word in context.args if word.startswith("--")}
    assert keys <= {field.name for field in fields(GRPOConfig)}, "neither an option nor a key of a recipe"


@pytest.mark.parametrize(("line", "where"), list(commands()), ids=lambda text: text[:60])
def test_every_command_is_one(line, where):
    program, *words = shlex.split(line)
    if program == "qerl":
        check_qerl(words)
        return
    script = ROOT / words[0]
    assert script.is_file(), f"{line} of {where}"
    known = set(re.findall(r'"(--[\w-]+)"', script.read_text()))
    assert {word for word in words[1:] if word.startswith("--")} <= known, f"{line} of {where}"


@pytest.mark.parametrize(
    "wrong", ["bench rollout --bach 8", "bench rollout --repeats many", "bench rolout", "bench train --checkpointed 3"]
)
def test_a_command_that_is_none_is_found(wrong):
    with pytest.raises((KeyError, AssertionError, USAGE_ERROR)):
        check_qerl(wrong.split())


def test_every_file_says_how_it_is_made_again_and_of_what():
    lacking = {name: {"command", "commit", "date", "gpu"} - data.keys() for name, data in FILES.items()}
    assert {name: keys for name, keys in lacking.items() if keys} == {}


def test_every_file_is_on_the_page():
    assert {name for name in FILES if f"{name}.json" not in PAGES} <= {"tune_1_NVIDIA_H200", "tune_2_NVIDIA_H200"}


ROLLOUTS = [name for name, data in FILES.items() if name.startswith("rollout") and data.get("interleaved")]


@pytest.mark.parametrize("name", ROLLOUTS)
def test_what_the_page_says_of_rollouts_is_in_their_file(name):
    row = row_of(name)
    arms = [arm for arm in FILES[name]["arms"].values() if "batch" in arm]
    for arm in arms:
        rates = [f"{case['tokens_per_s']:.0f}" for case in arm["batch"].values()]
        assert ", ".join(rates) in row or " and ".join(rates) in row, rates
    first, ours = arms[0], FILES[name]["arms"].get("qerl_nvfp4", arms[-1])
    if first is not ours:
        ratios = [ours["batch"][size]["tokens_per_s"] / case["tokens_per_s"] for size, case in first["batch"].items()]
        assert ", ".join(f"{ratio:.2f}" for ratio in ratios) + "x" in row
    said = [float(percent) for percent in re.findall(r"(\d[\d.]*) %", row)]
    largest = max(100 * case["spread"] for arm in arms for case in arm["batch"].values())
    assert "spread" not in row or max(said) >= round(largest, 1), f"the spread is {largest:.1f} %"


STEPS = [name for name, data in FILES.items() if name.startswith("train")]


@pytest.mark.parametrize("name", STEPS)
def test_what_the_page_says_of_steps_is_in_their_file(name):
    data, row = FILES[name], row_of(name)
    numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", row)}
    for arm, found in data["summary"].items():
        step = found["seconds"]["step"]
        assert numbers & {round(step, digits) for digits in (0, 1, 2)}, f"{arm}: {step:.2f} s"
    blocks = [arm["recipe"].get("checkpointed_layers") for arm in data["arms"].values()]
    if said := re.search(r"recomputed in ((?:\d+ and )?\d+) of \d+ blocks", row):
        assert [int(number) for number in said[1].split(" and ")] == blocks
    assert "all activations kept" not in row or not any(blocks)


def test_the_bars_that_a_step_misses_stand_beside_it():
    ours, theirs = (FILES["train_7B_80GB_NVIDIA_H200"]["summary"][arm] for arm in ("qerl_nvfp4", "bf16"))
    step, rollout, rate = ours["seconds"]["step"], ours["seconds"]["rollout"], ours["rollout_tokens_per_s"]
    of_bf16 = theirs["seconds"]["step"]
    (text,) = [part for part in PAGE.split("\n\n") if part.startswith("Bars of the first row: training 3.9 s, met;")]
    assert ours["seconds"]["training"] <= 3.9 and step > 8 and of_bf16 / step < 1.6
    wide = FILES["train_14B_NVIDIA_H200"]["summary"]
    for said in (
        f"missed at {step:.2f} s and {of_bf16 / step:.2f}x",
        f"takes {rollout:.2f} of the {step:.2f} s, {rate:,.0f} tokens/s",
        f"8.0 s want {rate * rollout / (rollout + 8 - step):,.0f}, ",
        f"{of_bf16:.2f} by it, which 1.6x would have to beat with {of_bf16 / 1.6:.2f}.",
        f"missed at {wide['bf16']['seconds']['step'] / wide['qerl_nvfp4']['seconds']['step']:.2f}x (",
    ):
        assert said in " ".join(text.split())


@pytest.mark.parametrize(("low", "high", "bar", "others"), [(1, 256, 0.97, None), (257, 8192, 0.93, ("bf16",))])
def test_what_the_pages_say_of_random_points_is_in_their_file(low, high, bar, others):
    """``others``: whose time a product is compared with, by default the best of all that were timed."""
    rows = [row for row in FILES["random_NVIDIA_H200"]["rows"] if low <= row["M"] <= high]
    times = [row["us"] for row in rows]
    named = [others or set(us) - {"qerl", "qerl_adapter"} for us in times]
    ratios = [min(us[name] for name in names) / us["qerl"] for us, names in zip(times, named, strict=True)]
    met = sum(ratio >= bar for ratio in ratios)
    added = [us["qerl_adapter"] - us["qerl"] for us in times]
    cheap = sum(more <= max(0.15 * us["qerl"], 3) for more, us in zip(added, times, strict=True))
    (row,) = [line for line in PAGES.splitlines() if line.startswith(f"| {low} to {high} | ")]
    expected = f"| {met} of {len(rows)} ({met / len(rows):.0%}) | {median(ratios):.2f} | {min(ratios):.2f} "
    expected += f"| {cheap} of {len(rows)}, median {median(added):.1f} us |"
    assert row.replace(" %", "%").endswith(expected)
    assert f"{met} of {len(rows)} meet" in PAGE.replace(f"{len(rows)}\npoints", f"{len(rows)}").replace("points ", "")
    with_humming = sum("humming" in us for us in times)
    assert others or all(f"{words} {with_humming}" in PAGES for words in ("takes part in", "Humming at"))


def test_the_table_of_layers_is_what_its_script_prints(monkeypatch):
    pytest.importorskip("matplotlib")  # for its picture
    monkeypatch.syspath_prepend(str(ROOT / "kernels" / "bench"))
    lines = importlib.import_module("report").ratios(FILES["NVIDIA_H200"]).splitlines()
    sys.modules.pop("report")
    assert len(lines) == 14 and all(line in PAGES for line in lines)
