"""What ``qerl bench kernels`` runs, and its refusals."""

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
