"""Measure what fp32 norms cost in speed."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(400)
def test_what_fp32_norms_cost(tmp_path, record):
    """Run the same kernels and LoRA slots with and without this plugin, so that only the norms differ."""
    file = tmp_path / "norms.json"
    line = [sys.executable, "-m", "qerl_recipes.cli", "bench", "rollout", "--shape", "0.5B", "--batch", "8,64"]
    line += ["--arms", "stock_nvfp4,qerl_nvfp4_slots_marlin", "--output", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    arms = json.loads(file.read_text())["arms"]
    rates = {name: [arm["batch"][batch]["tokens_per_s"] for batch in ("8", "64")] for name, arm in arms.items()}
    for name, what in (("stock_nvfp4", "BF16 norms (stock vLLM)"), ("qerl_nvfp4_slots_marlin", "fp32 norms")):
        figure = " / ".join(f"{rate:.0f}" for rate in rates[name])
        record(f"decode tokens/s of the 0.5B shapes on Marlin at batch 8 / 64, {what}", figure)
    both = zip(rates["qerl_nvfp4_slots_marlin"], rates["stock_nvfp4"], strict=True)
    assert all(ours > 0.9 * stock for ours, stock in both)
