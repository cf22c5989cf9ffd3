"""Show memory plans: as the tables of ``qerl doctor --recipe``, and in the message of an out-of-memory error."""

import bisect
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from qerl_recipes.files.run_state import what_is_kept, whole_checkpoints
from qerl_recipes.machine.gpu import GB, Gpu, gigabytes, this_gpu
from qerl_recipes.memory.estimates import sequences
from qerl_recipes.memory.plan import PHASES, SPARE, Plan, make
from qerl_recipes.memory.sizes import measure
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import read_yaml
from qerl_recipes.recipe.shapes import BY_MODEL_ID

COMMON_SIZES = (24, 32, 48, 80, 141)  # GB of GPUs on the market
SMALLEST_HOPPER = 80  # GB
ARM, COMPLETIONS, STEP = "nvfp4_lora.yaml", 8, 256  # of the table of a folder; lengths are multiples of STEP
DECIDED_BY_TABLE = {"max_completion_length", "pack_tokens", "recompute_layers", "vllm_enable_sleep_mode"}
DECIDED_BY_TABLE |= {"vllm_gpu_memory_utilization", "vllm_kv_cache_memory_bytes", "vllm_max_model_length"}
# of an out-of-memory error in messages of vLLM's allocator, CUDA and cuBLAS
SIGNS = ("out of memory", "cublas_status_alloc_failed")


def run(recipe: Path, overrides: Sequence[str], memory_gb: float | None = None) -> int:
    """Print the memory plan of a recipe, and return the exit status: 0 if the run fits, else 1.

    Of a folder of recipes ``what_fits`` is printed. The plan is for a GPU of ``memory_gb`` or this machine's. Without
    either it is made for common sizes, and the table shows the smallest one that fits, or else the largest. Raises
    ValueError for an unreadable recipe, and unless ``memory_gb`` is above 0.
    """
    if memory_gb is not None and not memory_gb > 0:
        raise ValueError(f"--gpu_memory is {memory_gb:g}; it is the GPU's memory in GB, such as 80")
    console, here = Console(), this_gpu()
    if memory_gb is not None:
        gpus = [Gpu(int(memory_gb * GB), here.is_hopper if here else memory_gb >= SMALLEST_HOPPER)]
    else:
        gpus = [here] if here else [Gpu(size * GB, size >= SMALLEST_HOPPER) for size in COMMON_SIZES]
    if recipe.is_dir():
        console.print(what_fits(recipe, overrides, gpus))
        return 0
    settings = parse(["--config", str(recipe), *overrides])
    plans = [make(*settings, gpu=gpu) for gpu in gpus]
    shown = next((plan for plan in plans if plan.fits), plans[-1])
    console.print(table(shown, f"{recipe}, {settings[1].quantization}"))
    if here is None and shown.gpu.is_hopper:
        console.print("taken for an H100 or H200; other GPUs hold NVFP4 weights in Marlin's layout, in about as much")
    for plan in plans:
        console.print(verdict(plan), style="" if plan.fits else "bold red", markup=False, soft_wrap=True)
    return 0 if shown.fits else 1


def what_fits(folder: Path, overrides: Sequence[str], gpus: Sequence[Gpu]) -> Table:
    """Return a table of the longest completion with which each model of ``folder`` can train on each GPU."""
    given = {word[2:].partition("=")[0].replace("-", "_") for word in overrides if word.startswith("--")}
    if decided := sorted(given & DECIDED_BY_TABLE):
        raise ValueError(f"{', '.join(decided)}: the table of a folder decides this; name one recipe of {folder}")
    rows = []
    for recipe in folder.glob(f"*/grpo/{ARM}"):
        if (config := BY_MODEL_ID.get(read_yaml(recipe)["model_name_or_path"])) is not None:
            settings = parse(["--config", str(recipe), "--generation_batch_size", str(COMPLETIONS), *overrides])
            cells = [f"{longest:,}" if (longest := longest_completion(settings, gpu, config)) else "-" for gpu in gpus]
            rows.append((measure(config).parameters, [recipe.parts[-3], *cells]))
    if not rows:
        raise ValueError(f"{folder} holds no MODEL/grpo/{ARM} of a model whose sizes are known here")
    title = f"tokens of the longest completion that trains, {COMPLETIONS} in a step unless a flag says otherwise"
    view = Table(title=title, title_justify="left", box=box.MARKDOWN)
    view.add_column("model", no_wrap=True)
    for gpu in gpus:
        view.add_column(f"{gpu.memory / GB:.0f} GB", justify="right")
    for _, row in sorted(rows):
        view.add_row(*row)
    return view


