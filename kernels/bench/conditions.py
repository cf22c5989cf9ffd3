"""Under what the figures of a file were measured."""

import datetime
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def conditions() -> dict:
    """GPU, driver, versions, commit, date and command of this run."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": versions(),
        "commit": first_line("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", f"kernels/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def versions() -> dict[str, str]:
    """Of everything that the figures depend on."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    for package in ("triton", "vllm", "humming-kernels"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def first_line(*command: str) -> str:
    """That a program prints, or nothing where it is missing."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip().partition("\n")[0]
    except FileNotFoundError:
        return ""
