"""Sample from the current policy with a running vLLM server: the rollout engine of ``vllm_mode: server``.

It is a ``RolloutEngine`` that also takes turns (``rollout.interface``). The first trainer process pushes adapter,
trained norms and noise once a rollout, and each process requests its own completions. If the server is lost or
restarted, the run waits and pushes the same policy again. Then it requests the same completions again: each has its own
seed.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import openai
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.recipe.generation import sampling_parameters
from qerl_recipes.rollout.interface import Snapshot
from qerl_recipes.rollout.sampling import Completion, Request, SeededRollouts
from qerl_recipes.rollout.server_link import (
    NO_NOISE,
    AnotherPolicyError,
    Noise,
    Pushed,
    ServerLink,
    ServerRefusedError,
)
from qerl_vllm_plugin.client import VERSION_HEADER
from qerl_vllm_plugin.wire.address import Login, authorization

T = TypeVar("T")
MOST_RESTARTS = 3  # while it computes one batch; more are taken for a fault of the server
CUT = ("length", "stop")  # finish reasons of a complete completion; vLLM has others for one that was aborted
WATCH = 5.0  # seconds between two checks of a server that is generating


class ServerRollouts(SeededRollouts):
    """Use a server that holds the frozen weights of the recipe's model and the policy's adapter.

    ``rollout.interface.StartEngine`` describes the arguments. The server must be up within ``vllm_server_timeout``
    seconds. Generating raises AnotherPolicyError if a completion is not from the policy that was pushed last. It raises
    ServerRefusedError if the server refuses a prompt, and ServerLostError if the server stays silent.
    """

    def __init__(
        self,
        base: str,
        training: GRPOConfig,
        *,
        rank: int,
        dtype: torch.dtype,
        snapshot: Callable[[], Snapshot],
        accelerator: Accelerator | PartialState,
    ) -> None:
        """Raise ServerLostError if there is no server, and ServerRefusedError if it does not fit the recipe."""
        super().__init__(training, snapshot, accelerator)
        self.version = 0
        self._noise = NO_NOISE
        self._pushed: Pushed | None = None
        engine_dtype, processes = str(dtype).removeprefix("torch."), accelerator.num_processes
        link = self._link = ServerLink(base, training, rank=rank, dtype=engine_dtype, processes=processes)
        self.longest = min(training.vllm_max_model_length or link.tokens, link.tokens)
        self._client = CompletionsClient(
            link.url, link.api_key, sampling_parameters(training), link.timeout, link.login
        )

    def begin(self, rollout: int, sigma: float | None) -> int:
        """Open a rollout: push the current adapter and its noise (None: none), and return the number of noisy norms."""
        training = self._training
        self._open(rollout)
        assert training.noise_seed is not None  # GRPOConfig sets it
        noise = Noise(sigma or 0.0, training.noise_seed, rollout, tuple(training.noise_targets))
        return self._push(noise if sigma else NO_NOISE).noisy_norms

    def begin_evaluation(self) -> None:
        """Open an evaluation: push the current adapter without noise, and use the same seeds every time."""
        self._seeds.open("evaluation", 0)
        self._push(NO_NOISE)

    def sync_weights(self) -> None:
        """Push the trainer's current adapter (and trained norms); the noise stays."""
        self._push(self._noise)

    def close(self) -> None:
        """Do nothing: the server keeps running, with the policy that was pushed last."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the recipe's sampling parameters, without a limit of tokens and without log-probabilities."""
        given = sampling_parameters(self._training).items()
        return {key: value for key, value in given if key not in ("max_tokens", "logprobs")}

    def seeds(self, count: int, num_generations: int) -> Callable[[int, int], int]:
        """Return ``seed(place, turn)`` for the next batch, in which this process has ``count`` completions."""
        self._seeds.draw(self._accelerator.process_index * count, count, num_generations)
        return self._seeds.of

    def client(self, http: Any) -> openai.AsyncOpenAI:
        """Return a client of the server that sends by ``http``."""
        return openai.AsyncOpenAI(**self._client.options, http_client=http)

    def unchanged(self, sample: Callable[[int], tuple[T, int]]) -> T:
        """Return what ``sample(version)`` has sampled, beside the number of tokens, from the policy pushed last.

        After a restart of the server it is called again. Raises what it raises, AnotherPolicyError if the policy has
        changed meanwhile, and ServerLostError.
        """
        for _ in range(MOST_RESTARTS + 1):
            assert self._pushed is not None  # begin has set it
            failure: Exception | None = None
            with self._timed(None):
                try:
                    sampled, tokens = sample(self._pushed.version)
                except Exception as error:
                    failure = error
            settled = self._link.settle(self._pushed, self._snapshot())
            if settled.instance == self._pushed.instance:
                if failure is not None:
                    raise failure
                self.tokens += tokens
                return sampled
            self._pushed = settled
        raise self._link.lost(f"was restarted {MOST_RESTARTS + 1} times while it computed one rollout")

    def _push(self, noise: Noise) -> Pushed:
        """Push from the first process; all processes return the same result or raise the same error."""
        self.version += 1
        self._noise = noise
        outcome: list[Any] = [None]
        if self._accelerator.process_index == 0:
            try:
                outcome = [self._link.push(self._snapshot(), noise)]
            except (ValueError, OSError) as error:
                if self._accelerator.num_processes == 1:
                    raise
                outcome = [error]
        broadcast_object_list(outcome)
        (result,) = outcome
        if isinstance(result, Exception):
            raise result
        self._pushed = result
        return result

    def _complete(self, requests: list[Request], profiler: AbstractContextManager[Any] | None) -> list[Completion]:
        with self._timed(profiler):
            completions = self._answers(dict(enumerate(requests)))
        return [completions[i] for i in range(len(requests))]

    def _answers(self, requests: dict[int, Request]) -> dict[int, Completion]:
        """Return the completion of each request; ask again for what a lost connection or a restart left out."""
        completions: dict[int, Completion] = {}
        restarts, failing_since = 0, None
        while True:
            assert self._pushed is not None  # begin has set it
            watch = functools.partial(self._link.watch, self._pushed, min(WATCH, self._link.timeout / 4))
            pending = {i: request for i, request in requests.items() if i not in completions}
            before = len(completions)
            failure = asyncio.run(self._client.complete(pending, completions, self._pushed.version, watch))
            settled = self._link.settle(self._pushed, self._snapshot())
            if settled.instance != self._pushed.instance:
                restarts += 1
                if restarts > MOST_RESTARTS:
                    raise self._link.lost(f"was restarted {restarts} times while it computed one rollout")
                self._pushed, failing_since = settled, None
                completions.clear()  # completions of the restarted server may lack the noise
                continue
            if isinstance(failure, AnotherPolicyError):
                raise failure
            if len(completions) == len(requests):
                return completions
            # the server is up, and yet completions are missing: a connection broke, or it cannot compute them
            if len(completions) > before or failing_since is None:
                failing_since = time.monotonic()
            elif time.monotonic() - failing_since > self._link.timeout:
                raise self._link.lost(f"is up and does not answer ({failure})") from failure


