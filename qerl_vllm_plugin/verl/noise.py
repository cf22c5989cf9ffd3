"""Add noise to verl's rollouts, but not to its validations.

The agent loop manager sets the noise on every engine before it starts a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from qerl_vllm_plugin import noise
from qerl_vllm_plugin.verl import ROLLOUT, server_name


@dataclass(frozen=True)
class Noise:
    """Hold the keys under ``rollout.custom.qerl``.

    ``sigma_start``, ``sigma_end`` and ``num_stages`` are those of a recipe; the first stage has no noise. ``targets``
    are a recipe's ``noise_targets``. ``seed`` is its ``noise_seed``, but does not follow the run's seed where unset.
    """

    sigma_start: float
    sigma_end: float
    num_stages: int
    seed: int = 0
    targets: tuple[str, ...] = noise.DEFAULT_TARGETS

    @classmethod
    def parse(cls, config: Any) -> "Noise | None":
        """Read verl's configuration; return None where ``rollout.custom.qerl`` is not set.

        Raise ValueError for an unknown or missing key, for a value that no rollout can use, and for a trainer mode
        other than ``sync``.
        """
        keys = dict((config.actor_rollout_ref.rollout.get("custom") or {}).get(ROLLOUT) or {})
        if not keys:
            return None
        known = {field.name for field in fields(cls)}
        if set(keys) - known or {"sigma_start", "sigma_end", "num_stages"} - set(keys):
            raise ValueError(
                f"rollout.custom.{ROLLOUT} has the keys {sorted(keys)}; it needs sigma_start, sigma_end and "
                f"num_stages, and knows {sorted(known)}"
            )
        mode = config.trainer.v1.trainer_mode
        if mode != "sync":
            raise ValueError(
                f"trainer.v1.trainer_mode={mode} lets one rollout begin before another has ended, and the noise is one "
                f"for all requests of an engine; set it to sync, or leave rollout.custom.{ROLLOUT} out"
            )
        settings = cls(**keys)
        if reasons := _unusable_values(settings):
            raise ValueError("; ".join(reasons))
        return replace(settings, targets=tuple(settings.targets))


def _unusable_values(keys: Noise) -> list[str]:
    """Return a message for each value that the engine would refuse only at the first rollout with noise."""
    reasons, start, end = [], keys.sigma_start, keys.sigma_end
    if type(start) not in (int, float) or not 0 < start <= noise.MAX_SIGMA:
        most = f"{noise.MAX_SIGMA:g}, the most that the engine takes; for no noise leave rollout.custom.{ROLLOUT} out"
        reasons.append(f"sigma_start is {start!r}; it must be a number above 0 and at most {most}")
    elif type(end) not in (int, float) or not 0 < end <= start:
        reasons.append(f"sigma_end is {end!r}; it must be a number above 0 and at most sigma_start, which is {start}")
    if type(keys.num_stages) is not int or keys.num_stages < 1:
        reasons.append(f"num_stages is {keys.num_stages!r}; it must be a whole number of at least 1")
    if type(keys.seed) is not int:
        reasons.append(f"seed is {keys.seed!r}; it must be a whole number")
    is_list = isinstance(keys.targets, Sequence) and not isinstance(keys.targets, str)
    if not is_list or not keys.targets or not all(isinstance(target, str) for target in keys.targets):
        reasons.append(f"targets is {keys.targets!r}; it must be a list of names of norms")
    return [f"rollout.custom.{ROLLOUT}.{reason}" for reason in reasons]


class NoisyAgentLoopManager(AgentLoopManagerTQ):
    """Set the noise of a rollout before its first request, as verl's agent loop manager for synchronous runs."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **keywords: Any) -> None:
        super().__init__(config, llm_client, *args, **keywords)
        self._noise = Noise.parse(config)
        # verl's trainer has computed it from the data by now
        self._rollouts = int(config.actor_rollout_ref.actor.optim.total_training_steps)
        balancer = llm_client._load_balancer
        count = len(ray.get(balancer.get_all_servers.remote()))
        self._servers = [ray.get_actor(server_name(replica)) for replica in range(count)]

    def generate_sequences(self, prompts: Any) -> None:
        """Set the noise of a step on every engine, or none for a validation, then start the batch."""
        if self._noise is not None:
            is_validation = "validate" in prompts and bool(prompts["validate"])
            step = int(prompts["global_steps"]) - 1  # verl counts from 1
            size = 0.0 if is_validation else self.sigma(step)
            targets = list(self._noise.targets)
            ray.get([server.set_noise.remote(size, self._noise.seed, step, targets) for server in self._servers])
        super().generate_sequences(prompts)

    def sigma(self, step: int) -> float:
        """Return the standard deviation of the noise in the rollout of ``step``, counted from 0."""
        assert self._noise is not None
        ends = (self._noise.sigma_start, self._noise.sigma_end)
        return noise.exponential_sigma(step, self._rollouts, *ends, self._noise.num_stages)
