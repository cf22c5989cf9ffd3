"""Turns an out-of-memory error into a message to act on.

The message names the phase, what was planned and measured, the recipe keys to change, and how to resume.
"""

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from qerl_recipes.files.run_state import what_is_kept, whole_checkpoints
from qerl_recipes.machine.gpu import gigabytes
from qerl_recipes.memory.parts import Plan

SIGNS = ("out of memory", "cublas_status_alloc_failed")  # in messages of vLLM's allocator, CUDA and cuBLAS


class OutOfMemory(MemoryError):
    """Raised if the GPU's memory runs out; the message says in which phase, what was planned, and what to do."""


@contextlib.contextmanager
def explained(plan: Plan | None, output_dir: str, trainer: Any = None) -> Iterator[None]:
    """Run the block, and turn an out-of-memory error of torch, vLLM or cuBLAS into OutOfMemory.

    ``plan`` is the memory plan of the run, or None on a CPU. ``trainer`` is the trainer that runs in the block, or None
    while it is being built.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemory) or not _is_out_of_memory(error):
            raise
        phase = _phase(error.__traceback__, trainer)
        raise OutOfMemory(_message(plan, phase, output_dir, trainer)) from error


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(sign in str(error).lower() for sign in SIGNS)


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
        largest = plan.largest(planned, len(plan.parts))
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
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    free, _ = torch.cuda.mem_get_info()
    return (
        f"at most {gigabytes(allocated)} allocated by torch and {gigabytes(reserved)} reserved (without memory that "
        f"vLLM maps itself), {gigabytes(free)} free on the GPU now"
    )
