"""Test the arithmetic of ``qerl bench scale`` by hand, and what it computes against the steps that were measured."""

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from qerl_recipes import cli
from qerl_recipes.bench import commands

ROOT = Path(__file__).parents[2]
scale = SimpleNamespace(**runpy.run_path(str(ROOT / "kernels/bench/scale.py")))
# a decode step takes 1 ms for one sequence, 3 ms for three or more
PARTS = scale.Parts(
    decode={1: 0.001, 3: 0.003}, prefill=0.01, training=0.02, overhead=0.5, rest=0.25, push=0.1, adapter=1000
)
SETTING = {"prompt": 10, "at_a_time": 3, "bandwidth": 1e5, "latency": 0.004}
# one GPU and 64 completions: the files' own step; then what printed.json has of two GPUs
MEASURED = [(1, 64, 9.729, 0.0), (2, 64, 6.93, 0.04), (1, 128, 15.9, 0.04), (2, 128, 9.11, 0.08)]


def test_an_engine_works_on_fewer_sequences_until_its_last_has_ended() -> None:
    # 100 steps of three, 100 of two, 200 of one
    decoding = 100 * 0.003 + 100 * 0.002 + 200 * 0.001
    assert scale.rollout_seconds(PARTS, [400, 100, 200], 10, 3) == pytest.approx(0.5 + 3 * 10 * 0.01 + decoding)
    # two at a time: the third begins where the shorter has ended, and ends at step 300
    assert scale.rollout_seconds(PARTS, [400, 100, 200], 10, 2) == pytest.approx(0.8 + 300 * 0.002 + 100 * 0.001)


def test_a_step_on_one_and_on_two_gpus() -> None:
    lengths = [[400, 100, 200, 300]]
    one, two = (scale.step(PARTS, lengths, gpus, **SETTING) for gpus in (1, 2))
    assert one["all_reduce"] == 0 and one["waiting"] == 0
    assert one["training"] == pytest.approx((1000 + 4 * 10) * 0.02)
    assert one["step"] == pytest.approx(one["rollout"] + one["training"] + 0.25)
    # the first engine has 400 and 200, the second 100 and 300; each decodes two, then one
    engines = [0.5 + 2 * 10 * 0.01 + few * 0.002 + (many - few) * 0.001 for few, many in ((200, 400), (100, 300))]
    assert two["rollout"] == pytest.approx(engines[0]) and engines[0] > engines[1]
    assert two["waiting"] == pytest.approx(1 - sum(engines) / 2 / engines[0])
    assert two["training"] == pytest.approx((600 + 2 * 10) * 0.02), "the trainer with more tokens"
    # by ring each GPU sends half of the bytes twice, in two hops
    assert two["all_reduce"] == pytest.approx(2 * (500 / 1e5 + 0.004))
    assert two["step"] == pytest.approx(two["rollout"] + two["training"] + two["all_reduce"] + 0.25)


def test_an_adapter_reaches_servers_one_by_one_or_as_a_tree() -> None:
    expected = {1: (0.1, 0.1), 2: (0.2, 0.2), 3: (0.3, 0.2), 7: (0.7, 0.3), 512: (51.2, 1.0)}
    assert {engines: scale.ways(PARTS, engines) for engines in expected} == {
        engines: pytest.approx(seconds) for engines, seconds in expected.items()
    }


@pytest.mark.parametrize(("gpus", "completions", "seconds", "within"), MEASURED)
def test_what_is_computed_is_what_was_measured(gpus: int, completions: int, seconds: float, within: float) -> None:
    setting = {**SETTING, "prompt": 256, "at_a_time": 128, "bandwidth": 50e9, "latency": 1e-5}
    computed = scale.step(scale.measured("7B"), [[1024] * completions], gpus, **setting)
    assert computed["step"] == pytest.approx(seconds, rel=within or 1e-4)
    printed = [row["value"] for row in json.loads((scale.RESULTS / "printed.json").read_text())["rows"]]
    assert within == 0 or any(re.search(rf"(^|; ){re.escape(f'{seconds:g}')}\b", value) for value in printed)


