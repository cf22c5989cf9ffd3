"""Judge the answers of a soak: replay each under the policies that it names, and compare every log-probability.

A reference engine is given an answer's tokens under a policy. Most of replaying is Python's work for each request, so
on a GPU several engines share the policies, each in a process of its own.
"""

import functools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from soak_load import LONGEST_ANSWER, LONGEST_PROMPT, SPAWN, Adapter, Answer, Change, ahead

from qerl_recipes.bench import random_model
from qerl_recipes.bench.rollout_memory import LEAST_SHARE
from qerl_recipes.machine.gpu import installed_gpu
from qerl_recipes.rollout.arms import ENGINE_ON_CPU, engine_options

RANK = 8
ADAPTER_STD = 0.05  # makes what an adapter adds as large as what the random weights give
AHEAD = 4  # adapters that are drawn at one time
LENGTH = LONGEST_PROMPT + LONGEST_ANSWER + 16  # --max-model-len
MOST_ENGINES = 4
NEIGHBOURS = 16  # policies that one engine judges one after the other: their adapters are drawn ahead
CACHE = 4 << 30  # bytes of an engine's keys and values, on a GPU
AT_WORK = 6 << 30  # bytes of GPU memory beside weights and cache: mostly the logits of a prompt
MOST_POLICIES = 4  # of an answer that names FIRST-LAST: of more, almost anything could be a mixture
CONTROL_EVERY = 10  # one answer in so many is also judged under a policy that it does not name

# replay(change, answers) -> log-probabilities of the tokens of each answer under that policy
Replay = Callable[[Change, Sequence[Answer]], list[list[float]]]
# the same for many changes, in their order
Replays = Callable[[Iterable[Change], Iterable[Sequence[Answer]]], Iterable[list[list[float]]]]


def dtype() -> str:
    """Return what server and reference compute in: float32 where that costs nothing."""
    return "float32" if installed_gpu() is None else "bfloat16"


def config_of(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))


def make_adapter(config: Mapping[str, Any], seed: int, number: int) -> Adapter:
    """Return the adapter of that number, the same on every call."""
    return random_model.adapter(config, RANK, std=ADAPTER_STD, seed=seed * 1_000_003 + number)


def reference(folder: str, seed: int) -> Replay:
    """Start an engine, and return the function that replays answers on it."""
    from vllm import LLM, SamplingParams

    from qerl_vllm_plugin.policy import Policy

    on_device: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": CACHE,
        "gpu_memory_utilization": LEAST_SHARE,
    }
    if installed_gpu() is None:
        on_device = ENGINE_ON_CPU
    llm = LLM(
        model=folder,
        dtype=dtype(),
        max_model_len=LENGTH,
        max_num_seqs=256,
        enable_prefix_caching=True,  # the prompts are few, each asked again and again
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **{**engine_options("qerl_nvfp4", RANK, {}), **on_device},
    )
    policy, config = Policy(llm), config_of(folder)
    adapter_of = ahead(lambda number: make_adapter(config, seed, number), AHEAD)  # policies are judged in their order

    # no log-probabilities come for the part of a prompt that is found in the cache; nobody looks at them
    cached, fresh = (
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, skip_reading_prefix_cache=skip)
        for skip in (False, True)
    )

    def outputs_of(answers: Sequence[Answer]) -> list[Any]:
        inputs = [{"prompt_token_ids": [*answer.prompt, *answer.tokens]} for answer in answers]
        outputs = llm.generate(inputs, cached, use_tqdm=False)
        again = [i for i, (answer, output) in enumerate(zip(answers, outputs, strict=True)) if hides(answer, output)]
        for i, output in zip(again, llm.generate([inputs[i] for i in again], fresh, use_tqdm=False), strict=True):
            outputs[i] = output
        return outputs

    def replay(change: Change, answers: Sequence[Answer]) -> list[list[float]]:
        policy.swap(*(adapter_of(change.adapter) if change.adapter is not None else (None, None)))
        sigma, noise_seed, rollout = change.noise
        policy.set_noise(sigma, seed=noise_seed, rollout=rollout)
        # vLLM's own reset: the one that comes with a change of policy is what is on trial here
        if not llm.reset_prefix_cache():
            raise RuntimeError("the reference engine keeps its prefix cache, so its answers would be of another policy")
        outputs = outputs_of(answers)
        return [
            of_tokens(answer.tokens, output.prompt_logprobs) for answer, output in zip(answers, outputs, strict=True)
        ]

    return replay


_reference_here = functools.cache(reference)


def hides(answer: Answer, output: Any) -> bool:
    """Return True if the prefix cache reached the prompt's last token, which computes the answer's first one."""
    return output.num_cached_tokens >= len(answer.prompt)


def of_tokens(tokens: Sequence[int], prompt_logprobs: Sequence[Any]) -> list[float]:
    """Return the log-probabilities of the last tokens of a prompt, counted from the end.

    For what was in the prefix cache vLLM's runners return what there was in memory, or (0.26 on CUDA) nothing.
    """
    last = prompt_logprobs[len(prompt_logprobs) - len(tokens) :]
    return [position[token].logprob for token, position in zip(tokens, last, strict=True)]


