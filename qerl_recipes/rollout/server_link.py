"""Connect the trainer to a running server: wait for it, check it, and push policy and noise, again after a restart.

The server describes itself by its state (``GET /v1/qerl/state``). ``Needs`` compares it with the recipe, and
``Pushed`` with what was pushed.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx

from qerl_recipes.files.run_state import what_is_kept
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.recipe.drafts import DRAFTS, not_for_drafts
from qerl_recipes.recipe.server_keys import API_KEY
from qerl_recipes.rollout.interface import Snapshot
from qerl_vllm_plugin.adapter.folder import base_hash
from qerl_vllm_plugin.client import AsyncPolicyClient, PolicyClient, PolicyRefusedError
from qerl_vllm_plugin.server.token import TOKEN, TOKEN_FILE, configured_token
from qerl_vllm_plugin.wire.address import parted

T = TypeVar("T")
PAUSE = 0.5  # seconds between two attempts
PAUSED = "somebody has paused its engine, by /pause or /sleep, and has not resumed it"
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
    """Describe what a server serves since the last push: ``digest`` is the hash of the adapter.

    ``instance`` differs after a restart. ``changes`` counts the server's changes: noise that another client sets and
    clears again leaves no other trace. It is None if several processes may have pushed at once.
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
    """Hold what a recipe needs of a server; vLLM does not apply the ``undrafted`` sampling parameters to drafts."""

    base: str
    base_hash: str
    rank: int
    dtype: str
    tokens: int
    undrafted: str = ""

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
        for key, needed in (("quantization", "qerl_nvfp4"), ("dtype", self.dtype), ("logprobs_mode", LOGPROBS)):
            if state[key] != needed:
                misfits.append(f"its {key} is {state[key]}; start it with --{key.replace('_', '-')} {needed}")
        if state["speculative"] not in (None, *DRAFTS):
            misfits.append(
                f"it drafts by a second model ({state['speculative']}), which has neither adapter nor noise; start it "
                f"without --speculative-config, or with one of the methods {', '.join(DRAFTS)}"
            )
        elif state["speculative"] and self.undrafted:
            misfits.append(
                f"it drafts ({state['speculative']}), and vLLM does not apply {self.undrafted} to drafts; remove that, "
                "or start the server without --speculative-config"
            )
        if state["max_model_len"] < self.tokens:
            misfits.append(
                f"it holds sequences of {state['max_model_len']} tokens and the recipe's have {self.tokens}; start it "
                f"with --max-model-len {self.tokens}"
            )
        return misfits

    def _adapter_option(self) -> str:
        return f"""--additional-config '{{"qerl": {{"policy_adapter": {{"rank": {self.rank}}}}}}}'"""


