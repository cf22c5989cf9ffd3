"""Implements ``qerl doctor --recipe``: prints the memory plan of a recipe as a table, and says whether it fits."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qerl_recipes.machine.gpu import GB, Gpu, gigabytes, this_gpu
from qerl_recipes.memory.parts import PHASES, Plan
from qerl_recipes.memory.plan import make

COMMON_SIZES = (24, 48, 80, 141)  # GB of GPUs on the market
SMALLEST_HOPPER = 80  # GB


def run(recipe: Path, overrides: Sequence[str], memory_gb: float | None = None) -> int:
    """Print the memory plan of a recipe, and return the exit status: 0 if the run fits, else 1.

    The plan is for a GPU of ``memory_gb`` or, by default, for this machine's GPU. On a machine without a GPU, it is
    made for common sizes. The table then shows the smallest one that fits, or else the largest.

    ``overrides`` are flags of ``qerl train``. Raises ValueError for an unreadable recipe, and unless ``memory_gb`` is
    above 0.
    """
    if memory_gb is not None and not memory_gb > 0:
        raise ValueError(f"--gpu_memory is {memory_gb:g}; it is the GPU's memory in GB, such as 80")
    from qerl_recipes.recipe.configs import parse

    console, here = Console(), this_gpu()
    if memory_gb is not None:
        gpus = [Gpu(int(memory_gb * GB), here.is_hopper if here else memory_gb >= SMALLEST_HOPPER)]
    else:
        gpus = [here] if here else [Gpu(size * GB, size >= SMALLEST_HOPPER) for size in COMMON_SIZES]
    settings = parse(["--config", str(recipe), *overrides])
    plans = [make(*settings, gpu=gpu) for gpu in gpus]
    shown = next((plan for plan in plans if plan.fits), plans[-1])
    console.print(table(shown, f"{recipe}, {settings[1].quantization}"))
    if here is None and shown.gpu.is_hopper:
        console.print("taken for an H100 or H200; other GPUs hold NVFP4 weights in Marlin's layout, in about as much")
    for plan in plans:
        console.print(verdict(plan), style="" if plan.fits else "bold red", markup=False, soft_wrap=True)
    return 0 if shown.fits else 1


def table(plan: Plan, title: str) -> Table:
    """Return a table with a row for each part: GB during a rollout, GB during training, and how they come about."""
    view = Table(title=f"GPU memory of {title}, on {gigabytes(plan.gpu.memory)}", title_justify="left")
    view.add_column("part")
    for phase in PHASES:
        view.add_column(f"{phase}, GB", justify="right", overflow="fold")
    view.add_column("how it comes about", overflow="fold")
    for part in plan.parts:
        view.add_row(part.name, *(f"{getattr(part, phase) / GB:.2f}" for phase in PHASES), part.detail)
    view.add_section()
    view.add_row("all", *(f"{plan.total(phase) / GB:.2f}" for phase in PHASES), "for sequences of full length")
    return view


def verdict(plan: Plan) -> str:
    """Say in one line whether the run fits, and what to change if it does not."""
    where = gigabytes(plan.gpu.memory)
    if plan.fits:
        anew = f", with {plan.checkpointed} blocks recomputed" if plan.checkpointed else ""
        remark = f"; {plan.remark}" if plan.remark else ""
        return f"{where}: it fits{anew}, with {gigabytes(plan.gpu.memory - plan.peak)} to spare{remark}"
    return f"{where}: {'; and '.join(plan.obstacles())}"