@contextmanager
def references(folder: str, seed: int) -> Iterator[Replays]:
    """Yield the function that replays on as many engines as are of use, each in a process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine's core in the process of the engine
    with ProcessPoolExecutor(engines(folder), SPAWN) as executor:
        try:
            yield partial(executor.map, partial(_replay, folder, seed), chunksize=NEIGHBOURS)
        finally:
            executor.shutdown(cancel_futures=True)


def engines(folder: str) -> int:
    """Return how many engines fit into the GPU's free memory, at most ``MOST_ENGINES``; 1 without a GPU."""
    if installed_gpu() is None:
        return 1
    import torch

    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return max(1, min(MOST_ENGINES, torch.cuda.mem_get_info()[0] // (weights + CACHE + AT_WORK)))


def _replay(folder: str, seed: int, change: Change, answers: Sequence[Answer]) -> list[list[float]]:
    return _reference_here(folder, seed)(change, answers)


@dataclass
class Verdict:
    """Count what judging has found so far.

    ``one`` were judged under the one policy that they name, ``several`` as a sequence of them; ``left_out`` name more
    than ``MOST_POLICIES``. ``wrong`` says why, by answer. ``worst`` is the largest difference of the right ones of one
    policy. Of ``controls``, judged under a policy that they do not name, ``told_apart`` were wrong.
    """

    one: int = 0
    several: int = 0
    left_out: int = 0
    worst: float = 0.0
    wrong: dict[int, str] = field(default_factory=dict)
    controls: int = 0
    told_apart: int = 0
    waiting: int = 0


def named(policy: str, changes: Sequence[Change]) -> list[int]:
    """Return the numbers of the changes that an answer may be of, in order; empty for a version never served."""
    ends = policy.split("-")
    first = [i for i, change in enumerate(changes) if str(change.version) == ends[0]]
    last = [i for i, change in enumerate(changes) if str(change.version) == ends[-1]]
    return list(range(first[0], last[-1] + 1)) if first and last else []


def difference(answer: Answer, replayed: Sequence[Sequence[float]], tolerance: float) -> float:
    """Return the largest difference of ``answer`` to policies in a row; above ``tolerance`` there is no such row."""
    place, worst = 0, 0.0
    for i, logprob in enumerate(answer.logprobs):
        off = abs(logprob - replayed[place][i])
        while not off <= tolerance and place + 1 < len(replayed):
            place += 1
            off = abs(logprob - replayed[place][i])
        if not off <= tolerance:
            return off
        worst = max(worst, off)
    return worst


class _Judging:
    """Plan which answers are replayed under which policies, and judge each answer once all its replays are there."""

    def __init__(self, answers: Sequence[Answer], changes: Sequence[Change], tolerance: float) -> None:
        self.answers, self.tolerance, self.verdict = answers, tolerance, Verdict()
        self.named: dict[int, list[int]] = {}  # answer -> the changes that it names
        self.control: dict[int, list[int]] = {}  # answer -> a change that it does not name, or none
        self.replayed: dict[int, dict[int, list[float]]] = {}  # answer not yet judged -> change -> log-probabilities
        self.work: dict[int, list[int]] = defaultdict(list)  # change -> answers that are replayed under it
        changes_of = functools.cache(lambda policy: named(policy, changes))  # many answers name the same
        for i, answer in enumerate(answers):
            if not answer.tokens:
                continue
            places = changes_of(answer.policy)
            if not places:
                self.verdict.wrong[i] = f"answer {i} names policy {answer.policy}, which was never served"
            elif "-" in answer.policy and len(places) > MOST_POLICIES:
                self.verdict.left_out += 1
            else:
                self.named[i], self.replayed[i] = places, {}
                self.control[i] = [places[0] - 1] if i % CONTROL_EVERY == 0 and places[0] > 0 else []
                for place in (*places, *self.control[i]):
                    self.work[place].append(i)
        self.verdict.waiting = len(self.replayed)

    def add(self, place: int, replayed: Sequence[list[float]]) -> None:
        """Take the log-probabilities of the answers that were replayed under a change."""
        for i, logprobs in zip(self.work[place], replayed, strict=True):
            self.replayed[i][place] = logprobs
            if len(self.replayed[i]) == len(self.named[i]) + len(self.control[i]):
                self._judge(i, self.replayed.pop(i))

    def _judge(self, i: int, replayed: Mapping[int, list[float]]) -> None:
        answer, verdict = self.answers[i], self.verdict
        under = [replayed[place] for place in self.named[i]]
        verdict.waiting -= 1
        if "-" in answer.policy:
            verdict.several += 1
            off = difference(answer, under, self.tolerance)
        else:  # a version may have been served with and without noise, and this is one of the two from end to end
            verdict.one += 1
            off = min(difference(answer, [logprobs], self.tolerance) for logprobs in under)
            verdict.worst = max(verdict.worst, off if off <= self.tolerance else 0.0)
        if not off <= self.tolerance:
            verdict.wrong[i] = f"answer {i} of policy {answer.policy}: a log-probability is {off:.3g} off"
        for place in self.control[i]:
            verdict.controls += 1
            verdict.told_apart += difference(answer, [replayed[place]], self.tolerance) > self.tolerance


def judge(
    answers: Sequence[Answer],
    changes: Sequence[Change],
    replays: Replays,
    tolerance: float,
    report: Callable[[Verdict], None] = lambda verdict: None,
) -> Verdict:
    """Judge every answer against every policy that it names; ``report`` gets the verdict so far after each policy."""
    judging = _Judging(answers, changes, tolerance)
    places = sorted(judging.work)
    members = ([answers[i] for i in judging.work[place]] for place in places)
    for place, replayed in zip(places, replays((changes[place] for place in places), members), strict=True):
        judging.add(place, replayed)
        report(judging.verdict)
    return judging.verdict
