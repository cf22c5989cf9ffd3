"""The load of a soak: streams that ask without a pause, and a pusher that changes the policy under them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qerl_recipes.bench.soak_streams import SILENT, Answer, Heard, Streams, prompts
from qerl_vllm_plugin.client import PolicyClient

# every third swap waits for requests under way, every tenth aborts them: many answers then have one version
MODES = ("keep", "wait", "keep", "keep", "wait", "keep", "keep", "wait", "keep", "abort")
TRANSPORTS = ("shared", "shared", "http")  # in turn: through shared memory, as ``auto`` does here, and in a body
NOISE_EVERY = 5  # swaps
ROUND = len(MODES) * len(TRANSPORTS)  # swaps, in which each kind has come
SIGMA = 0.05

Adapter = tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]


@dataclass(frozen=True)
class Change:
    """What was served from a moment on: the ``version``, whose adapter has that number (None: as at the start), and
    the noise."""

    version: int
    adapter: int | None
    noise: tuple[float, int, int]  # sigma, seed, rollout


@dataclass
class Found:
    """What the load has seen. ``changes`` are in their order; ``seconds`` are those of each change by its kind."""

    changes: list[Change]
    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cancelled: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    aborts: list[tuple[float, float]] = field(default_factory=list)  # from when to when, by time.monotonic()

    def take(self, heard: Heard) -> None:
        """The answers that came, each looked at, and those that did not."""
        self.cancelled += heard.cancelled
        self.lost += heard.lost
        for given in heard.answers:
            answer = given
            if answer.reason == SILENT and any(given.asked < end and start < given.ended for start, end in self.aborts):
                answer = replace(given, reason="abort")
            self.answers.append(answer)
            is_whole = answer.reason == "abort" or (answer.reason, len(answer.tokens)) == ("length", answer.length)
            if not is_whole or len(answer.tokens) != len(answer.logprobs):
                counts = f"{len(answer.tokens)} of {answer.length} tokens, {len(answer.logprobs)} log-probabilities"
                self.lost.append(f"{counts}, finish_reason {answer.reason}")


def ahead(draw: Callable[[int], Adapter], count: int) -> Callable[[int], Adapter]:
    """``draw`` for numbers that rise; of ``count`` at a time the later ones are drawn meanwhile, for 7B's takes half a
    second."""
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
    found: Found,
    between: Callable[[], None],
) -> None:
    """A swap every second for so many ``seconds``, and noise, or none again, after every fifth. ``policies`` are the
    clients by their transports; ``between`` is called after each ``ROUND``."""
    began, number = time.monotonic(), 1
    drawn = ahead(adapter, 2)
    while time.monotonic() - began < seconds:
        mode, transport = MODES[(number - 1) % len(MODES)], TRANSPORTS[number % len(TRANSPORTS)]
        policy = policies[transport]
        now = found.changes[-1]
        tensors, config = drawn(number)
        start = time.monotonic()
        if mode == "abort":
            found.aborts.append((start, math.inf))
        version = policy.swap(tensors, config, version=now.version + 1, requests=mode)
        if mode == "abort":
            found.aborts[-1] = (start, time.monotonic())
        found.seconds.setdefault(f"swap, {transport}, requests={mode}", []).append(time.monotonic() - start)
        found.changes.append(now := Change(version, number, now.noise))
        if number % NOISE_EVERY == 0:
            noise = (0.0, 0, 0) if now.noise[0] else (SIGMA, seed, number)
            start = time.monotonic()
            policy.set_noise(noise[0], seed=noise[1], rollout=noise[2])
            found.seconds.setdefault("noise", []).append(time.monotonic() - start)
            found.changes.append(Change(now.version, number, noise))
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
) -> tuple[Found, dict[str, float]]:
    """``quiet`` seconds without a swap, then ``busy`` seconds with one every second -> what was seen, and tokens/s of
    both. ``between`` is called between them, after each ``ROUND``, and at the end. Raises what the pusher met, which no
    server may refuse."""
    policies = {transport: PolicyClient(url, token, transport=transport) for transport in TRANSPORTS}
    found = Found([Change(policies["http"].state()["version"], None, (0.0, 0, 0))])
    with Streams(url, model, prompts(vocabulary, seed), streams, seed) as asking:
        start = time.monotonic()
        time.sleep(quiet)
        asking.check()
        between()
        middle = time.monotonic()
        push(policies, adapter, seed, busy, found, between)
        end = time.monotonic()
        asking.check()
        between()
        found.take(asking.end())
    phases = {"without swaps": (start, middle), "with swaps": (middle, end)}
    return found, {name: speed(found.answers, *times) for name, times in phases.items()}


def speed(answers: Sequence[Answer], start: float, end: float) -> float:
    """Tokens/s of the answers that ended between two moments of time.monotonic()."""
    return sum(len(answer.tokens) for answer in answers if start <= answer.ended < end) / (end - start)
