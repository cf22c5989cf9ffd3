"""Test that a result says what it was measured on, and that its command can be run again unchanged."""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import qerl_kernels.conditions

from qerl_recipes.bench import results


def test_the_command_is_one_that_a_shell_reads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "bench",
        "rollout",
        "--variant",
        'pdl={"a": {"b c": true}}',
        "--output",
        "a folder/x.json",
        "--scratch",
        "",
    ]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/qerl", *words])
    assert shlex.split(results.conditions()["command"]) == ["qerl", *words]


def test_a_result_is_saved_in_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    output = tmp_path / "of a week" / "of a day" / "x.json"
    results.save({"seconds": 1.5}, output)
    assert json.loads(output.read_text()) == {"seconds": 1.5}


def test_a_script_beside_the_kernels_names_itself_and_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(line: list[str], **options: object) -> SimpleNamespace:
        asked.append(line)
        return SimpleNamespace(stdout="NVIDIA H200, 580.1\n" if line[0] == "nvidia-smi" else "abc1234\n")

    monkeypatch.setattr(qerl_kernels.conditions.subprocess, "run", answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(sys, "argv", [str(qerl_kernels.conditions.ROOT / "kernels/bench/run.py"), "--out", "7B o"])
    found = qerl_kernels.conditions.conditions()
    assert (found["gpu"], found["driver"], found["commit"]) == ("NVIDIA H200", "580.1", "abc1234")
    assert found["command"] == "python kernels/bench/run.py --out '7B o'" and asked[0][-2:] == ["-i", "3"]
