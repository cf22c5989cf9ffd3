"""The load of a soak: streams that ask a server without a pause, and changes of the policy under them.

Streams use the official client and run in processes of their own. One process of Python answers for about 64 streams:
with more, the soak would measure that process, and the changes of policy would wait for it.
"""

import asyncio
import json
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qerl_vllm_plugin.client import VERSION_HEADER, PolicyClient

# every third swap waits for running requests, every tenth aborts them: many answers then have one version
MODES = ("keep", "wait", "keep", "keep", "wait", "keep", "keep", "wait", "keep", "abort")
# in turn: from GPU to GPU where there is one, through shared memory, and in a body
TRANSPORTS = ("ipc" if torch.cuda.is_available() else "shared", "shared", "http")
NOISE_EVERY = 5  # swaps
ROUND = len(MODES) * len(TRANSPORTS)  # swaps, among which is each kind
SIGMA = 0.05

PROMPTS = 24  # distinct ones, each asked again and again, so that stale keys and values would be found in a cache
SHORTEST_PROMPT, LONGEST_PROMPT = 130, 260  # tokens, more than a block of vLLM's cache on any device
LONGEST_ANSWER = 300
CANCELLED = 16  # one request in so many is given up in the middle of its answer
SEVERAL, SEQUENCES = 8, 5  # one request in so many asks for several sequences: its answer names the policies of all
STREAMS_A_PROCESS = 64
START = 120.0  # seconds that the processes may take to start

SILENT = "none"  # the reason of a stream that ends before its first token: vLLM does not say why it was aborted

Adapter = tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Answer:
    """Hold an answered sequence, of which ``length`` tokens were asked for, with times of time.monotonic().

    ``policy`` is what the answer's header, or the last line of a stream, says: FIRST, or FIRST-LAST.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    policy: str
    reason: str
    length: int
    asked: float = 0.0
    ended: float = 0.0


@dataclass
class Received:
    """Hold what streams received: answers, why others have none, and how many requests were given up."""

    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cancelled: int = 0


@dataclass(frozen=True)
class Change:
    """Say what was served from a moment on: adapter's number (None: the start), noise as (sigma, seed, rollout)."""

    version: int
    adapter: int | None
    noise: tuple[float, int, int]


@dataclass
class Observed(Received):
    """Hold what a load has shown: also ``changes``, ``seconds`` by kind of change, spans of time with ``aborts``."""

    changes: list[Change] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    aborts: list[tuple[float, float]] = field(default_factory=list)

    def add(self, received: Received) -> None:
        """Add what streams received; an answer that is not whole is lost, unless a swap has aborted it."""
        self.cancelled += received.cancelled
        self.lost += received.lost
        for answer in received.answers:
            was_aborted = any(answer.asked < end and start < answer.ended for start, end in self.aborts)
            if answer.reason == SILENT and was_aborted:
                answer = replace(answer, reason="abort")
            self.answers.append(answer)
            is_whole = answer.reason == "abort" or (answer.reason, len(answer.tokens)) == ("length", answer.length)
            if not is_whole or len(answer.tokens) != len(answer.logprobs):
                counts = f"{len(answer.tokens)} of {answer.length} tokens, {len(answer.logprobs)} log-probabilities"
                self.lost.append(f"{counts}, finish_reason {answer.reason}")


def prompts(vocabulary: int, seed: int) -> list[list[int]]:
    """Draw prompts that do not fill the last block of a cache: replaying needs what follows their last token."""
    draw = random.Random(f"{seed}:prompts")
    drawn = [draw.randint(SHORTEST_PROMPT, LONGEST_PROMPT) for _ in range(PROMPTS)]
    lengths = [length + (length % 16 == 0) for length in drawn]  # blocks have 16 tokens, or a multiple of that
    return [[draw.randrange(2, vocabulary) for _ in range(length)] for length in lengths]


