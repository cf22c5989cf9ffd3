"""Run ``qerl bench train`` on a GPU with most of its memory blocked, and check what it reports about memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

LIMIT_GB = 24


def test_a_step_is_measured_within_a_limit_of_memory(tmp_path: Path, record: Callable[[str, Any], None]) -> None:
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
    assert summary["training_part"]["tokens"] == 256
