"""What ``qerl bench kernels`` runs, and its refusals."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from qerl_recipes.bench import kernels as bench_kernels


def test_tuning_ends_with_the_rule():
    found = bench_kernels.scripts(Path("/times/h100.json"), None, None, tune=True, seed=4)
    assert [line[0] for line in found] == ["tune.py", "fit.py", "tune.py", "fit.py"]
    assert found[0][1:] == ["--out", "/times/h100.json", "--seed", "4"]
    assert found[2][1:] == ["--out", "/times/h100_guided.json", "--seed", "5", "--guided"]
    # each fit reads all that was timed before it
    assert found[1][1:] == ["/times/h100.json"] and found[3][1:] == ["/times/h100.json", "/times/h100_guided.json"]
    assert all((bench_kernels.BENCH / line[0]).is_file() for line in found)


def test_random_points_are_drawn_by_the_seed():
    found = bench_kernels.scripts(Path("/r.json"), None, None, tune=False, random=60, seed=7)
    assert found == [["random_points.py", "--out", "/r.json", "--random", "60", "--seed", "7"]]
    assert (bench_kernels.BENCH / found[0][0]).is_file()


@pytest.mark.parametrize("count", [0, -3])
def test_no_points_at_all_are_refused(count):
    with pytest.raises(ValueError, match=f"--random {count}: .* at least 1"):
        bench_kernels.scripts(Path("/r.json"), None, None, tune=False, random=count)


@pytest.fixture
def random_points(monkeypatch):
    """The script as a module; what it imports from beside itself is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(bench_kernels.BENCH))
    yield importlib.import_module("random_points")
    for file in bench_kernels.BENCH.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.mark.parametrize("wrong", [(), (2,)], ids=["right", "one is wrong"])
def test_a_point_where_ours_is_wrong_is_named_and_is_an_error(wrong, random_points, monkeypatch, tmp_path, capsys):
    """Its row was missing without a word in the file. A stand-in makes the points, all else is the script."""
    points, seen = random_points, []

    def point(layer, M, names):
        seen.append(names)
        assert len(seen) - 1 not in wrong, "relative error 3.0e-01"
        us = {"bf16": 9.0, "qerl": 8.0, "qerl_adapter": 9.0} | dict.fromkeys(names, 10.0)
        return {"layer": layer.name, "N": layer.N, "K": layer.K, "M": M, "us": us}

    for name, stand_in in {
        "point": point,
        "warm_humming": lambda points: [],
        "gate_in_processes": lambda variants, processes: (variants, []),
        "conditions": lambda: {"gpu": "none"},
    }.items():
        monkeypatch.setattr(points, name, stand_in)
    monkeypatch.setattr(points.gemm, "compile_all", lambda variants: None)
    out = tmp_path / "random.json"
    monkeypatch.setattr("sys.argv", ["random_points.py", "--random", "3", "--humming", "1", "--out", str(out)])
    if wrong:
        with pytest.raises(SystemExit, match=r"1 of 6 points have no figure.* relative error 3\.0e-01"):
            points.main()
    else:
        points.main()
    written = json.loads(out.read_text())
    assert len(written["rows"]) == 6 - len(wrong) and len(written.get("failed", [])) == len(wrong)
    assert sum("humming" in names for names in seen) == 1
    assert "3 of 3 at 0.97 or better" in (printed := capsys.readouterr().out) or wrong, printed


@pytest.mark.parametrize("choice", [{"tune": True}, {"random": 3}], ids=["tune", "random"])
def test_layers_cannot_be_chosen_where_they_are_drawn(choice, tmp_path):
    with pytest.raises(ValueError, match="leave out --shapes"):
        bench_kernels.run(tmp_path / "k.json", shapes="7B o", **choice)


def test_the_benchmark_is_one_script():
    assert bench_kernels.scripts(Path("/k.json"), None, None, tune=False) == [["run.py", "--out", "/k.json"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_hopper_gpu_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Hopper GPUs"):
        bench_kernels.run(tmp_path / "k.json", tune=True)


def test_outside_of_a_checkout_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_kernels, "BENCH", tmp_path)
    with pytest.raises(FileNotFoundError, match="run it from a clone"):
        bench_kernels.run(tmp_path / "k.json")
