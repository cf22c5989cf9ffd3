"""Three GRPO steps of a random model with Qwen2.5-0.5B's layer sizes, in each arm, through the users' command."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

RECIPES = Path(__file__).parents[2] / "recipes/demo/grpo"
ARMS = {
    "bf16": ("bf16", "none"),
    "bf16 with noise": ("bf16", "shared"),
    "nf4": ("nf4", "none"),
    "qerl_nvfp4": ("qerl_nvfp4", "none"),
    "qerl_nvfp4 with noise": ("qerl_nvfp4", "shared"),
}


@pytest.mark.parametrize("arm", ARMS)
def test_three_grpo_steps(
    arm: str, checkpoints: tuple[Path, Path], tmp_path: Path, record: Callable[[str, Any], None]
) -> None:
    quantization, noise_mode = ARMS[arm]
    base = checkpoints[1] if quantization == "qerl_nvfp4" else checkpoints[0]
    overrides = {
        "model_name_or_path": base,
        "quantization": quantization,
        "noise_mode": noise_mode,
        "use_cpu": "false",
        "bf16": "true",
        "max_steps": 3,
        "per_device_train_batch_size": 32,
        "vllm_gpu_memory_utilization": 0.2,
        "save_strategy": "no",
        "output_dir": tmp_path / "run",
    }
    recipe = RECIPES / ("nvfp4_lora.yaml" if noise_mode == "none" else "nvfp4_lora_aqn.yaml")
    line = [sys.executable, "-m", "qerl_recipes.cli", "train", "--config", str(recipe)]
    line += [part for key, value in overrides.items() for part in (f"--{key}", str(value))]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    steps = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2, 3]
    mismatch = sum(row["logp_mismatch_mean"] for row in steps) / 3
    record(f"three GRPO steps, {arm}: mean |log p| mismatch of rollout and trainer", f"{mismatch:.4f}")
    assert mismatch < 0.05