async def ask(
    client: Any, model: str, prompt: list[int], length: int, n: int, *, stream: bool, stop_after: int | None
) -> list[Answer] | None:
    """Return an answer for each of ``n`` sequences, or None if they were given up after ``stop_after`` pieces.

    Raises RuntimeError for a stream that is not whole, and where sequences are missing. The official client drops
    comment lines, and with them the last version of a stream, so the lines are read here.
    """
    asked = time.monotonic()
    request: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "n": n,
        "max_tokens": length,
        "temperature": 1.0,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }

    def answer(tokens: list[int], logprobs: list[float], policy: str, reason: str) -> Answer:
        return Answer(prompt, tokens, logprobs, policy, reason, length, asked, time.monotonic())

    if not stream:
        raw = await client.completions.with_raw_response.create(**request)
        policy, choices = raw.headers[VERSION_HEADER], raw.parse().choices
        if len(choices) != n:
            raise RuntimeError(f"{len(choices)} of {n} sequences were answered")
        return [answer(one.token_ids, one.logprobs.token_logprobs, policy, one.finish_reason) for one in choices]
    tokens: list[list[int]] = [[] for _ in range(n)]
    logprobs: list[list[float]] = [[] for _ in range(n)]
    reasons: list[str | None] = [None] * n
    policy, is_done, pieces = "", False, 0
    async with client.completions.with_streaming_response.create(**request, stream=True) as response:
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
                    i = choice["index"]
                    tokens[i] += choice["token_ids"] or []
                    logprobs[i] += (choice["logprobs"] or {}).get("token_logprobs", [])
                    reasons[i] = choice["finish_reason"] or reasons[i]
                pieces += 1
                if stop_after is not None and pieces >= stop_after:
                    return None
    for ids, reason in zip(tokens, reasons, strict=True):
        is_silent = not ids and reason is None
        if not is_done or (not is_silent and (reason is None or not policy)):
            raise RuntimeError(f"a stream ended after {len(ids)} tokens without its end")
    return [
        answer(ids, scores, policy, reason or SILENT)
        for ids, scores, reason in zip(tokens, logprobs, reasons, strict=True)
    ]


