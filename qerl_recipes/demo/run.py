"""``qerl demo``: run the whole loop on a CPU in minutes: quantize, train with GRPO and noise, evaluate, report.

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
from rich.table import Table

from qerl_recipes.convert.quantize import quantize_checkpoint
from qerl_recipes.evaluate import report
from qerl_recipes.evaluate.intervals import disjoint
from qerl_recipes.machine import processes
from qerl_recipes.recipe.file import SHIPPED

RECIPES = SHIPPED / "demo"
MARK = "demo.json"  # marks the folder of a demo, which the next demo may replace
TASK = "running_sum"
LEAST_PROBLEMS, LEAST_GAIN = 300, 0.10
# quantization -> folder of its evaluation
EVALUATIONS = {"bf16": "evaluation/bf16", "qerl_nvfp4": "evaluation/nvfp4"}
# label in the report -> (folder of the evaluation, policy in its evaluation.json)
ROWS = {
    "bf16_base": (EVALUATIONS["bf16"], "base"),
    "nvfp4_base": (EVALUATIONS["qerl_nvfp4"], "base"),
    "nvfp4_adapter": (EVALUATIONS["qerl_nvfp4"], "adapter"),
}


def run(output: str | Path = "runs/demo", seed: int = 0, steps: int = 60, problems: int = 512) -> int:
    """Run the demo; write ``report.html``, ``adapter/`` and ``summary.json`` into ``output``; return the exit code.

    The code is 0 if the adapter is at least ten points more accurate than its base and their 95 % intervals do not
    overlap, else 1. ``problems`` is how many of the 512 held-out problems are evaluated. The same seed gives the same
    numbers on the same machine.

    Raise ValueError for ``steps`` below 1 or ``problems`` outside 300 to 512. Raise FileExistsError if ``output`` holds
    anything but an earlier demo, which is replaced. Raise RuntimeError if a stage fails.
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
    _evaluate(folder, base, packed, problems)
    console.print("[bold]4/4[/bold] Writing the report\n")
    evaluations = {name: json.loads((folder / name / report.EVALUATION).read_text()) for name, _ in ROWS.values()}
    results = {label: evaluations[name]["tasks"][TASK][arm] for label, (name, arm) in ROWS.items()}
    joined = {**evaluations[EVALUATIONS["qerl_nvfp4"]], "tasks": {TASK: results}}
    (folder / report.EVALUATION).write_text(json.dumps(joined, indent=1) + "\n")
    summary = {
        "accuracy": {row: result["accuracy"] for row, result in results.items()},
        "ci95": {row: result["ci95"] for row, result in results.items()},
        "problems": problems,
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
    }
    (folder / report.SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    page = report.write(folder)
    return _conclude(console, results, page, time.monotonic() - began)


def _empty(folder: Path, settings: dict[str, Any]) -> Path:
    """Make the folder anew, with its mark, and return it; raise FileExistsError where it holds anything but a demo."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise FileExistsError(f"{folder} exists and holds no demo; name another folder with --output")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).write_text(json.dumps(settings) + "\n")
    return folder.resolve()


def _evaluate(folder: Path, base: Path, packed: Path, problems: int) -> None:
    """Evaluate the BF16 base, then NVFP4 base and adapter, in this process, which imports lighteval once."""
    from qerl_recipes.evaluate.run import evaluate

    for name, checkpoint, adapter in (("bf16", base, None), ("qerl_nvfp4", packed, folder / "adapter")):
        evaluate(
            str(checkpoint),
            str(adapter) if adapter else None,
            [TASK],
            output_dir=folder / EVALUATIONS[name],
            quantization=name,
            max_samples=problems,
            gpu_memory_utilization=0.3,
            quiet=True,
        )


def _conclude(console: Console, results: dict[str, dict[str, Any]], page: Path, seconds: float) -> int:
    table = Table(title="running sums: exact answers, greedy")
    for column in ("weights", "accuracy", "95 % interval", "problems", "ended"):
        table.add_column(column, justify="left" if column == "weights" else "right", overflow="fold")
    names = {"bf16_base": "BF16 base", "nvfp4_base": "NVFP4 base", "nvfp4_adapter": "NVFP4 + trained adapter"}
    for label, result in results.items():
        low, high = result["ci95"]
        figures = f"{result['accuracy']:.1%}", f"{low:.1%} to {high:.1%}", str(result["n"]), f"{result['ended']:.0%}"
        table.add_row(names[label], *figures)
    console.print(table)
    console.print(f"{page}   ({seconds:.0f} s)")
    base, adapter = results["nvfp4_base"], results["nvfp4_adapter"]
    gain = adapter["accuracy"] - base["accuracy"]
    if gain >= LEAST_GAIN and disjoint(tuple(base["ci95"]), tuple(adapter["ci95"])):
        return 0
    console.print(
        f"[red]The adapter gained {gain:+.1%}; at least {LEAST_GAIN:+.0%} with intervals apart was expected. "
        f"More --steps may help."
    )
    return 1
