"""What ``qerl bench kernels`` runs, and its refusals."""

from pathlib import Path

import pytest
import torch

from qerl_recipes import bench_kernels


def test_tuning_ends_with_the_table():
    found = bench_kernels.scripts(Path("/times/h100.json"), "7B o", "16,32", tune=True)
    assert [line[0] for line in found] == ["tune.py", "tune_adapter.py", "make_table.py"]
    assert found[0][1:] == ["--out", "/times/h100.json", "--shapes", "7B o", "--tokens", "16,32"]
    # each reads what the one before has written
    assert found[1][1:] == ["/times/h100.json", "--out", "/times/h100_adapter.json", "--shapes", "7B o"]
    assert found[2][1:] == ["/times/h100.json", "/times/h100_adapter.json"]
    assert all((bench_kernels.BENCH / line[0]).is_file() for line in found)


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
