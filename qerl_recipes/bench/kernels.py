"""``qerl bench kernels``: runs the benchmark that lies beside the kernels, in processes of its own."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "kernels/bench"


def run(
    output: Path,
    *,
    shapes: str | None = None,
    tokens: str | None = None,
    tune: bool = False,
    random: int | None = None,
    seed: int = 1,
) -> int:
    """Write the figures to ``output`` -> the exit code of the benchmark.

    ``shapes`` and ``tokens`` are comma-separated choices of the layer table. With ``random`` so many random layers
    and numbers of tokens are drawn by ``seed`` instead, twice: up to 256 tokens, and from 257 to 8192. With
    ``tune`` variants of our own kernel are timed on layers drawn by ``seed``, and the rule that chooses among them
    is fitted to the times. Raises FileNotFoundError outside of a checkout, and ValueError without a Hopper GPU.
    """
    if not (BENCH / "run.py").is_file():
        raise FileNotFoundError(f"{BENCH} is missing: the benchmark is part of the source tree; run it from a clone")
    lines = scripts(output.resolve(), shapes, tokens, tune, random, seed)
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError("the kernels run on Hopper GPUs (H100, H200) only; there is none here")
    for line in lines:
        if code := subprocess.run([sys.executable, *line], cwd=BENCH).returncode:
            return code
    return 0


def scripts(
    output: Path, shapes: str | None, tokens: str | None, tune: bool, random: int | None = None, seed: int = 1
) -> list[list[str]]:
    """The command lines, one after the other."""
    if (tune or random is not None) and (shapes or tokens):
        raise ValueError("--tune and --random draw layers and tokens themselves: leave out --shapes and --tokens")
    if tune and random is not None:
        raise ValueError("--tune and --random are two benchmarks: choose one")
    if random is not None and random < 1:
        raise ValueError(f"--random {random}: how many layers and batch sizes to draw; at least 1")
    if tune:  # the second sweep tries what the first takes for good
        guided = output.with_stem(f"{output.stem}_guided")
        return [
            ["tune.py", "--out", str(output), "--seed", str(seed)],
            ["fit.py", str(output)],
            ["tune.py", "--out", str(guided), "--seed", str(seed + 1), "--guided"],
            ["fit.py", str(output), str(guided)],
        ]
    if random is not None:
        return [["random_points.py", "--out", str(output), "--random", str(random), "--seed", str(seed)]]
    chosen = [*(["--shapes", shapes] if shapes else []), *(["--tokens", tokens] if tokens else [])]
    return [["run.py", "--out", str(output), *chosen]]
