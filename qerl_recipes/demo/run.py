"""Run the whole loop on a CPU in minutes, quantize, train with GRPO and noise, evaluate, report: ``qerl demo``.

The model has 0.3 million weights and adds single digits. The demo shows that the parts are wired together, and proves
nothing about the method. The policy learns to work a sum out step by step, which it already could, instead of guessing.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from qerl_recipes import SHIPPED
from qerl_recipes.convert.quantize import quantize_checkpoint
from qerl_recipes.evaluate import report
from qerl_recipes.machine import processes

RECIPES = SHIPPED / "demo"
MARK = "demo.json"  # marks the folder of a demo, which the next demo may replace
TASK = "running_sum"
LEAST_PROBLEMS, LEAST_GAIN = 300, 0.10


def run(output: str | Path = "runs/demo", seed: int = 0, steps: int = 60, problems: int = 512) -> int:
    """Run the demo; write ``report.html``, ``adapter/`` and ``evaluation/`` into ``output``; return the exit code.

    It is 0 if the adapter is at least ten points more accurate than its base and their 95 % intervals do not overlap.
    The same seed gives the same numbers on the same machine. Raise ValueError for numbers out of range, FileExistsError
    if ``output`` holds anything but an earlier demo, which is replaced, and RuntimeError if a stage fails.
    """
    began, console = time.monotonic(), Console()
    if not LEAST_PROBLEMS <= problems <= 512:
        raise ValueError(f"--problems is {problems}; it must be {LEAST_PROBLEMS} to 512, or the intervals say nothing")
    if steps < 1:
        raise ValueError(f"--steps is {steps}; it must be at least 1")
    folder = _empty(Path(output), {"seed": seed, "steps": steps, "problems": problems})
    console.print(
        "[bold]QeRL demo[/bold]: a model of 0.3 million weights learns to add. It shows the wiring and proves nothing "
        "about the method.\n"
    )
    base, packed = RECIPES / "starting_model", folder / "nvfp4"
    console.print("[bold]1/4[/bold] Quantizing it to NVFP4")
    quantize_checkpoint(base, packed)
    console.print(f"[bold]2/4[/bold] Training an adapter on the NVFP4 weights: GRPO with noise, {steps} steps")
    recipe = RECIPES / "grpo/nvfp4_lora_aqn.yaml"
    overrides = {"model_name_or_path": packed, "output_dir": folder, "max_steps": steps, "seed": seed}
    overrides |= {"dataset_seed": seed, "save_strategy": "no"}
    arguments = (part for key, value in overrides.items() for part in (f"--{key}", value))
    # in a process of its own, with which its engine ends
    line = [sys.executable, "-m", "qerl_recipes.cli", "train", "--config", recipe, *arguments]
    if processes.run(list(map(str, line))):
        raise RuntimeError(f"a stage of the demo failed: {' '.join(map(str, line))}")
    console.print(f"[bold]3/4[/bold] Evaluating base and adapter on {problems} held-out problems")
    from qerl_recipes.evaluate.run import evaluate  # imports lighteval

    place = {"output_dir": folder / "evaluation", "gpu_memory_utilization": 0.3}
    result = evaluate(str(packed), folder / "adapter", TASK, max_samples=problems, **place)
    console.print("[bold]4/4[/bold] Writing the report\n")
    page = report.write(folder)
    console.print(f"{page}   ({time.monotonic() - began:.0f} s)")
    return _conclude(console, result["tasks"][TASK])


def _empty(folder: Path, settings: dict[str, Any]) -> Path:
    """Make the folder anew, with its mark, and return it; raise FileExistsError where it holds anything but a demo."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise FileExistsError(f"{folder} exists and holds no demo; name another folder with --output")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).write_text(json.dumps(settings) + "\n")
    return folder.resolve()


def _conclude(console: Console, result: dict[str, dict[str, Any]]) -> int:
    """Return the exit code for the figures of base and adapter, and say so if the adapter has learnt too little."""
    base, adapter = result["base"], result["adapter"]
    gain = adapter["accuracy"] - base["accuracy"]
    if gain >= LEAST_GAIN and base["ci95"][1] < adapter["ci95"][0]:
        return 0
    console.print(
        f"[red]The adapter gained {gain:+.1%}; at least {LEAST_GAIN:+.0%} with intervals apart was expected. "
        f"More --steps may help."
    )
    return 1