def _ask_until(
    over: Any, started: Any, url: str, model: str, numbers: Sequence[int], pool: list[list[int]], seed: int
) -> Received:
    """Run the streams of one process once all have ``started`` until ``over``; return what they received."""
    import openai

    received = Received()

    async def stream(number: int, client: openai.AsyncOpenAI) -> None:
        """Ask one question after the other."""
        draw = random.Random(f"{seed}:stream {number}")
        while not over.is_set():
            prompt = draw.choice(pool)
            length = draw.randint(8, 48) if draw.randrange(8) else draw.randint(200, LONGEST_ANSWER)
            is_stream = bool(draw.randrange(4))
            stop_after = draw.randint(1, length // 2) if is_stream and not draw.randrange(CANCELLED) else None
            n = 1 if draw.randrange(SEVERAL) else SEQUENCES
            try:
                answers = await ask(client, model, prompt, length, n, stream=is_stream, stop_after=stop_after)
            except Exception as error:  # whatever it is, this question has no answer: that is what is looked for
                received.lost.append(f"{type(error).__name__}: {error}")
                continue
            if answers is None:
                received.cancelled += 1
            else:
                received.answers += answers

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            await asyncio.gather(*(stream(number, client) for number in numbers))

    started.wait(START)
    asyncio.run(run())
    return received


@contextmanager
def running(url: str, model: str, pool: list[list[int]], count: int, seed: int) -> Iterator[Callable[[], Received]]:
    """Run ``count`` streams in processes; yield the function that ends them and returns what they received."""
    shares = [range(count)[first : first + STREAMS_A_PROCESS] for first in range(0, count, STREAMS_A_PROCESS)]
    with SPAWN.Manager() as manager, ProcessPoolExecutor(len(shares), SPAWN) as executor:
        over, started = manager.Event(), manager.Barrier(len(shares) + 1)
        asking = [executor.submit(_ask_until, over, started, url, model, share, pool, seed) for share in shares]
        started.wait(START)

        def end() -> Received:
            over.set()
            total = Received()
            for part in asking:
                received = part.result()
                total.answers += received.answers
                total.lost += received.lost
                total.cancelled += received.cancelled
            return total

        try:
            yield end
        finally:
            over.set()


def ahead(draw: Callable[[int], Adapter], count: int) -> Callable[[int], Adapter]:
    """Return ``draw`` for rising numbers; the next ``count`` are drawn meanwhile (a 7B's takes half a second)."""
    pool, drawn = ThreadPoolExecutor(count), dict[int, Future[Adapter]]()

    def adapter_of(number: int) -> Adapter:
        for later in range(number, number + count):
            if later not in drawn:
                drawn[later] = pool.submit(draw, later)
        for earlier in [known for known in drawn if known < number]:
            del drawn[earlier]
        return drawn[number].result()

    return adapter_of


def push(
    policies: Mapping[str, PolicyClient],
    adapter: Callable[[int], Adapter],
    seed: int,
    seconds: float,
    observed: Observed,
    between: Callable[[], None],
) -> None:
    """Swap once a second for ``seconds``; toggle the noise after every fifth, call ``between`` after each ``ROUND``."""
    began, number = time.monotonic(), 1
    adapter_of = ahead(adapter, 2)
    while time.monotonic() - began < seconds:
        mode, transport = MODES[(number - 1) % len(MODES)], TRANSPORTS[number % len(TRANSPORTS)]
        policy = policies[transport]
        served = observed.changes[-1]
        tensors, config = adapter_of(number)
        if transport == "ipc":
            tensors = {name: tensor.cuda() for name, tensor in tensors.items()}
        start = time.monotonic()
        if mode == "abort":
            observed.aborts.append((start, math.inf))
        version = policy.swap(tensors, config, version=served.version + 1, requests=mode)
        if mode == "abort":
            observed.aborts[-1] = (start, time.monotonic())
        observed.seconds.setdefault(f"swap, {transport}, requests={mode}", []).append(time.monotonic() - start)
        served = Change(version, number, served.noise)
        observed.changes.append(served)
        if number % NOISE_EVERY == 0:
            noise = (0.0, 0, 0) if served.noise[0] else (SIGMA, seed, number)
            start = time.monotonic()
            policy.set_noise(noise[0], seed=noise[1], rollout=noise[2])
            observed.seconds.setdefault("noise", []).append(time.monotonic() - start)
            observed.changes.append(Change(served.version, number, noise))
        if number % ROUND == 0:
            between()
        time.sleep(max(0.0, began + number - time.monotonic()))
        number += 1


def load(
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
) -> tuple[Observed, dict[str, float]]:
    """Load a server for ``quiet`` seconds without a swap, then for ``busy`` seconds with one every second.

    Return what was observed, and the tokens/s of both phases. ``between`` is called around them and after each
    ``ROUND``. Any error of a change of policy is raised: no server may refuse one.
    """
    policies = {transport: PolicyClient(url, token, transport=transport) for transport in TRANSPORTS}
    observed = Observed(changes=[Change(policies["http"].state()["version"], None, (0.0, 0, 0))])
    with running(url, model, prompts(vocabulary, seed), streams, seed) as end_streams:
        start = time.monotonic()
        time.sleep(quiet)
        between()
        middle = time.monotonic()
        push(policies, adapter, seed, busy, observed, between)
        end = time.monotonic()
        between()
        observed.add(end_streams())
    phases = {"without swaps": (start, middle), "with swaps": (middle, end)}
    return observed, {name: speed(observed.answers, *times) for name, times in phases.items()}


def speed(answers: Sequence[Answer], start: float, end: float) -> float:
    """Return the tokens/s of the answers that ended between two moments of time.monotonic()."""
    return sum(len(answer.tokens) for answer in answers if start <= answer.ended < end) / (end - start)
