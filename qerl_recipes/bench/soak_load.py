"""The load of a soak: streams that ask without a pause through the official client, and a pusher that changes the
policy under them."""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qerl_vllm_plugin.client import VERSION_HEADER, AsyncPolicyClient

# every third swap waits for requests under way, every tenth aborts them: many answers then have one version
MODES = ("keep", "wait", "keep", "keep", "wait", "keep", "keep", "wait", "keep", "abort")
NOISE_EVERY = 5  # swaps
SIGMA = 0.05
PROMPTS = 24  # distinct ones, each asked again and again: keys and values of another policy would be found by them
SHORTEST_PROMPT, LONGEST_PROMPT = 130, 260  # tokens, more than a block of vLLM's cache on any device
LONGEST_ANSWER = 300
CANCELLED = 16  # one request of so many is given up in the middle of its answer

SILENT = "none"  # the reason of a stream that ends before its first token: vLLM says nothing of why it was aborted

Adapter = tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]


@dataclass(frozen=True)
class Change:
    """What was served from a moment on: the ``version``, whose adapter has that number (None: as at the start), and
    the noise."""

    version: int
    adapter: int | None
    noise: tuple[float, int, int]  # sigma, seed, rollout


@dataclass(frozen=True)
class Answer:
    """``policy`` is what the answer's header, or the last line of a stream, says: FIRST, or FIRST-LAST."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    policy: str
    reason: str


@dataclass
class Found:
    """What the load has seen. ``changes`` are in their order; ``seconds`` are those of each change by its kind."""

    changes: list[Change]
    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cancelled: int = 0
    tokens: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    aborts: list[tuple[float, float]] = field(default_factory=list)  # from when to when, by time.monotonic()


def prompts(vocabulary: int, seed: int) -> list[list[int]]:
    """None of them fills its last block of a cache: whoever replays an answer needs what follows the last token."""
    draw = random.Random(f"{seed}:prompts")
    drawn = [draw.randint(SHORTEST_PROMPT, LONGEST_PROMPT) for _ in range(PROMPTS)]
    lengths = [length + (length % 16 == 0) for length in drawn]  # blocks have 16 tokens, or a multiple of that
    return [[draw.randrange(2, vocabulary) for _ in range(length)] for length in lengths]


async def ask(
    client: Any, model: str, prompt: list[int], length: int, *, stream: bool, stop_after: int | None
) -> Answer | None:
    """One answer; None if it was given up after ``stop_after`` pieces. Raises RuntimeError for one that is not whole.

    The official client drops comment lines, and with them the last version of a stream: its lines are read here.
    """
    request: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 1.0,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    if not stream:
        raw = await client.completions.with_raw_response.create(**request)
        choice = raw.parse().choices[0]
        return Answer(
            prompt, choice.token_ids, choice.logprobs.token_logprobs, raw.headers[VERSION_HEADER], choice.finish_reason
        )
    tokens: list[int] = []
    logprobs: list[float] = []
    reason = policy = None
    is_done = False
    async with client.completions.with_streaming_response.create(**request, stream=True) as response:
        pieces = 0
        async for line in response.iter_lines():
            if line.startswith(f": {VERSION_HEADER}: "):
                policy = line.rsplit(" ", 1)[1]
            elif line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: {"):
                piece = json.loads(line.removeprefix("data: "))
                if "error" in piece:
                    raise RuntimeError(f"the stream ended with {piece['error']}")
                for choice in piece["choices"]:
                    tokens += choice["token_ids"] or []
                    logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                    reason = choice["finish_reason"] or reason
                pieces += 1
                if stop_after is not None and pieces >= stop_after:
                    return None
    if is_done and not tokens and reason is None:
        return Answer(prompt, [], [], policy or "", SILENT)
    if not is_done or reason is None or policy is None:
        raise RuntimeError(f"a stream ended after {len(tokens)} tokens without its end")
    return Answer(prompt, tokens, logprobs, policy, reason)


async def run_stream(
    number: int, client: Any, model: str, pool: list[list[int]], seed: int, stop: asyncio.Event, found: Found
) -> None:
    """Asks one question after the other until ``stop`` is set."""
    draw = random.Random(f"{seed}:stream {number}")
    while not stop.is_set():
        prompt = draw.choice(pool)
        length = draw.randint(8, 48) if draw.randrange(8) else draw.randint(200, LONGEST_ANSWER)
        is_stream = bool(draw.randrange(4))
        stop_after = draw.randint(1, length // 2) if is_stream and not draw.randrange(CANCELLED) else None
        asked = time.monotonic()
        try:
            answer = await ask(client, model, prompt, length, stream=is_stream, stop_after=stop_after)
        except Exception as error:  # whatever it is, this question has no answer: that is what is looked for
            found.lost.append(f"{type(error).__name__}: {error}")
            continue
        if answer is None:
            found.cancelled += 1
            continue
        found.answers.append(answer)
        found.tokens += len(answer.tokens)
        if answer.reason == SILENT and any(asked < end and start < time.monotonic() for start, end in found.aborts):
            answer = replace(answer, reason="abort")
            found.answers[-1] = answer
        is_whole = answer.reason == "abort" or (answer.reason, len(answer.tokens)) == ("length", length)
        if not is_whole or len(answer.tokens) != len(answer.logprobs):
            counts = f"{len(answer.tokens)} of {length} tokens, {len(answer.logprobs)} log-probabilities"
            found.lost.append(f"{counts}, finish_reason {answer.reason}")


async def push(
    policy: AsyncPolicyClient, adapter: Callable[[int], Adapter], seed: int, stop: asyncio.Event, found: Found
) -> None:
    """A swap every second until ``stop`` is set, and noise, or none again, after every fifth."""
    began, number = time.monotonic(), 0
    while not stop.is_set():
        mode = MODES[number % len(MODES)]
        number += 1
        now = found.changes[-1]
        tensors, config = await asyncio.to_thread(adapter, number)  # a large one takes a while: no stream waits for it
        start = time.perf_counter()
        if mode == "abort":
            found.aborts.append((time.monotonic(), math.inf))
        version = await policy.swap(tensors, config, version=now.version + 1, requests=mode)
        if mode == "abort":
            found.aborts[-1] = (found.aborts[-1][0], time.monotonic())
        found.seconds.setdefault(f"swap, requests={mode}", []).append(time.perf_counter() - start)
        found.changes.append(now := Change(version, number, now.noise))
        if number % NOISE_EVERY == 0:
            noise = (0.0, 0, 0) if now.noise[0] else (SIGMA, seed, number)
            start = time.perf_counter()
            await policy.set_noise(noise[0], seed=noise[1], rollout=noise[2])
            found.seconds.setdefault("noise", []).append(time.perf_counter() - start)
            found.changes.append(Change(now.version, number, noise))
        await asyncio.sleep(max(0.0, began + number - time.monotonic()))


async def load(
    url: str,
    token: str,
    model: str,
    *,
    vocabulary: int,
    streams: int,
    quiet: float,
    busy: float,
    seed: int,
    adapter: Callable[[int], Adapter],
    between: Callable[[], None] = lambda: None,
) -> tuple[Found, dict[str, float]]:
    """``quiet`` seconds without a swap, then ``busy`` seconds with one every second -> what was seen, and tokens/s of
    both. ``between`` is called between them, and at the end. Raises what the pusher met, which no server may refuse."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    policy = AsyncPolicyClient(url, token)
    found = Found([Change((await policy.state())["version"], None, (0.0, 0, 0))])
    pool, stop = prompts(vocabulary, seed), asyncio.Event()
    running = [asyncio.create_task(run_stream(i, client, model, pool, seed, stop, found)) for i in range(streams)]
    speed = {}
    pusher = None
    try:
        for name, seconds in (("without swaps", quiet), ("with swaps", busy)):
            start, before = time.perf_counter(), found.tokens
            if name == "with swaps":
                pusher = asyncio.create_task(push(policy, adapter, seed, stop, found))
                done, _ = await asyncio.wait([pusher], timeout=seconds)
                for task in done:  # it goes on until it is stopped, unless it has met an error
                    task.result()
            else:
                await asyncio.sleep(seconds)
            speed[name] = (found.tokens - before) / (time.perf_counter() - start)
            between()
    finally:
        stop.set()
        await asyncio.gather(*running, *([pusher] if pusher else []))
        await client.close()
    return found, speed
