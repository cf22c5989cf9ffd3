"""``qerl bench kernels``: runs the benchmark that lies beside the kernels, in a process of its own."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "kernels/bench"


def run(output: Path, *, shapes: str | None = None, tokens: str | None = None, tune: bool = False) -> int:
    """Write the figures to ``output`` -> the exit code of the benchmark.

    ``shapes`` and ``tokens`` are comma-separated choices, ``tune`` times every variant of our own kernel instead.
    Raises FileNotFoundError outside of a checkout, and ValueError without a Hopper GPU.
    """
    script = BENCH / ("tune.py" if tune else "run.py")
    if not script.is_file():
        raise FileNotFoundError(f"{script} is missing: the benchmark is part of the source tree; run it from a clone")
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError("the kernels run on Hopper GPUs (H100, H200) only; there is none here")
    line = [sys.executable, str(script), "--out", str(output.resolve())]
    for name, value in (("--shapes", shapes), ("--tokens", tokens)):
        line += [name, value] if value else []
    return subprocess.run(line, cwd=BENCH).returncode