class CompletionsClient:
    """Request completions from one server.

    ``parameters`` are vLLM's sampling parameters, the same for all requests. ``login`` is for a proxy before the
    server. ``timeout``, in seconds, limits connecting alone.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        parameters: Mapping[str, Any],
        timeout: float,
        login: Login | None = None,
    ) -> None:
        self.options: dict[str, Any] = {
            "base_url": f"{url}/v1",
            "api_key": api_key or "none",
            "max_retries": 0,  # the caller retries: it knows whether the server is still the same
            "timeout": openai.Timeout(None, connect=timeout),  # a completion may take long
            "default_headers": {"Authorization": authorization(login)} if login else None,
        }
        # the text of a token is not needed, and its bytes need not be text
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        self._body = {**{key: value for key, value in parameters.items() if key != "max_tokens"}, **ids}

    async def complete(
        self,
        requests: Mapping[int, Request],
        completions: dict[int, Completion],
        version: int,
        watch: Callable[[], Awaitable[None]],
    ) -> Exception | None:
        """Add to ``completions`` those of ``requests``; return the first error that left some out, or None.

        The call ends early when ``watch`` ends; then some may be missing without an error. A completion of another
        policy ``version`` is left out, and its AnotherPolicyError goes before other errors. Raises ServerRefusedError
        if the server refuses a request, and whatever ``watch`` raises.
        """
        failures: list[Exception] = []
        async with openai.AsyncOpenAI(**self.options) as client:

            async def one(place: int, request: Request) -> None:
                try:
                    completions[place] = await self._one(client, model, request, version)
                except (openai.APIConnectionError, openai.InternalServerError, AnotherPolicyError) as error:
                    failures.append(error)
                except openai.APIStatusError as error:
                    raise ServerRefusedError(f"the server at {client.base_url} refuses a prompt: {error}") from error

            try:
                model = (await client.models.list()).data[0].id
            except (openai.APIConnectionError, openai.InternalServerError) as error:
                return error
            except openai.APIStatusError as error:
                raise ServerRefusedError(f"the server at {client.base_url} does not name its model: {error}") from error
            tasks = [asyncio.create_task(one(place, request)) for place, request in requests.items()]
            ends: list[asyncio.Future[Any]] = [asyncio.gather(*tasks), asyncio.ensure_future(watch())]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    if end.done():
                        end.result()  # raises its error
            finally:
                for task in (*tasks, ends[1]):
                    task.cancel()
                await asyncio.gather(*tasks, *ends, return_exceptions=True)
        # another policy is a better reason than a broken connection
        failures.sort(key=lambda error: not isinstance(error, AnotherPolicyError))
        return failures[0] if failures else None

    async def _one(self, client: openai.AsyncOpenAI, model: str, request: Request, version: int) -> Completion:
        raw = await client.completions.with_raw_response.create(
            model=model,
            prompt=request.prompt,
            extra_body={**self._body, **request.limits(self._body)},
        )
        # read the JSON itself: the client's types would check each of the millions of numbers of a rollout one by one
        (choice,) = raw.http_response.json()["choices"]
        return read(choice, raw.headers.get(VERSION_HEADER), request, version)


def read(choice: Mapping[str, Any], served: str | None, request: Request, version: int) -> Completion:
    """Return the completion in ``choice``, which the policy version ``served`` computed.

    Raises AnotherPolicyError if ``served`` is not ``version``, or if the server has aborted the completion. Raises
    ServerRefusedError if the server has cut the completion short, has changed its prompt, or has left out token ids or
    log-probabilities.
    """
    if served != str(version):
        raise AnotherPolicyError(
            f"stale completion: the server used policy version {served or 'unknown'}, and this run pushed {version}; "
            "another program may use this server"
        )
    ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if ids is None or logprobs is None or len(ids) != len(logprobs):
        counts = [None if values is None else len(values) for values in (ids, logprobs)]
        raise ServerRefusedError(
            f"the server answered with {counts[0]} token ids and {counts[1]} log-probabilities; it must be vLLM 0.26 "
            "or newer, and nothing between may change its answers"
        )
    if choice.get("prompt_token_ids") not in (None, request.prompt):
        raise ServerRefusedError("the server has changed a prompt before it answered")
    reason = choice["finish_reason"]
    if reason not in CUT:
        raise AnotherPolicyError(f"a completion was broken off by the server ({reason}): another program changed it")
    if reason == "length" and len(ids) < request.max_tokens:
        raise ServerRefusedError(
            f"the server cut a completion after {len(ids)} of {request.max_tokens} tokens: its own max_new_tokens "
            "stands above ours; start it with --generation-config vllm"
        )
    return Completion(ids, logprobs)
