"""Request completions from a server by OpenAI's client, as token ids in both directions, with log-probabilities."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import openai

from qerl_recipes.rollout.server_state import AnotherPolicyError, ServerRefusedError
from qerl_vllm_plugin.client import VERSION_HEADER
from qerl_vllm_plugin.wire.address import Login, authorization

CUT = ("length", "stop")  # finish reasons of a complete completion; vLLM has others for one that was aborted


@dataclass(frozen=True)
class Question:
    """Hold a prompt, the seed of its completion, and the most tokens that the completion may have."""

    prompt: list[int]
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """Hold a completion's token ids and their log-probabilities, None where vLLM knows none."""

    ids: list[int]
    logprobs: list[float | None]


class Questions:
    """Request completions from one server.

    ``parameters`` are vLLM's sampling parameters, the same for all questions. ``login`` is for a proxy before the
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
        self._options: dict[str, Any] = {
            "base_url": f"{url}/v1",
            "api_key": api_key or "none",
            "max_retries": 0,  # the caller retries: it knows whether the server is still the same
            "timeout": openai.Timeout(None, connect=timeout),  # a completion may take long
            "default_headers": {"Authorization": authorization(login)} if login else None,
        }
        # the text of a token is not needed, and its bytes need not be text
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        self._body = {**{key: value for key, value in parameters.items() if key != "max_tokens"}, **ids}

    def ask(
        self,
        questions: Mapping[int, Question],
        answers: dict[int, Answer],
        version: int,
        watch: Callable[[], Awaitable[None]],
    ) -> Exception | None:
        """Put the answers to ``questions`` into ``answers``; return the first error that left some out, or None.

        The call ends early when ``watch`` ends; then answers may be missing without an error. An answer of another
        policy ``version`` is left out, and its AnotherPolicyError goes before other errors. Raises ServerRefusedError
        if the server refuses a question, and whatever ``watch`` raises.
        """
        return asyncio.run(self._ask(questions, answers, version, watch))

    async def _ask(
        self,
        questions: Mapping[int, Question],
        answers: dict[int, Answer],
        version: int,
        watch: Callable[[], Awaitable[None]],
    ) -> Exception | None:
        failures: list[Exception] = []
        async with openai.AsyncOpenAI(**self._options) as client:

            async def one(place: int, question: Question) -> None:
                try:
                    answers[place] = await self._one(client, model, question, version)
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
            tasks = [asyncio.create_task(one(place, question)) for place, question in questions.items()]
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

    async def _one(self, client: openai.AsyncOpenAI, model: str, question: Question, version: int) -> Answer:
        raw = await client.completions.with_raw_response.create(
            model=model,
            prompt=question.prompt,
            seed=question.seed,
            max_tokens=question.max_tokens,
            extra_body=self._body,
        )
        # read the JSON itself: the client's types would check each of the millions of numbers of a rollout one by one
        (choice,) = raw.http_response.json()["choices"]
        return read(choice, raw.headers.get(VERSION_HEADER), question, version)


def read(choice: Mapping[str, Any], served: str | None, question: Question, version: int) -> Answer:
    """Return the answer in ``choice`` of a completion that the policy version ``served`` computed.

    Raises AnotherPolicyError if ``served`` is not ``version``, or if the server has aborted the completion. Raises
    ServerRefusedError if the server has cut the completion short, has changed its prompt, or has left out token ids or
    log-probabilities.
    """
    if served != str(version):
        raise AnotherPolicyError(
            f"an answer is of policy version {served or 'unknown'}, and {version} was pushed: it was not sampled from "
            "the policy that learns from it"
        )
    ids, values = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if ids is None or values is None or len(ids) != len(values):
        counts = [None if found is None else len(found) for found in (ids, values)]
        raise ServerRefusedError(
            f"the server answered with {counts[0]} token ids and {counts[1]} log-probabilities; it must be vLLM 0.26 "
            "or newer, and nothing between may change its answers"
        )
    if choice.get("prompt_token_ids") not in (None, question.prompt):
        raise ServerRefusedError("the server has changed a prompt before it answered")
    reason = choice["finish_reason"]
    if reason not in CUT:
        raise AnotherPolicyError(f"a completion was broken off by the server ({reason}): another program changed it")
    if reason == "length" and len(ids) < question.max_tokens:
        raise ServerRefusedError(
            f"the server cut a completion after {len(ids)} of {question.max_tokens} tokens: its own max_new_tokens "
            "stands above ours; start it with --generation-config vllm"
        )
    return Answer(ids, values)