class ServerLink:
    """Talk to one server. A call waits up to ``vllm_server_timeout`` seconds for a server that does not answer."""

    def __init__(self, base: str, training: GRPOConfig, *, rank: int, dtype: str, processes: int = 1) -> None:
        """Wait for the server and check that it fits. After a restart any of the run's ``processes`` may push."""
        address, self.timeout = training.server_address, training.vllm_server_timeout
        self.url, self.login = parted(address)  # messages name the URL without the login
        self.api_key = os.environ.get(API_KEY)
        self._output_dir = training.output_dir
        self._silent_since: float | None = None
        token = configured_token()
        assert token is not None  # `qerl train` refuses a run without one
        options = (address, token, self.api_key, self.timeout)
        # the hash of a policy depends on its transport, and several processes compare their hashes
        self._policy = PolicyClient(*options, transport="auto" if processes == 1 else "http")
        self._async_policy, self._processes = AsyncPolicyClient(*options), processes
        longest = training.vllm_max_model_length or 1 + (training.max_completion_length or 0)
        self._needs = Needs(base, base_hash(base), rank, dtype, longest, not_for_drafts(training))
        state = self.state()
        # a fresh server is at version 0, or 1 with its own adapter; ours start at 2, so it is never at one of ours
        self.version, self.tokens = max(state["version"], 1), int(state["max_model_len"])

    def state(self) -> dict[str, Any]:
        """Return who the server is and what it serves. Waits and raises as ``__init__`` does."""
        return self._checked(self._until_answered(self._policy.state))

    def _checked(self, state: dict[str, Any]) -> dict[str, Any]:
        if lacking := self._needs.lacking(state):
            raise ServerRefusedError(f"the server at {self.url} does not fit this recipe: {'; '.join(lacking)}")
        return state

    def push(self, policy: Snapshot, noise: Noise) -> Pushed:
        """Serve a new policy with this noise; raise ServerLostError, ServerRefusedError or AnotherPolicyError."""
        self.version += 1
        return self._push(policy, noise, self.version)

    def settle(self, pushed: Pushed, policy: Snapshot) -> Pushed:
        """Wait until the server answers; return ``pushed`` or, after a restart, the same policy pushed again."""
        state = self.state()
        if state["instance"] == pushed.instance and not pushed.is_that_of(state):
            raise self._another_policy(state, pushed.version)
        if state["instance"] == pushed.instance:
            return pushed
        self._say("was restarted: the policy is pushed again")
        if replace(pushed, changes=None).is_that_of(state):  # another process of this run has pushed it
            return replace(pushed, instance=state["instance"], changes=self._count(state, again=True))
        again = self._push(policy, pushed.noise, pushed.version, again=True)
        if again.digest != pushed.digest and self._processes > 1:
            raise AnotherPolicyError(f"the processes of this run hold different policies; {self._hint()}")
        return replace(again, noisy_norms=pushed.noisy_norms)

    def _push(self, policy: Snapshot, noise: Noise, version: int, again: bool = False) -> Pushed:
        """Push until the server holds all three; ``again``, after a restart, other processes push and ask meanwhile."""
        mode = "wait" if again else "keep"

        def change() -> Pushed | None:
            client, noisy_norms = self._policy, 0
            before = self._checked(client.state())
            client.swap(policy.tensors, policy.config, norms=policy.norms, version=version, requests=mode)
            if (noise.sigma > 0 and not again) or not noise.is_that_of(client.state()):
                noisy_norms = client.set_noise(
                    noise.sigma, seed=noise.seed, rollout=noise.rollout, targets=noise.targets, requests=mode
                )
            after = client.state()
            pushed = Pushed(
                version, after["hash"], noise, noisy_norms, after["instance"], self._count(after, again=again)
            )
            if pushed.is_that_of(after):
                return pushed
            if after["instance"] == before["instance"]:
                raise self._another_policy(after, version)
            return None  # the server was restarted in between

        while True:
            pushed = self._until_answered(change)
            if pushed is not None:
                return pushed

    def _count(self, state: Mapping[str, Any], *, again: bool) -> int | None:
        return None if again and self._processes > 1 else state["changes"]

    def _another_policy(self, state: Mapping[str, Any], version: int) -> AnotherPolicyError:
        return AnotherPolicyError(
            f"the server at {self.url} was given another policy (version {state['version']}) or noise since version "
            f"{version} was pushed: another program uses it. Use one server a run; {self._hint()}"
        )

    async def watch(self, pushed: Pushed, every: float) -> None:
        """Check the server ``every`` so many seconds until it serves another policy; raise if it is lost or refuses."""
        while True:
            await asyncio.sleep(every)
            began = time.monotonic()
            try:
                state = await self._async_policy.state()
            except (httpx.TransportError, PolicyRefusedError) as error:
                self._failed(error, began)
                continue
            if state["paused"]:
                self._failed(ConnectionError(PAUSED), began)
                continue
            self._answered()
            if not pushed.is_that_of(state) or state["instance"] != pushed.instance:
                return

    def lost(self, reason: object) -> ServerLostError:
        """Return the error that ends a run whose server is lost."""
        return ServerLostError(
            f"the server at {self.url} {reason}. Start it again, with the same settings; {self._hint()}. To wait for "
            "longer: vllm_server_timeout"
        )

    def _until_answered(self, call: Callable[[], T]) -> T:
        while True:
            began = time.monotonic()
            try:
                answer = call()
            except (httpx.TransportError, PolicyRefusedError) as error:
                self._failed(error, began)
            else:
                self._answered()
                return answer
            time.sleep(PAUSE)

    def _failed(self, error: Exception, began: float) -> None:
        """Note that a call which ``began`` at that time has failed; the caller tries again unless this raises.

        Raises ServerLostError once the server was silent for the timeout. A refusal (HTTP status below 500) raises
        ServerRefusedError or AnotherPolicyError at once.
        """
        if isinstance(error, PolicyRefusedError) and error.status < 500:
            raise self._refusal(error) from error
        if self._silent_since is None:
            self._silent_since = began
            self._say(f"does not answer ({_described(error)}); waiting for it for up to {self.timeout:g} s")
        if time.monotonic() - self._silent_since >= self.timeout:
            raise self.lost(f"has not answered for {self.timeout:g} s ({_described(error)})") from error

    def _answered(self) -> None:
        if self._silent_since is not None:
            self._say(f"answers, after {time.monotonic() - self._silent_since:.1f} s")
            self._silent_since = None

    def _refusal(self, error: PolicyRefusedError) -> Exception:
        refuses = f"the server at {self.url} refuses: {error}"
        if error.status == 401:
            return ServerRefusedError(
                f"{refuses}. The admin token is that of {TOKEN_FILE} or {TOKEN}, and the key of --api-key that of "
                f"{API_KEY}: the same for server and trainer; {self._hint()}"
            )
        if error.status == 404:
            return ServerRefusedError(
                f"the server at {self.url} has no /v1/qerl: start it, with the plugin installed, with "
                f"VLLM_PLUGINS=qerl and {TOKEN_FILE} or {TOKEN} in its environment"
            )
        if error.status == 409:
            another = "another program pushes policies there. Use one server a run"
            return AnotherPolicyError(f"{refuses}: {another}; {self._hint()}")
        return ServerRefusedError(f"{refuses}; {self._hint()}")

    def _hint(self) -> str:
        return what_is_kept(self._output_dir)

    def _say(self, text: str) -> None:
        print(f"the server at {self.url} {text}", file=sys.stderr, flush=True)


def _described(error: Exception) -> str:
    """Return the error's type and its text, which some of httpx's errors lack."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
