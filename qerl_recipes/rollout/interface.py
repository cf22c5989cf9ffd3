"""Define what the trainer needs of a rollout engine, built in or from a plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # a plugin that adds only rewards need not load torch, TRL and vLLM
    import torch
    from accelerate import Accelerator, PartialState

    from qerl_recipes.recipe.configs import GRPOConfig
    from qerl_vllm_plugin.weights.frozen_weights import FrozenWeights

# Prompt ids, completion ids, log-probabilities of the sampled tokens as [[[lp], ...], ...], and None for extra fields.
# A log-probability that is not known is None.
Completions = tuple[list[list[int]], list[list[int]], list[list[list[float | None]]], None]
Profiler = AbstractContextManager[Any] | None  # what the engine enters while it generates


@dataclass(frozen=True)
class Snapshot:
    """Hold the current policy: PEFT's LoRA tensors in fp32, the adapter's config, and the trained norms or None."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    norms: Mapping[str, torch.Tensor] | None = None


class RolloutEngine(Protocol):
    """Sample completions from the trainer's current policy.

    The trainer calls ``begin`` or ``begin_evaluation`` first. Then it calls ``generate`` once, or several times with
    dynamic sampling. ``tokens`` and ``seconds`` count what this process has generated since ``begin``.
    """

    tokens: int
    seconds: float

    @property
    def version(self) -> int:
        """Return how many times the engine has taken over a policy; the first ``begin`` makes it 1."""

    def begin(self, rollout: int, sigma: float | None) -> int:
        """Open a rollout: take over the current policy, set noise, and return the number of noisy norms.

        ``sigma`` is the noise's standard deviation; None means no noise. The noise on ``noise_targets`` is
        sigma * z(noise_seed, rollout, name), drawn by ``qerl_vllm_plugin.noise``. In noise mode ``both`` the trainer
        applies the same noise.
        """

    def begin_evaluation(self) -> None:
        """Open an evaluation: take over the current policy, clear the noise, and use the same seeds every time."""

    def sync_weights(self) -> None:
        """Take over the current policy; TRL calls this if nothing was begun since the last step."""

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Profiler = None
    ) -> Completions:
        """Return one completion for each of ``prompts``, which are token ids.

        Each prompt is repeated ``num_generations`` times in a row. The log-probabilities are those of the distribution
        that was sampled from, by which importance weights divide. ``images`` is None for text. The engine enters
        ``profiler`` while it generates.
        """

    def close(self) -> None:
        """Release memory and processes. Afterwards nothing but another ``close`` may be called."""


class Turn(NamedTuple):
    """Ask for at most ``most`` tokens after ``tokens``, in turn ``number`` of the row at ``place`` in this batch."""

    tokens: list[int]
    place: int
    number: int
    most: int


# A turn that has ended, with the ids and log-probabilities of its tokens.
Taken = tuple[Turn, tuple[list[int], list[float | None]]]
GoOn = Callable[[list[Taken]], Sequence[Turn]]  # from turns that have ended to those that follow


@runtime_checkable
class TakesTurns(Protocol):
    """Define what an engine offers besides, if its completions may call tools and then go on."""

    @property
    def longest(self) -> int:
        """Return the most tokens that a sequence may have."""

    def episodes(self) -> AbstractContextManager[None]:
        """Keep the engine ready, with its prefix cache, for all turns of one batch.

        The batch's ``generate`` and ``play`` calls happen inside; weights and noise do not change there. All processes
        enter and leave, however many turns they take. Leaving waits for those that share the engine.
        """

    def play(self, turns: Sequence[Turn], go_on: GoOn, num_generations: int = 1, profiler: Profiler = None) -> None:
        """Take ``turns``, and those that ``go_on`` returns for the turns that have ended, until none is left.

        ``go_on`` gets turns that ended at the same time, in order of place. What it returns is computed beside the
        turns that still run. First turns (number 0) are of all rows of the batch, each prompt ``num_generations`` times
        in a row, as in ``generate``. Seeds follow from place and number: they depend neither on other episodes nor on
        the number of processes.
        """


@runtime_checkable
class LendsWeights(Protocol):
    """Define what an engine offers besides, if the trainer's model may read its frozen weights in place."""

    def frozen_weights(self) -> FrozenWeights:
        """Return views of the frozen weights. Raises NotShareableError if there can be none."""

    def check_weights(self) -> None:
        """Raise an error if the trainer has changed a lent weight; called before anything is saved."""


class StartEngine(Protocol):
    """Define the function that starts an engine; the hook ``qerl_rollout_engines`` offers such functions by name."""

    def __call__(
        self,
        base: str,
        training: GRPOConfig,
        *,
        rank: int,
        dtype: torch.dtype,
        snapshot: Callable[[], Snapshot],
        accelerator: Accelerator | PartialState,
    ) -> RolloutEngine:
        """Start an engine on the checkpoint folder ``base``.

        ``rank`` is the adapter's rank and ``dtype`` that of the activations. ``accelerator`` describes the trainer's
        processes. ``snapshot`` returns the current policy. Do not call it before ``begin``: the engine starts before
        the trainer.
        """
