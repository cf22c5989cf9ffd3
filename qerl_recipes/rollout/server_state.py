"""Judge a policy server by its state (``GET /v1/qerl/state``): if it fits a recipe and serves what was pushed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOGPROBS = "processed_logprobs"  # of the distribution that was sampled from, by which importance correction divides


class ServerLostError(ConnectionError):
    """Report that the server was lost or stayed silent for ``vllm_server_timeout`` s; says how to resume the run."""


class ServerRefusedError(ValueError):
    """Report that the server does not fit the recipe or refuses a request; the message says why and what to do."""


class AnotherPolicyError(ValueError):
    """Report that the server serves, or has answered with, another policy than the one that was pushed."""


@dataclass(frozen=True)
class Noise:
    """Hold the arguments of ``PUT /v1/qerl/noise``; sigma 0 means no noise."""

    sigma: float
    seed: int
    rollout: int
    targets: tuple[str, ...]

    def is_that_of(self, state: Mapping[str, Any]) -> bool:
        """Return True if a server in this ``state`` has this noise."""
        noise = state["noise"]
        if self.sigma == 0:
            return noise["sigma"] == 0
        served = (noise["sigma"], noise["seed"], noise["rollout"], tuple(noise["targets"]))
        return served == (self.sigma, self.seed, self.rollout, self.targets)


NO_NOISE = Noise(0.0, 0, 0, ())


@dataclass(frozen=True)
class Pushed:
    """Describe what a server serves since the last push.

    ``digest`` is the hash of the adapter, and ``noisy_norms`` the number of norms with noise. ``instance`` differs
    after a restart. ``changes`` counts the server's changes: noise that another client sets and clears again leaves no
    other trace. It is None if several processes may have pushed at once.
    """

    version: int
    digest: str
    noise: Noise
    noisy_norms: int
    instance: str
    changes: int | None

    def is_that_of(self, state: Mapping[str, Any]) -> bool:
        """Return True if a server in this ``state`` still serves this policy and noise, unchanged since."""
        same = (state["version"], state["hash"]) == (self.version, self.digest)
        same = same and self.changes in (None, state["changes"])
        return same and self.noise.is_that_of(state)


@dataclass(frozen=True)
class Needs:
    """Hold what a recipe needs of a server.

    These are the base checkpoint by name and hash, the adapter's rank, the dtype, and the tokens of a sequence.
    """

    base: str
    base_hash: str
    rank: int
    dtype: str
    tokens: int

    def lacking(self, state: Mapping[str, Any]) -> list[str]:
        """Return one line for each way in which a server in this ``state`` does not fit, with the way out."""
        if not {"logprobs_mode", "changes", "paused", "speculative"} <= state.keys():
            return ["it does not say what it computes: its plugin is of an earlier release, or it is something else"]
        misfits = []
        if state["base_hash"] != self.base_hash:
            misfits.append(f"it serves another base, {state['base']}, than {self.base}; start it with that checkpoint")
        if state["carrier"] != "resident":
            misfits.append(f"it has no resident adapter; start it with {self._adapter_option()}")
        elif state["max_rank"] < self.rank:
            misfits.append(
                f"its adapter has at most rank {state['max_rank']} and this one has {self.rank}; start it with "
                f"{self._adapter_option()}"
            )
        if state["quantization"] != "qerl_nvfp4":
            misfits.append(f"its quantization is {state['quantization']}; start it with --quantization qerl_nvfp4")
        if state["dtype"] != self.dtype:
            misfits.append(f"it computes in {state['dtype']}, not in {self.dtype}; start it with --dtype {self.dtype}")
        if state["logprobs_mode"] != LOGPROBS:
            misfits.append(
                f"its log-probabilities are {state['logprobs_mode']}, not of what was sampled from; start it with "
                f"--logprobs-mode {LOGPROBS}"
            )
        if state["speculative"] is not None:
            misfits.append(
                f"it decodes speculatively ({state['speculative']}), and with {LOGPROBS} vLLM then gives other "
                "log-probabilities than those of what was sampled (0.31 on a CPU: a third of them, by up to 8); start "
                "it without --speculative-config"
            )
        if state["max_model_len"] < self.tokens:
            misfits.append(
                f"it holds sequences of {state['max_model_len']} tokens and the recipe's have {self.tokens}; start it "
                f"with --max-model-len {self.tokens}"
            )
        return misfits

    def _adapter_option(self) -> str:
        return f"""--additional-config '{{"qerl": {{"policy_adapter": {{"rank": {self.rank}}}}}}}'"""
