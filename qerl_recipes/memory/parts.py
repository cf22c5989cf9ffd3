"""Defines a memory plan: what a run holds on the GPU in each phase, whether that fits, and what would lower it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from qerl_recipes.machine.gpu import Gpu, gigabytes

PHASES = ("rollout", "training")
SLEEP = "vllm_enable_sleep_mode: true"  # does not lower a rollout, since the engine is awake then
FIXED_BY_A_CHECKPOINT = re.compile(r"\b(lora_r|optim|quantization|max_completion_length)\b")


@dataclass(frozen=True)
class Part:
    """One part of a plan: the bytes it holds in each phase.

    ``detail`` explains how they come about. ``knobs`` are changes of the recipe that lower them, best first.
    """

    name: str
    rollout: int
    training: int
    detail: str = ""
    knobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The memory plan of a run on a GPU.

    ``problem`` says what stops the engine from starting, or is "". ``checkpointed`` is the number of blocks that
    recompute their activations. ``engine`` is the bytes of the engine without its KV cache, and ``token`` the bytes of
    one token in that cache. ``remark`` says that sequences must wait for others, or that the engine is not among the
    parts, or is "".
    """

    parts: tuple[Part, ...]
    gpu: Gpu
    problem: str = ""
    checkpointed: int = 0
    engine: int = 0
    token: int = 0
    remark: str = ""

    def engine_share(self, tokens: int) -> float:
        """Return the ``vllm_gpu_memory_utilization`` at which the KV cache holds ``tokens`` tokens."""
        return (self.engine + tokens * self.token) / self.gpu.memory

    def total(self, phase: str) -> int:
        """Return the bytes held in ``phase``, which is ``rollout`` or ``training``."""
        return sum(getattr(part, phase) for part in self.parts)

    @property
    def peak(self) -> int:
        return max(self.total(phase) for phase in PHASES)

    @property
    def worse_phase(self) -> str:
        """Return the phase that needs more memory."""
        return max(PHASES, key=self.total)

    @property
    def fits(self) -> bool:
        return self.peak <= self.gpu.memory and not self.problem

    def largest(self, phase: str, count: int = 3) -> list[Part]:
        """Return the ``count`` largest parts of a phase, largest first."""
        held = [part for part in self.parts if getattr(part, phase)]
        return sorted(held, key=lambda part: -getattr(part, phase))[:count]

    def added(self, phase: str) -> list[Part]:
        """Return the parts that hold more in this phase than in the other, largest first."""
        (other,) = set(PHASES) - {phase}
        parts = [part for part in self.parts if getattr(part, phase) > getattr(part, other)]
        return sorted(parts, key=lambda part: -getattr(part, phase))

    def advice(self, parts: Iterable[Part], phase: str, *, resuming: bool = False) -> str:
        """Return a text that says what to change so that ``phase`` needs less memory.

        It has the changes of the first two of the ``parts`` that have some. With ``resuming``, changes that no
        checkpoint could be resumed with are left out.
        """
        reasons: dict[str, str] = {}
        for part in parts:
            knobs = [knob for knob in part.knobs if knob != SLEEP or phase == "training"]
            knobs = [knob for knob in knobs if not (resuming and FIXED_BY_A_CHECKPOINT.search(knob))]
            if knobs and len(reasons) < 2:
                reasons.setdefault(" or ".join(knobs), f"{part.name}, {gigabytes(getattr(part, phase))}")
        return "; ".join(f"{knobs} ({why})" for knobs, why in reasons.items()) or "a smaller model"

    def line(self) -> str:
        """Return one line with the peak and the largest parts of the worse phase."""
        phase = self.worse_phase
        parts = ", ".join(f"{part.name} {gigabytes(getattr(part, phase))}" for part in self.largest(phase))
        return f"{gigabytes(self.peak)} of {gigabytes(self.gpu.memory)} ({parts}, ...)"

    def obstacles(self) -> list[str]:
        """Return the reasons why the run does not fit, each with a way out; the list is empty if it fits."""
        reasons = [f"it cannot start: {self.problem}"] if self.problem else []
        if self.peak > self.gpu.memory:
            phase, over = self.worse_phase, gigabytes(self.peak - self.gpu.memory)
            advice = self.advice(self.largest(phase, len(self.parts)), phase)
            reasons.append(f"it needs {over} too much in {phase}, {self.line()}; way out: {advice}")
        return reasons

    def check(self) -> None:
        """Raise ValueError, with the largest parts and a way out, if the run does not fit."""
        if not self.fits:
            raise ValueError(
                f"this run does not fit on a GPU of {gigabytes(self.gpu.memory)}: {'; and '.join(self.obstacles())}. "
                "`qerl doctor --recipe RECIPE.yaml` shows the whole plan"
            )
