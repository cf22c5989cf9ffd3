"""The streams of a soak: they ask a server without a pause, through the official client, in processes of their own.

One process of Python answers for about 64 streams; more of them in one would measure that process, and a pusher beside
them would wait for its turn.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from qerl_recipes.bench.children import CONTEXT, child, kill
from qerl_vllm_plugin.client import VERSION_HEADER

PROMPTS = 24  # distinct ones, each asked again and again: keys and values of another policy would be found by them
SHORTEST_PROMPT, LONGEST_PROMPT = 130, 260  # tokens, more than a block of vLLM's cache on any device
LONGEST_ANSWER = 300
CANCELLED = 16  # one request of so many is given up in the middle of its answer
SEVERAL, SEQUENCES = 8, 5  # one request of so many asks for several sequences: its answer names the policies of all
STREAMS_A_PROCESS = 64
START = 120.0  # seconds that the processes may take to start
PATIENCE = 180.0  # seconds until the streams have ended that were told to: a request's limit is 120

SILENT = "none"  # the reason of a stream that ends before its first token: vLLM says nothing of why it was aborted


@dataclass(frozen=True)
class Answer:
    """``policy`` is what the answer's header, or the last line of a stream, says: FIRST, or FIRST-LAST. ``length``
    tokens were asked for; ``asked`` and ``ended`` are of time.monotonic()."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    policy: str
    reason: str
    length: int
    asked: float = 0.0
    ended: float = 0.0


@dataclass
class Heard:
    """What the streams have got: answers, requests that they gave up, and why others have none."""

    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cancelled: int = 0


def prompts(vocabulary: int, seed: int) -> list[list[int]]:
    """None of them fills its last block of a cache: whoever replays an answer needs what follows the last token."""
    draw = random.Random(f"{seed}:prompts")
    drawn = [draw.randint(SHORTEST_PROMPT, LONGEST_PROMPT) for _ in range(PROMPTS)]
    lengths = [length + (length % 16 == 0) for length in drawn]  # blocks have 16 tokens, or a multiple of that
    return [[draw.randrange(2, vocabulary) for _ in range(length)] for length in lengths]


async def ask(
    client: Any, model: str, prompt: list[int], length: int, n: int, *, stream: bool, stop_after: int | None
) -> list[Answer] | None:
    """An answer for each of ``n`` sequences; None if they were given up after ``stop_after`` pieces. Raises
    RuntimeError for a stream that is not whole, and where sequences are missing.

    The official client drops comment lines, and with them the last version of a stream: its lines are read here.
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
    named, is_done = "", False
    async with client.completions.with_streaming_response.create(**request, stream=True) as response:
        pieces = 0
        async for line in response.iter_lines():
            if line.startswith(f": {VERSION_HEADER}: "):
                named = line.rsplit(" ", 1)[1]
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
    for found, reason in zip(tokens, reasons, strict=True):
        is_silent = not found and reason is None
        if not is_done or (not is_silent and (reason is None or not named)):
            raise RuntimeError(f"a stream ended after {len(found)} tokens without its end")
    return [
        answer(found, scores, named, reason or SILENT)
        for found, scores, reason in zip(tokens, logprobs, reasons, strict=True)
    ]


async def run_stream(
    number: int, client: Any, model: str, pool: list[list[int]], seed: int, is_over: Callable[[], bool], heard: Heard
) -> None:
    """Asks one question after the other until ``is_over()``."""
    draw = random.Random(f"{seed}:stream {number}")
    while not is_over():
        prompt = draw.choice(pool)
        length = draw.randint(8, 48) if draw.randrange(8) else draw.randint(200, LONGEST_ANSWER)
        is_stream = bool(draw.randrange(4))
        stop_after = draw.randint(1, length // 2) if is_stream and not draw.randrange(CANCELLED) else None
        n = 1 if draw.randrange(SEVERAL) else SEQUENCES
        try:
            answers = await ask(client, model, prompt, length, n, stream=is_stream, stop_after=stop_after)
        except Exception as error:  # whatever it is, this question has no answer: that is what is looked for
            heard.lost.append(f"{type(error).__name__}: {error}")
            continue
        if answers is None:
            heard.cancelled += 1
        else:
            heard.answers += answers


async def _run_streams(
    url: str, model: str, numbers: range, pool: list[list[int]], seed: int, is_over: Callable[[], bool]
) -> Heard:
    import openai

    client, heard = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120), Heard()
    await asyncio.gather(*(run_stream(number, client, model, pool, seed, is_over, heard) for number in numbers))
    await client.close()
    return heard


def _work(
    url: str, model: str, numbers: range, pool: list[list[int]], seed: int, over: Any, connection: Connection
) -> None:
    connection.send("ready")
    connection.send(asyncio.run(_run_streams(url, model, numbers, pool, seed, over.is_set)))


def shares(count: int) -> list[range]:
    """The numbers of the streams of each process."""
    firsts = range(0, count, STREAMS_A_PROCESS)
    return [range(first, min(first + STREAMS_A_PROCESS, count)) for first in firsts]


class Streams:
    """``count`` streams, asking from now on until ``end``, and dead at the end of a block. Raises RuntimeError for a
    process that does not start."""

    def __init__(self, url: str, model: str, pool: list[list[int]], count: int, seed: int) -> None:
        self._over = CONTEXT.Event()
        self._processes, self._connections = [], []
        for numbers in shares(count):
            process, connection = child(_work, url, model, numbers, pool, seed, self._over)
            self._processes.append(process)
            self._connections.append(connection)
        for connection in self._connections:
            _receive(connection, START, "processes that ask the server have not started")

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        kill(self._processes)

    def check(self) -> None:
        """Raises RuntimeError if a process of streams has ended."""
        for process in self._processes:
            if process.exitcode is not None:
                raise RuntimeError(f"a process that asks the server has ended with code {process.exitcode}")

    def end(self) -> Heard:
        """No new questions; what has been heard, once every answer is there. Raises RuntimeError for a process that
        does not end, or has died."""
        self._over.set()
        heard, deadline = Heard(), time.monotonic() + PATIENCE
        for connection in self._connections:
            left = max(0.0, deadline - time.monotonic())
            part: Heard = _receive(connection, left, f"requests still run {PATIENCE:.0f} s after the last was asked")
            heard.answers += part.answers
            heard.lost += part.lost
            heard.cancelled += part.cancelled
        return heard


def _receive(connection: Connection, seconds: float, late: str) -> Any:
    if not connection.poll(seconds):
        raise RuntimeError(late)
    try:
        return connection.recv()
    except EOFError as error:
        raise RuntimeError("a process that asks the server has died, and what it heard with it") from error
