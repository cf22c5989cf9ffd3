"""Sample from the current policy with a running vLLM server: the rollout engine of ``vllm_mode: server``.

The first trainer process pushes adapter, trained norms and noise once a rollout, and each process requests its own
completions. If the server is lost or restarted, the run waits, pushes the same policy again, and requests the same
completions again: each has its own seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import openai
import torch
from accelerate.utils import broadcast_object_list

from qerl_recipes.recipe.generation import sampling_parameters
from qerl_recipes.rollout.interface import Profiler
from qerl_recipes.rollout.sampling import Completion, Follow, Request, SeededRollouts
from qerl_recipes.rollout.server_link import NO_NOISE, AnotherPolicyError, Noise, Pushed, ServerLink, ServerRefusedError
from qerl_vllm_plugin.client import VERSION_HEADER
from qerl_vllm_plugin.wire.address import Login, authorization

T = TypeVar("T")
MOST_RESTARTS = 3  # while it computes one batch; more are taken for a fault of the server
CUT = ("length", "stop")  # finish reasons of a complete completion; vLLM has others for one that was aborted
WATCH = 5.0  # seconds between two checks of a server that is generating


class ServerRollouts(SeededRollouts):
    """Use a server that holds the frozen weights of the recipe's model and the policy's adapter.

    Generating raises AnotherPolicyError if a completion is not from the policy that was pushed last, ServerRefusedError
    if the server refuses a prompt, and ServerLostError if it is silent for ``vllm_server_timeout`` seconds.
    """

    def _start(self, base: str, rank: int, dtype: torch.dtype) -> None:
        """Raise ServerLostError if there is no server, and ServerRefusedError if it does not fit the recipe."""
        self.version = 0
        self._noise = NO_NOISE
        self._pushed: Pushed | None = None
        training, engine_dtype = self._training, str(dtype).removeprefix("torch.")
        processes = self._accelerator.num_processes
        link = self._link = ServerLink(base, training, rank=rank, dtype=engine_dtype, processes=processes)
        self.longest = min(training.vllm_max_model_length or link.tokens, link.tokens)
        self._client = CompletionsClient(
            link.url, link.api_key, sampling_parameters(training), link.timeout, link.login
        )

    def begin(self, rollout: int, sigma: float | None) -> int:
        training = self._training
        self._open(rollout)
        assert training.noise_seed is not None  # GRPOConfig sets it
        noise = Noise(sigma or 0.0, training.noise_seed, rollout, tuple(training.noise_targets))
        return self._push(noise if sigma else NO_NOISE).noisy_norms

    def begin_evaluation(self) -> None:
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

    def _complete(self, requests: list[Request], profiler: Profiler, follow: Follow | None = None) -> list[Completion]:
        with self._timed(profiler), _event_loop() as loop:
            return self._answers(requests, follow, loop)

    def _answers(
        self, requests: list[Request], follow: Follow | None, loop: asyncio.AbstractEventLoop
    ) -> list[Completion]:
        """Return the completions of ``requests``; ask again for what a lost connection or a restart left out.

        What has come is followed at once, if the server still is the one of the push. What comes together depends on
        the server's time, as on any server. ``loop`` stands still meanwhile: a tool may run one of its own.
        """
        pending, completions = dict(enumerate(requests)), dict[int, Completion]()
        asked, restarts, failing_since = len(requests), 0, None

        def take(held: dict[int, Completion]) -> dict[int, Request]:
            """Return the requests that follow ``held``, by number. Raises _Restarted."""
            nonlocal asked
            assert self._pushed is not None
            settled = self._link.settle(self._pushed, self._snapshot())
            if settled.instance != self._pushed.instance:
                self._pushed = settled
                raise _Restarted  # and what is held may lack the noise
            completions.update(held)
            further = follow(sorted(held.items())) if follow is not None and held else []
            following = dict(enumerate(further, start=asked))
            asked += len(further)
            pending.update(following)
            for number in held:
                del pending[number]
            return following

        while pending:
            assert self._pushed is not None  # begin has set it
            watch = functools.partial(self._link.watch, self._pushed, min(WATCH, self._link.timeout / 4))
            coming = self._client.complete(dict(pending), self._pushed.version, watch)
            before, held, following = len(completions), dict[int, Completion](), None
            try:
                while isinstance(answer := loop.run_until_complete(coming.asend(following)), dict):
                    held |= answer
                    if follow is not None:
                        held, following = {}, take(held)
                take(held)
            except _Restarted:
                restarts += 1
                if restarts > MOST_RESTARTS:
                    raise self._link.lost(f"was restarted {restarts} times while it computed one rollout") from None
                failing_since = None
                loop.run_until_complete(coming.aclose())
                continue
            if isinstance(answer, AnotherPolicyError):
                raise answer
            # the server is up, and yet completions may be missing: a connection broke, or it cannot compute them
            if len(completions) > before or failing_since is None:
                failing_since = time.monotonic()
            elif time.monotonic() - failing_since > self._link.timeout:
                raise self._link.lost(f"is up and does not answer ({answer})") from answer
        return [completions[number] for number in range(asked)]


class _Restarted(Exception):
    """Report that the server was restarted, and that the policy has been pushed again."""


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Return an event loop; what is left in it in the end is cancelled."""

    async def cancel() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.run_until_complete(cancel())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class CompletionsClient:
    """Request completions from a server behind a ``login``'s proxy; ``timeout`` (seconds) limits connecting alone."""

    def __init__(
        self, url: str, api_key: str | None, parameters: Mapping[str, Any], timeout: float, login: Login | None = None
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
        self, requests: Mapping[int, Request], version: int, watch: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[dict[int, Completion] | Exception | None, dict[int, Request] | None]:
        """Yield the completions of ``requests`` that have come since, by number; what is sent in is asked as well.

        The last value is the first error that left some out, or None. The call ends early when ``watch`` ends; then
        some may be missing without an error. A completion of another policy ``version`` is left out, and its
        AnotherPolicyError goes before other errors. Raises ServerRefusedError if the server refuses a request, and
        whatever ``watch`` raises.
        """
        failures: list[Exception] = []
        async with openai.AsyncOpenAI(**self.options) as client:
            try:
                model = (await client.models.list()).data[0].id
            except (openai.APIConnectionError, openai.InternalServerError) as error:
                yield error
                return
            except openai.APIStatusError as error:
                raise ServerRefusedError(f"the server at {client.base_url} does not name its model: {error}") from error
            numbers: dict[asyncio.Future[Any], int] = {}

            def ask(requests: Mapping[int, Request]) -> None:
                for number, request in requests.items():
                    numbers[asyncio.ensure_future(self._one(client, model, request, version))] = number

            ask(requests)
            watching: asyncio.Future[Any] = asyncio.ensure_future(watch())
            try:
                while numbers:
                    done, _ = await asyncio.wait([*numbers, watching], return_when=asyncio.FIRST_COMPLETED)
                    if watching in done:
                        watching.result()  # raises its error
                        break
                    answered = {}
                    for task in done:
                        number = numbers.pop(task)
                        try:
                            answered[number] = task.result()
                        except (openai.APIConnectionError, openai.InternalServerError, AnotherPolicyError) as error:
                            failures.append(error)
                        except openai.APIStatusError as error:
                            refusal = f"the server at {client.base_url} refuses a prompt: {error}"
                            raise ServerRefusedError(refusal) from error
                    if answered:
                        ask((yield answered) or {})
            finally:
                for task in (*numbers, watching):
                    task.cancel()
                await asyncio.gather(*numbers, watching, return_exceptions=True)
        # another policy is a better reason than a broken connection
        yield min(failures, key=lambda error: not isinstance(error, AnotherPolicyError), default=None)

    async def _one(self, client: openai.AsyncOpenAI, model: str, request: Request, version: int) -> Completion:
        raw = await client.completions.with_raw_response.create(
            model=model, prompt=request.prompt, extra_body={**self._body, **request.limits(self._body)}
        )
        # read the JSON itself: the client's types would check each of the millions of numbers of a rollout one by one
        (choice,) = raw.http_response.json()["choices"]
        return read(choice, raw.headers.get(VERSION_HEADER), request, version)


def read(choice: Mapping[str, Any], served: str | None, request: Request, version: int) -> Completion:
    """Return the completion in ``choice``; raise AnotherPolicyError or ServerRefusedError if it is not as asked."""
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
