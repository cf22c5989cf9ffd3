"""Noise in verl's rollouts, none in its validations: who starts a batch sets it first, on every engine."""

from dataclasses import dataclass, fields
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from qerl_recipes.train.schedule import sigma
from qerl_vllm_plugin import noise
from qerl_vllm_plugin.verl import ROLLOUT, server_name


@dataclass(frozen=True)
class Noise:
    """``rollout.custom.qerl``: the keys of a recipe. The seed is that of the run; 0 steps have a sigma of 0."""

    sigma_start: float
    sigma_end: float
    num_stages: int
    seed: int = 0
    targets: tuple[str, ...] = noise.DEFAULT_TARGETS

    @classmethod
    def parse(cls, config: Any) -> "Noise | None":
        """None where ``rollout.custom.qerl`` is not set. Raises ValueError for an unknown or a missing key."""
        given = dict((config.actor_rollout_ref.rollout.get("custom") or {}).get(ROLLOUT) or {})
        if not given:
            return None
        known = {field.name for field in fields(cls)}
        if set(given) - known or {"sigma_start", "sigma_end", "num_stages"} - set(given):
            raise ValueError(
                f"rollout.custom.{ROLLOUT} has the keys {sorted(given)}; it needs sigma_start, sigma_end and "
                f"num_stages, and knows {sorted(known)}"
            )
        mode = config.trainer.v1.trainer_mode
        if mode != "sync":
            raise ValueError(
                f"trainer.v1.trainer_mode={mode} lets one rollout begin before another has ended, and the noise is one "
                f"for all requests of an engine; set it to sync, or leave rollout.custom.{ROLLOUT} out"
            )
        found = cls(**{**given, "targets": tuple(given.get("targets", noise.DEFAULT_TARGETS))})
        sigma(0, 1, found.sigma_start, found.sigma_end, found.num_stages)  # raises what it would raise later
        return found


class NoisyAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager of a synchronous run, which sets the noise of a rollout before its first request."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **keywords: Any) -> None:
        super().__init__(config, llm_client, *args, **keywords)
        self._noise = Noise.parse(config)
        # what verl's trainer has just computed from the data
        self._rollouts = int(config.actor_rollout_ref.actor.optim.total_training_steps)
        balancer = llm_client._load_balancer
        count = len(ray.get(balancer.get_all_servers.remote()))
        self._servers = [ray.get_actor(server_name(replica)) for replica in range(count)]

    def generate_sequences(self, prompts: Any) -> None:
        """verl's. Batches of one step have the same noise, those of a validation none."""
        if self._noise is not None:
            is_validation = "validate" in prompts and bool(prompts["validate"])
            step = int(prompts["global_steps"]) - 1  # verl counts from 1
            size = 0.0 if is_validation else self.sigma(step)
            targets = list(self._noise.targets)
            ray.get([server.set_noise.remote(size, self._noise.seed, step, targets) for server in self._servers])
        super().generate_sequences(prompts)

    def sigma(self, step: int) -> float:
        """The noise of the rollout of ``step``, counted from 0."""
        assert self._noise is not None
        return sigma(step, self._rollouts, self._noise.sigma_start, self._noise.sigma_end, self._noise.num_stages)
