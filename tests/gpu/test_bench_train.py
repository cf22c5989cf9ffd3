"""Run ``qerl bench train`` on a GPU with most of its memory blocked, and check what it reports about memory."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

LIMIT_GB = 24


def test_a_step_is_measured_within_a_limit_of_memory(tmp_path, record):
    file = tmp_path / "tiny.json"
    options = "--shape tiny --arms qerl_nvfp4 --groups 2 --generations 4 --prompt 32 --completion 32 --rank 8"
    line = [sys.executable, "-m", "qerl_recipes.cli", "bench", "train", *options.split(), "--pack_tokens", "256"]
    line += ["--gpu_memory_gb", str(LIMIT_GB), "--output", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    result = json.loads(file.read_text())
    assert result["driver"] and result["memory_limit"] == LIMIT_GB * 10**9
    found, summary = result["arms"]["qerl_nvfp4"], result["summary"]["qerl_nvfp4"]
    assert found["kv_cache_tokens"] >= 8 * 64
    peak = summary["peak_gb"]
    figures = f"{peak['allocated']:.2f} / {peak['process']:.2f}"
    record("bench train of a tiny model: peak of torch / of the process, GB", figures)
    assert 0 < peak["allocated"] <= peak["reserved"] < peak["process"] < LIMIT_GB


def test_other_stacks_make_steps(tmp_path, record):
    """Learn fast, so that an engine left behind by two steps would differ from the trainer far more."""
    file = tmp_path / "others.json"
    options = (
        "--shape tiny --arms trl_stock,fp8_rollout --groups 2 --generations 4 --prompt 32 --completion 32 --rank 8"
    )
    options += f" --steps 4 --learning_rate 0.01 --gpu_memory_gb {LIMIT_GB}"
    line = [sys.executable, "-m", "qerl_recipes.cli", "bench", "train", *options.split(), "--output", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    result = json.loads(file.read_text())
    for arm, most in (("trl_stock", 0.01), ("fp8_rollout", 0.03)):
        differences = [step["metrics"]["logp_diff_mean"] for step in result["arms"][arm]["steps"]]
        record(f"bench train of a tiny model, {arm}: log-probability difference of a step", f"{differences[-1]:.4f}")
        assert max(differences) < most, (arm, differences)
        assert result["summary"][arm]["peak_gb"]["process"] < LIMIT_GB
