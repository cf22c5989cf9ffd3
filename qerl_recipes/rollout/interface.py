"""What the trainer needs of a rollout engine, whoever makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # whoever writes a plugin for rewards alone need not wait for torch, TRL and vLLM
    import torch
    from accelerate import Accelerator, PartialState

    from qerl_recipes.recipe.configs import GRPOConfig
    from qerl_vllm_plugin.frozen_weights import FrozenWeights

# prompt ids, completion ids, the log probability of each sampled token as [[[lp], ...], ...] or None for it, nothing
Completions = tuple[list[list[int]], list[list[int]], list[list[list[float | None]]], None]


@dataclass(frozen=True)
class Snapshot:
    """The policy as trained so far: PEFT's LoRA tensors in fp32, the adapter's config, and trained norms or None."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    norms: Mapping[str, torch.Tensor] | None = None


class RolloutEngine(Protocol):
    """Samples completions from the policy that the trainer has trained so far.

    ``begin`` or ``begin_evaluation`` comes first, then ``generate`` once or, where dynamic sampling asks again, several
    times. ``tokens`` and ``seconds`` are those of this process since ``begin``.
    """

    tokens: int
    seconds: float

    @property
    def version(self) -> int:
        """Policies taken over so far; the first ``begin`` makes it 1."""

    def begin(self, rollout: int, sigma: float | None) -> int:
        """Open a rollout: take over the policy as it is now, and noise of ``sigma`` (None: none) -> noisy norms.

        The noise is sigma * z(noise_seed, rollout, name) on ``noise_targets``, as ``qerl_vllm_plugin.noise`` draws it:
        in noise mode ``shared`` the trainer has the same.
        """

    def begin_evaluation(self) -> None:
        """Open an evaluation: the policy as it is now, without noise, and the same samples every time."""

    def sync_weights(self) -> None:
        """Take over the policy as it is now; TRL calls this where nothing was begun since the last step."""

    def generate(
        self,
        prompts: list[list[int]],
        images: Any,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> Completions:
        """One completion for each of ``prompts`` (token ids; each stands ``num_generations`` times in a row).

        The log probabilities are those of the distribution that was sampled from; importance weights divide by it.
        ``images`` are None for text. ``profiler`` is to be entered while the engine is at work.
        """

    def close(self) -> None:
        """Give memory and processes back; nothing is asked of the engine afterwards but, perhaps, to close again."""


@runtime_checkable
class LendsWeights(Protocol):
    """What an engine has besides whose frozen weights the trainer's model may read in place."""

    def frozen_weights(self) -> FrozenWeights:
        """Views of them; raises NotShareableError where there can be none."""

    def check_weights(self) -> None:
        """Raises an error if the trainer has changed a weight that it was lent; called before anything is saved."""


class StartEngine(Protocol):
    """What the hook ``qerl_rollout_engines`` offers by name: it starts an engine on the checkpoint folder ``base``."""

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
        """``rank`` is the adapter's, ``dtype`` that of the activations; ``accelerator`` knows the trainer's processes.

        ``snapshot`` gives the current policy. It is not called before ``begin``: the engine starts before the trainer.
        """
