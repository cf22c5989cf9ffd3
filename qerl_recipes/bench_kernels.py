"""``qerl bench kernels``: runs the benchmark that lies beside the kernels, in processes of its own."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "kernels/bench"


def run(output: Path, *, shapes: str | None = None, tokens: str | None = None, tune: bool = False) -> int:
    """Write the figures to ``output`` -> the exit code of the benchmark.

    ``shapes`` and ``tokens`` are comma-separated choices. With ``tune`` every variant of our own kernel is timed
    instead, then the best with an adapter into a file beside ``output``, and the table of variants is made from both.
    Raises FileNotFoundError outside of a checkout, and ValueError without a Hopper GPU.
    """
    if not (BENCH / "run.py").is_file():
        raise FileNotFoundError(f"{BENCH} is missing: the benchmark is part of the source tree; run it from a clone")
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError("the kernels run on Hopper GPUs (H100, H200) only; there is none here")
    for line in scripts(output.resolve(), shapes, tokens, tune):
        if code := subprocess.run([sys.executable, *line], cwd=BENCH).returncode:
            return code
    return 0


def scripts(output: Path, shapes: str | None, tokens: str | None, tune: bool) -> list[list[str]]:
    """The command lines, one after the other."""
    chosen = ["--shapes", shapes] if shapes else []
    all_chosen = [*chosen, "--tokens", tokens] if tokens else chosen
    if not tune:
        return [["run.py", "--out", str(output), *all_chosen]]
    with_adapter = output.with_stem(f"{output.stem}_adapter")
    return [
        ["tune.py", "--out", str(output), *all_chosen],
        ["tune_adapter.py", str(output), "--out", str(with_adapter), *chosen],  # takes the tokens from the first
        ["make_table.py", str(output), str(with_adapter)],
    ]