def test_the_parts_of_72b_are_those_of_32b_by_its_parameters() -> None:
    small, large = scale.measured("32B"), scale.measured("72B")
    # rank 32 in fp32 on every linear of 80 blocks: 32 x (inputs + outputs) of each
    assert large.adapter == 4 * 32 * 80 * (2 * 2 * 8192 + 2 * (8192 + 1024) + 3 * (8192 + 29568))
    ratio = (80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 29568)) / (
        64 * (2 * 5120**2 + 2 * 5120 * 1024 + 3 * 5120 * 27648)
    )
    for name in ("prefill", "training", "overhead", "rest"):
        assert getattr(large, name) == pytest.approx(ratio * getattr(small, name)), name
    assert large.decode == {size: pytest.approx(ratio * seconds) for size, seconds in small.decode.items()}
    assert large.push == pytest.approx(small.push * large.adapter / small.adapter)


def test_doubling_pays_until_a_step_is_hardly_shorter() -> None:
    rows = {1: {"step": 10.0}, 2: {"step": 6.0}, 4: {"step": 5.1}, 8: {"step": 1.0}}
    assert scale.last_that_pays(rows) == 2
    assert scale.last_that_pays({1: {"step": 10.0}, 2: {"step": 6.0}}) == 2


def called(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["bench", "scale", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_command_prints_each_number_of_gpus_with_its_assumptions(tmp_path: Path) -> None:
    wanted = ("--completions", "8", "--bandwidth-gb", "25")
    text = called(*wanted, "--lengths", "lognormal:20,0.5,40", "--output", str(tmp_path / "out.json"))
    for said in (
        "25 GB/s and 10 us a hop",
        "64 sequences at a time",
        "lengths lognormal:20,0.5,40",
        "computed, not run",
    ):
        assert said in text
    saved = json.loads((tmp_path / "out.json").read_text())
    assert list(saved["gpus"]) == ["1", "2", "4", "8"], "no GPU is without a completion"
    assert (saved["completions"], saved["bandwidth"]) == (8, 25e9)
    assert "by the parameters of 72B" in called("--shape", "72B", "--completions", "2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "14B"], "shape '14B' has no measured parts; known: 7B, 32B, 72B"),
        (["--completions", "0"], "completions is 0, and must be above 0"),
        (["--bandwidth-gb", "0"], "bandwidth_gb is 0.0"),
        (["--lengths", "1024"], "--lengths 1024: No such file"),
    ],
)
def test_what_makes_no_step_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        called(*arguments)


@pytest.mark.parametrize("command", ["scale", "kernels"])
def test_without_a_clone_the_missing_folder_is_named(command: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(commands, "KERNELS", tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} is missing.*run it from a clone"):
        CliRunner().invoke(cli.app, ["bench", command], catch_exceptions=False)


@pytest.mark.parametrize("shape", ["7B", "72B"])
def test_the_page_has_what_the_command_computes(shape: str) -> None:
    page = (ROOT / "recipes" / "distributed.md").read_text().partition("## How many GPUs pay")[2]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \d", line)]
    computed = scale.run(shape)["gpus"]
    place = 1 if shape == "7B" else 3
    shown = {int(row[0]): row[place : place + 2] for row in rows}
    waiting = {int(row[0]): row[5] for row in rows}
    assert set(shown) == {1, 8, 32, 512}
    for gpus, cells in shown.items():
        row, alone = computed[gpus], computed[1]["step"]
        assert cells == [
            f"{row['step']:.0f} s, {alone / row['step']:.1f}x",
            f"{row['one_by_one']:.1f} s",
        ]
        assert shape != "7B" or waiting[gpus] == f"{100 * row['waiting']:.0f} %"
    assert f"{shape} up to {scale.last_that_pays(computed)} GPUs" in page
