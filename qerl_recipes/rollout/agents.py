"""Let an agent that owns its loop sample from the rollout server, through the ``openai`` client.

    async def agent(client, prompt):                   # client: openai.AsyncOpenAI
        answer = await client.chat.completions.create(model="policy", messages=prompt)
        ...                                            # tools, further turns; what it returns is the column outcome

    rollout = rollout_of(agent)                        # in a recipe: rollout_func: my_package.rollout

The client adds to each chat request the recipe's sampling parameters, the seed of episode and turn, token ids and
log-probabilities. The policy must stand still: each answer's version is checked, and the server's count of changes at
the end. If the server is restarted meanwhile, all episodes are played again.

The calls of an episode become one row. Tokens that the policy has sampled are learned from, others are read. An agent
that rewrites what lies before forks the episode, and the row with the most sampled tokens is kept; the metric
``forked`` is the share of episodes in which that happened.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import openai
from trl.experimental.async_grpo.async_rollout_worker import TrainingSequence, TurnRecord, _chain_to_sequences

from qerl_recipes.rollout.calls import read_any_text
from qerl_recipes.rollout.sampling import Request
from qerl_recipes.rollout.server import ServerRollouts, read
from qerl_vllm_plugin.client import VERSION_HEADER

Agent = Callable[[openai.AsyncOpenAI, Any], Awaitable[Any]]
PATH = "/chat/completions"
REALIGNED = 1024  # tokens of an answer that may come back as others, TRL's default of fork_threshold_tokens
httpx: Any = sys.modules[openai.DefaultAsyncHttpxClient.__mro__[1].__module__]  # the client's own: httpx or httpx2


def rollout_of(agent: Agent) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return TRL's ``rollout_func`` that plays an episode of ``agent`` for each prompt, all at the same time.

    It raises ValueError without ``vllm_mode: server`` and for an episode without a sampled token, what ``agent``
    raises, and AnotherPolicyError if another program changes the policy.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        engine = trainer.vllm_generation
        if not isinstance(engine, ServerRollouts):
            raise ValueError("an agent samples from a server; use vllm_mode: server")
        group = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        read_any_text(trainer._tokenizer)  # TRL looks for calls in what was sampled
        seed = engine.seeds(len(prompts), group)
        episodes = engine.unchanged(lambda version: asyncio.run(_together(agent, prompts, engine, seed, version)))
        rows, outcomes = zip(*episodes, strict=True)
        chained = [_chain_to_sequences(turns, str(place), REALIGNED) for place, turns in enumerate(rows)]
        trainer._log_metric("forked", sum(tally["fork"] > 0 for _, tally in chained) / len(chained))
        columns: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        for turns, (sequences, _) in zip(rows, chained, strict=True):
            if not sequences:
                raise ValueError("an episode of the agent has no token that the policy has sampled")
            for column, values in zip(columns.values(), _row(turns, sequences, trainer), strict=True):
                column.append(values)
        return {**columns, "outcome": list(outcomes)}

    return rollout


async def _together(
    agent: Agent, prompts: list[Any], engine: ServerRollouts, seed: Callable[[int, int], int], version: int
) -> tuple[list[tuple[list[TurnRecord], Any]], int]:
    """Return turns and outcome of each episode, and the number of tokens that were sampled."""

    async def one(place: int) -> tuple[list[TurnRecord], Any]:
        recorder = Recorder(engine.parameters, lambda turn: seed(place, turn), version)
        async with engine.client(openai.DefaultAsyncHttpxClient(transport=recorder)) as client:
            outcome = await agent(client, prompts[place])
        return recorder.turns, outcome

    episodes = await asyncio.gather(*map(one, range(len(prompts))))
    return episodes, sum(len(turn.output_ids) for turns, _ in episodes for turn in turns)


def _row(turns: list[TurnRecord], sequences: list[TrainingSequence], trainer: Any) -> tuple[list[Any], ...]:
    """Return prompt, completion, log-probabilities and mask of the sequence with the most sampled tokens."""
    kept = max(sequences, key=lambda sequence: sum(sequence.completion_mask))
    prompt = kept.completion_mask.index(1)
    end = prompt + trainer.max_completion_length
    return (
        kept.input_ids[:prompt],
        *(values[prompt:end] for values in (kept.input_ids, kept.old_log_probs, kept.completion_mask)),
    )


class Recorder(httpx.AsyncHTTPTransport):  # type: ignore[misc]
    """Add the recipe's sampling to each chat request of an episode, and keep what the server answers as a turn.

    ``parameters`` are vLLM's sampling parameters, and ``seed`` returns the seed of a turn. Raises AnotherPolicyError
    for an answer of another policy than ``version``, and ServerRefusedError for one without ids or log-probabilities.
    """

    def __init__(self, parameters: Mapping[str, Any], seed: Callable[[int], int], version: int) -> None:
        super().__init__()
        self.turns: list[TurnRecord] = []
        self._parameters, self._seed, self._version, self._asked = parameters, seed, version, 0

    async def handle_async_request(self, request: Any) -> Any:
        if not request.url.path.endswith(PATH):
            return await super().handle_async_request(request)
        asked = {key: value for key, value in json.loads(request.content).items() if key != "model"}
        if asked.get("stream") or asked.get("n", 1) != 1:
            raise ValueError("an agent's requests are recorded whole and one by one: ask without stream, and with n=1")
        ours = {"seed": self._seed(self._asked), "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        self._asked += 1
        headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
        changed = httpx.Request("POST", request.url, headers=headers, json={**asked, **self._parameters, **ours})
        response = await super().handle_async_request(changed)
        await response.aread()
        if response.is_success:
            self._keep(response.json(), response.headers.get(VERSION_HEADER))
        return response

    def _keep(self, answer: Mapping[str, Any], served: str | None) -> None:
        (choice,), prompt = answer["choices"], answer["prompt_token_ids"]
        values = [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or ()]
        reason = "stop" if choice["finish_reason"] == "tool_calls" else choice["finish_reason"]
        known = {"token_ids": choice.get("token_ids"), "logprobs": {"token_logprobs": values}, "finish_reason": reason}
        ids, logprobs = read(known, served, Request(prompt, 0, 0), self._version)
        self.turns.append(TurnRecord(prompt, ids, logprobs))