def longest_completion(settings: tuple[Any, Any, Any], gpu: Gpu, config: Mapping[str, Any]) -> int:
    """Return the most tokens of a completion with which a recipe fits, to a multiple of STEP; 0 if none fits.

    All blocks are recomputed, a row holds one sequence, and the engine's cache holds all of a step's sequences and is
    free while the trainer works. The model's positions are the limit.
    """
    script, training, model = copy.deepcopy(settings)
    training.vllm_enable_sleep_mode, training.pack_tokens, training.recompute_layers = True, 1, None
    prompt, positions = script.max_prompt_length or STEP, config["max_position_embeddings"]
    token = make(script, training, model, gpu=gpu, config=config).token

    def fits(completion: int) -> bool:
        training.max_completion_length, training.vllm_max_model_length = completion, prompt + completion
        training.vllm_kv_cache_memory_bytes = sequences(training) * (prompt + completion) * token
        return make(script, training, model, gpu=gpu, config=config).peak <= (1 - SPARE) * gpu.memory

    lengths = range(STEP, positions - prompt + 1, STEP)
    return STEP * bisect.bisect_left(lengths, True, key=lambda completion: not fits(completion))


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
    longest = f"; {plan.at_full_length / GB:.2f} if every sequence has full length"
    most = f"at most, whatever the lengths{longest if plan.at_full_length < plan.peak else ''}"
    view.add_row("all", *(f"{plan.total(phase) / GB:.2f}" for phase in PHASES), most)
    return view


def verdict(plan: Plan) -> str:
    """Say in one line whether the run fits, and what to change if it does not."""
    where = gigabytes(plan.gpu.memory)
    if plan.fits:
        choice = f" {plan.choice()}" if plan.choice() else ""
        remark = f"; {plan.remark}" if plan.remark else ""
        return f"{where}: it fits{choice}, with {gigabytes(plan.gpu.memory - plan.peak)} to spare{remark}"
    return f"{where}: {'; and '.join(plan.obstacles())}"


class OutOfMemory(MemoryError):
    """Report that the GPU's memory ran out: in which phase, what was planned, and what to do."""


@contextlib.contextmanager
def explained(plan: Plan | None, output_dir: str, trainer: Any = None) -> Iterator[None]:
    """Turn an out-of-memory error in the block into OutOfMemory; ``trainer`` is None while it is being built."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if isinstance(error, OutOfMemory) or not (is_known or any(sign in str(error).lower() for sign in SIGNS)):
            raise
        phase = _phase(error.__traceback__, trainer)
        raise OutOfMemory(_message(plan, phase, output_dir, trainer)) from error


def _phase(traceback: TracebackType | None, trainer: Any) -> str:
    """Return ``loading`` without a trainer, ``rollout`` if a method of its engine was running, else ``training``."""
    if trainer is None:
        return "loading"
    engine = getattr(trainer, "vllm_generation", None)
    while traceback is not None:
        if engine is not None and traceback.tb_frame.f_locals.get("self") is engine:
            return "rollout"
        traceback = traceback.tb_next
    return "training"


def _message(plan: Plan | None, phase: str, output_dir: str, trainer: Any) -> str:
    where = "while engine and model were loaded" if phase == "loading" else f"in {phase}"
    step = f", after step {trainer.state.global_step}" if trainer is not None else ""
    lines = [f"out of memory {where}{step}"]
    if plan is not None:
        planned = "rollout" if phase == "loading" else phase
        largest = plan.largest(planned)
        added = plan.added(planned) or largest  # with the engine in another process a rollout adds nothing
        listed = ", ".join(f"{part.name} {gigabytes(getattr(part, planned))}" for part in added)
        advice = plan.advice([*added, *largest], planned, resuming=bool(whole_checkpoints(output_dir)))
        lines.append(
            f"planned: {gigabytes(plan.total(planned))} of {gigabytes(plan.gpu.memory)}; what this phase adds, and one "
            f"of which must have taken more unless another program holds memory: {listed}"
        )
        lines.append(f"measured: {_measured()}")
        lines.append(f"to need less: {advice}")
    lines.append(what_is_kept(output_dir))
    return "\n  ".join(lines)


def _measured() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    free, _ = torch.cuda.mem_get_info()
    return (
        f"at most {gigabytes(allocated)} allocated by torch and {gigabytes(reserved)} reserved (without memory that "
        f"vLLM maps itself), {gigabytes(free)} free on the GPU now"
    )
