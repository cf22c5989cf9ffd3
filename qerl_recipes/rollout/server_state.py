"""What a server of the policy says of itself (``GET /v1/qerl/state``): whether it fits a recipe, and what it serves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOGPROBS = "processed_logprobs"  # of the distribution that was sampled from, which importance correction divides by


class ServerLostError(ConnectionError):
    """The server did not answer for ``vllm_server_timeout`` seconds; the message says how the run goes on."""


class ServerRefusedError(ValueError):
    """The server is not the one that this recipe needs; the message says what differs and how to start it."""


class AnotherPolicyError(ValueError):
    """The server serves, or has answered with, another policy than the one that was pushed."""


@dataclass(frozen=True)
class Noise:
    """What ``PUT /v1/qerl/noise`` takes; sigma 0 is none."""

    sigma: float
    seed: int
    rollout: int
    targets: tuple[str, ...]

    def is_that_of(self, state: Mapping[str, Any]) -> bool:
        """Whether a server in this ``state`` has it."""
        found = state["noise"]
        if self.sigma == 0:
            return found["sigma"] == 0
        given = (found["sigma"], found["seed"], found["rollout"], tuple(found["targets"]))
        return given == (self.sigma, self.seed, self.rollout, self.targets)


NO_NOISE = Noise(0.0, 0, 0, ())


@dataclass(frozen=True)
class Pushed:
    """What a server serves since it was pushed: the ``digest`` is of the adapter, ``touched`` norms carry the noise,
    and ``instance`` is another one after a restart. ``changes`` is how many it has had: noise that somebody else sets
    and takes back leaves no other trace. None where several processes may have pushed at once."""

    version: int
    digest: str
    noise: Noise
    touched: int
    instance: str
    changes: int | None

    def is_that_of(self, state: Mapping[str, Any]) -> bool:
        """Whether a server in this ``state`` still has it."""
        same = (state["version"], state["hash"]) == (self.version, self.digest)
        same = same and self.changes in (None, state["changes"])
        return same and self.noise.is_that_of(state)


@dataclass(frozen=True)
class Needs:
    """What a recipe needs of a server: its base, as hash and as a name, the adapter's rank, dtype, and tokens."""

    base: str
    base_hash: str
    rank: int
    dtype: str
    tokens: int

    def lacking(self, state: Mapping[str, Any]) -> list[str]:
        """One line for each thing that a server in this ``state`` has otherwise, with the way out."""
        if not {"logprobs_mode", "changes", "paused", "speculative"} <= state.keys():
            return ["it does not say what it computes: its plugin is of an earlier release, or it is something else"]
        found = []
        if state["base_hash"] != self.base_hash:
            found.append(f"it serves another base, {state['base']}, than {self.base}; start it with that checkpoint")
        if state["carrier"] != "resident":
            found.append(f"it has no resident adapter; start it with {self._adapter_option()}")
        elif state["max_rank"] < self.rank:
            found.append(
                f"its adapter has at most rank {state['max_rank']} and this one has {self.rank}; start it with "
                f"{self._adapter_option()}"
            )
        if state["quantization"] != "qerl_nvfp4":
            found.append(f"its quantization is {state['quantization']}; start it with --quantization qerl_nvfp4")
        if state["dtype"] != self.dtype:
            found.append(f"it computes in {state['dtype']}, not in {self.dtype}; start it with --dtype {self.dtype}")
        if state["logprobs_mode"] != LOGPROBS:
            found.append(
                f"its log-probabilities are {state['logprobs_mode']}, not of what was sampled from; start it with "
                f"--logprobs-mode {LOGPROBS}"
            )
        if state["speculative"] is not None:
            found.append(
                f"it decodes speculatively ({state['speculative']}), and with {LOGPROBS} vLLM then gives other "
                "log-probabilities than those of what was sampled (0.31 on a CPU: a third of them, by up to 8); start "
                "it without --speculative-config"
            )
        if state["max_model_len"] < self.tokens:
            found.append(
                f"it holds sequences of {state['max_model_len']} tokens and the recipe's have {self.tokens}; start it "
                f"with --max-model-len {self.tokens}"
            )
        return found

    def _adapter_option(self) -> str:
        return f"""--additional-config '{{"qerl": {{"policy_adapter": {{"rank": {self.rank}}}}}}}'"""
