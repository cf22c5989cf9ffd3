"""A memory plan: what a run holds on the GPU in each of its phases, whether that fits, and what would lower it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from qerl_recipes.machine.gpu import Gpu, gigabytes

PHASES = ("rollout", "training")
SLEEP = "vllm_enable_sleep_mode: true"  # takes nothing from a rollout, in which the engine is awake
FIXED_BY_A_CHECKPOINT = re.compile(r"\b(lora_r|optim|quantization|max_completion_length)\b")


@dataclass(frozen=True)
class Part:
    """Bytes held in each phase, how they come about, and what to change in the recipe to lower them, best first."""

    name: str
    rollout: int
    training: int
    detail: str = ""
    knobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The parts of a run on a GPU; ``problem`` is what stops the engine from starting at all, "" if nothing does.

    ``checkpointed`` blocks compute their activations anew. Of the engine's share, ``engine`` bytes are taken before its
    KV cache, in which a token has ``token`` bytes. ``remark`` says that sequences wait for others, or that the engine
    is not among the parts; "" if neither is so.
    """

    parts: tuple[Part, ...]
    gpu: Gpu
    problem: str = ""
    checkpointed: int = 0
    engine: int = 0
    token: int = 0
    remark: str = ""

    def engine_share(self, tokens: int) -> float:
        """The ``vllm_gpu_memory_utilization`` at which the KV cache holds so many tokens."""
        return (self.engine + tokens * self.token) / self.gpu.memory

    def total(self, phase: str) -> int:
        """Bytes held in ``rollout`` or ``training``."""
        return sum(getattr(part, phase) for part in self.parts)

    @property
    def peak(self) -> int:
        return max(self.total(phase) for phase in PHASES)

    @property
    def worse_phase(self) -> str:
        """The phase that needs more."""
        return max(PHASES, key=self.total)

    @property
    def fits(self) -> bool:
        return self.peak <= self.gpu.memory and not self.problem

    def largest(self, phase: str, count: int = 3) -> list[Part]:
        """The largest parts of a phase, largest first."""
        held = [part for part in self.parts if getattr(part, phase)]
        return sorted(held, key=lambda part: -getattr(part, phase))[:count]

    def added(self, phase: str) -> list[Part]:
        """The parts of which a phase holds more than the other, largest first."""
        (other,) = set(PHASES) - {phase}
        parts = [part for part in self.parts if getattr(part, phase) > getattr(part, other)]
        return sorted(parts, key=lambda part: -getattr(part, phase))

    def advice(self, parts: Iterable[Part], phase: str, *, resuming: bool = False) -> str:
        """What to change for ``phase`` to need less: two of the ``parts`` for which there is something, in their order.

        ``resuming``: without what a checkpoint does not survive.
        """
        found: dict[str, str] = {}
        for part in parts:
            knobs = [knob for knob in part.knobs if knob != SLEEP or phase == "training"]
            knobs = [knob for knob in knobs if not (resuming and FIXED_BY_A_CHECKPOINT.search(knob))]
            if knobs and len(found) < 2:
                found.setdefault(" or ".join(knobs), f"{part.name}, {gigabytes(getattr(part, phase))}")
        return "; ".join(f"{knobs} ({why})" for knobs, why in found.items()) or "a smaller model"

    def line(self) -> str:
        """One line: the total and what it is made of."""
        phase = self.worse_phase
        parts = ", ".join(f"{part.name} {gigabytes(getattr(part, phase))}" for part in self.largest(phase))
        return f"{gigabytes(self.peak)} of {gigabytes(self.gpu.memory)} ({parts}, ...)"

    def obstacles(self) -> list[str]:
        """What stands against this run, each with the way out; empty if it fits."""
        found = [f"it cannot start: {self.problem}"] if self.problem else []
        if self.peak > self.gpu.memory:
            phase, over = self.worse_phase, gigabytes(self.peak - self.gpu.memory)
            advice = self.advice(self.largest(phase, len(self.parts)), phase)
            found.append(f"it needs {over} too much in {phase}, {self.line()}; way out: {advice}")
        return found

    def check(self) -> None:
        """Raises ValueError, with the largest parts and the way out, if the run does not fit."""
        if not self.fits:
            raise ValueError(
                f"this run does not fit on a GPU of {gigabytes(self.gpu.memory)}: {'; and '.join(self.obstacles())}. "
                "`qerl doctor --recipe RECIPE.yaml` shows the whole plan"
            )
