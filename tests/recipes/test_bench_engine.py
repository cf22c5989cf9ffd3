"""The engine benchmarks on a CPU, where their figures mean nothing and their wiring can be seen."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qerl_recipes import bench_rollout, bench_swap, cli

SMALL = """
import json, sys
from qerl_recipes.environment import prepare
prepare()
from qerl_recipes import bench_rollout
bench_rollout.PROMPT_TOKENS, bench_rollout.NEW_TOKENS, bench_rollout.REPEATS, bench_rollout.PREFILLED = 8, 4, 1, 2
print(json.dumps(bench_rollout.measure(sys.argv[1], "tiny", [1, 3], 4)))
"""


def test_a_swap_is_measured_with_and_without_emptying_the_prefix_cache() -> None:
    found = bench_swap.run("tiny", rank=4)
    seconds = found["seconds"]
    assert set(seconds) == {"swap", "noise", "prefix_cache"} and all(value > 0 for value in seconds.values())
    assert found["blocks"] > 0


@pytest.mark.parametrize("arm", ["bf16", "qerl_nvfp4"])
def test_every_batch_size_of_an_arm_is_measured(arm: str) -> None:
    """In a process of its own, as `qerl bench rollout` has it: an engine that goes takes vLLM's groups with it."""
    done = subprocess.run([sys.executable, "-c", SMALL, arm], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(found["batch"]) == {"1", "3"}
    assert all(row["tokens_per_s"] > 0 for row in (*found["batch"].values(), found["prefill"]))
    assert f"{arm}, batch 3: " in done.stderr


def test_results_say_what_they_were_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(module: str, *arguments: str) -> dict[str, Any]:
        assert (module, arguments) == ("qerl_recipes.bench_swap", ("7B", "16"))
        return {"seconds": {"swap": 0.012, "noise": 0.006, "prefix_cache": 0.005}, "blocks": 99}

    monkeypatch.setattr(bench_swap, "in_own_process", answer)
    monkeypatch.setattr(bench_swap, "check_shape", lambda shape: None)
    bench_swap.run("7B", rank=16, output=tmp_path / "new/swap.json")
    written = json.loads((tmp_path / "new/swap.json").read_text())
    assert {"gpu", "versions", "commit", "date", "command"} <= set(written) and written["blocks"] == 99
    assert "a swap takes 12.0 ms" in capsys.readouterr().out


def test_what_an_arm_has_found_outlives_the_failure_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(module: str, arm: str, *arguments: str) -> dict[str, Any]:
        if arm == "qerl_nvfp4":
            raise RuntimeError("its messages are above")
        return {"batch": {"1": {"tokens_per_s": 7.0, "spread": 0.0}}}

    monkeypatch.setattr(bench_rollout, "in_own_process", answer)
    with pytest.raises(RuntimeError, match="its messages are above"):
        bench_rollout.run("tiny", [1], output=tmp_path / "rollout.json")
    arms = json.loads((tmp_path / "rollout.json").read_text())["arms"]
    assert arms == {"bf16": {"batch": {"1": {"tokens_per_s": 7.0, "spread": 0.0}}}}


def rollout(shape: str) -> None:
    bench_rollout.run(shape, [1])


@pytest.mark.parametrize("bench", [bench_swap.run, rollout])
def test_an_unknown_shape_is_refused_before_anything_starts(bench: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown shape '8B'; known: 0\.5B"):
        bench("8B")


@pytest.mark.parametrize("bench", [bench_swap.run, rollout])
def test_a_large_shape_is_refused_on_a_cpu(bench: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="shape 7B needs a CUDA GPU; on this machine use shape tiny"):
        bench("7B")


@pytest.mark.parametrize("batch", ["0", "1,-2", "a,b"])
def test_a_batch_size_that_is_none_is_refused_by_name(batch: str) -> None:
    done = CliRunner().invoke(cli.app, ["bench", "rollout", "--shape", "tiny", "--batch", batch])
    assert done.exit_code and "batch" in (done.output + str(done.exception))
