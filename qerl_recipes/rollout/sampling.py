"""Sample completions: what both built-in engines share, and the quick way to a vLLM in this process.

``LLM.generate`` processes every token of every sequence in Python, and a decode step on a GPU waits for it.
``generate`` reads the outputs of vLLM's engine core step by step instead; vLLM's output processor sees a sequence only
when it ends. Requests that need text, as for stop strings, go through vLLM's own step.

Source: ``vllm.v1.engine.llm_engine.LLMEngine.step``, 0.26 to 0.32.
"""

import contextlib
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl_recipes.rollout.interface import Completions, GoOn, Profiler, Snapshot, Turn
from qerl_vllm_plugin.noise import seed_of

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator, PartialState
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from qerl_recipes.recipe.configs import GRPOConfig


class Completion(NamedTuple):
    """Hold the id and the natural log-probability of each token; NaN or None is a value that vLLM does not know."""

    ids: list[int]
    logprobs: list[float | None]


class Ended(NamedTuple):
    """Hold a completion that has ended, the number of its request, and whether its tokens ran out."""

    number: int
    completion: Completion
    is_cut: bool


class Request(NamedTuple):
    """Hold a prompt, the seed of its completion, and the most tokens that the completion may have."""

    prompt: list[int]
    seed: int
    max_tokens: int

    def limits(self, parameters: Mapping[str, Any]) -> dict[str, int]:
        """Return what replaces the recipe's sampling ``parameters`` here; ``min_tokens`` fits into ``max_tokens``."""
        limits = {"max_tokens": self.max_tokens, "seed": self.seed}
        fewest = parameters.get("min_tokens")
        return {**limits, "min_tokens": min(fewest, self.max_tokens)} if fewest else limits


# From the numbers of requests that have ended, and their completions, to further requests, which are numbered on.
Follow = Callable[[list[tuple[int, Completion]]], list[Request]]


def completion_seed(run_seed: int, phase: str, rollout: int, call: int, prompt: int, sample: int, turn: int = 0) -> int:
    """Return the seed of one completion: different for each, and the same in a resumed run.

    ``call`` counts the batches of this rollout. ``prompt`` is the prompt's index in its batch over all ranks, and
    ``sample`` the completion's among those of its prompt.
    """
    return seed_of(run_seed, phase, rollout, call, prompt, sample, *([turn] if turn else []))


class Seeds:
    """Draw the seeds of the rollout or evaluation that is open."""

    def __init__(self, run_seed: int) -> None:
        self._run_seed, self._is_held = run_seed, False
        self.open("train", 0)

    def open(self, phase: str, rollout: int) -> None:
        """Start the seeds of this rollout anew. An evaluation is always rollout 0."""
        self._phase, self._rollout, self._call, self._turn = phase, rollout, 0, 0

    def draw(self, first: int, count: int, num_generations: int) -> list[int]:
        """Return the seeds of ``count`` completions from index ``first`` on; inside ``one_batch`` of its next turn."""
        if self._turn == 0:
            self._first, self._num_generations = first, num_generations
        seeds = [self.of(place, self._turn) for place in range(count)]
        if self._is_held:
            self._turn += 1
        else:
            self._call += 1
        return seeds

    def of(self, place: int, turn: int) -> int:
        """Return the seed of a turn of the completion at ``place`` among this process's of the batch drawn last."""
        prompt, sample = divmod(self._first + place, self._num_generations)
        return completion_seed(self._run_seed, self._phase, self._rollout, self._call, prompt, sample, turn)

    @contextlib.contextmanager
    def one_batch(self) -> Iterator[None]:
        """Count what is drawn inside as turns of one batch; processes may take different numbers of turns."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held, self._turn = False, 0
            self._call += 1


class SeededRollouts(ABC):
    """Give each completion a seed of its own, and count tokens and seconds; the base of both built-in engines."""

    longest: int  # the most tokens of a sequence

    def __init__(
        self,
        base: str,
        training: "GRPOConfig",
        *,
        rank: int,
        dtype: "torch.dtype",
        snapshot: Callable[[], Snapshot],
        accelerator: "Accelerator | PartialState",
    ) -> None:
        self._training, self._snapshot, self._accelerator = training, snapshot, accelerator
        self._seeds = Seeds(training.seed)
        self.tokens, self.seconds = 0, 0.0  # both since the last begin
        self._start(base, rank, dtype)

    @abstractmethod
    def _start(self, base: str, rank: int, dtype: "torch.dtype") -> None:
        """Start the engine, which ``rollout.interface.StartEngine`` describes."""

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Profiler = None
    ) -> Completions:
        """Return one completion for each of ``prompts``, with log-probabilities after all processing of the logits."""
        if images is not None:
            raise ValueError("this policy reads text only; remove the image columns from the data set")
        seeds = self._seeds.draw(self._accelerator.process_index * len(prompts), len(prompts), num_generations)
        most = self._training.max_completion_length or self.longest
        requests = [self._request(prompt, seed, most) for prompt, seed in zip(prompts, seeds, strict=True)]
        completions = self._complete(requests, profiler)
        self.tokens += sum(len(completion.ids) for completion in completions)
        # TRL takes each log-probability in a list of its own, and leaves out a token whose value is None
        logprobs = [[[_known(value)] for value in completion.logprobs] for completion in completions]
        return [list(prompt) for prompt in prompts], [completion.ids for completion in completions], logprobs, None

    def episodes(self) -> AbstractContextManager[None]:
        """Count all that is drawn inside as turns of one batch (``rollout.interface.TakesTurns``)."""
        return self._seeds.one_batch()

    def play(self, turns: Sequence[Turn], go_on: GoOn, num_generations: int = 1, profiler: Profiler = None) -> None:
        """Take turns (``rollout.interface.TakesTurns``) without timing ``go_on``; raise as ``generate`` does."""
        if turns and turns[0].number == 0:
            self._seeds.draw(self._accelerator.process_index * len(turns), len(turns), num_generations)
        asked: list[Turn] = []

        def requests(turns: Sequence[Turn]) -> list[Request]:
            asked.extend(turns)
            return [self._request(turn.tokens, self._seeds.of(turn.place, turn.number), turn.most) for turn in turns]

        def follow(ended: list[tuple[int, Completion]]) -> list[Request]:
            began = time.perf_counter()
            self.tokens += sum(len(completion.ids) for _, completion in ended)
            taken = [(asked[number], (ids, list(map(_known, logprobs)))) for number, (ids, logprobs) in ended]
            following = requests(go_on(sorted(taken, key=lambda one: one[0].place)))
            self.seconds -= time.perf_counter() - began
            return following

        self._complete(requests(turns), profiler, follow)

    @abstractmethod
    def _complete(self, requests: list[Request], profiler: Profiler, follow: Follow | None = None) -> list[Completion]:
        """Return the completion of each request, inside ``_timed(profiler)``; with ``follow`` only make them."""

    def _open(self, rollout: int) -> None:
        self._seeds.open("train", rollout)
        self.tokens, self.seconds = 0, 0.0

    def _request(self, prompt: list[int], seed: int, most: int) -> Request:
        room = self.longest - len(prompt)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer in the {self.longest} that the engine "
                "holds; use max_prompt_length, or raise vllm_max_model_length, and --max-model-len of a server"
            )
        return Request(prompt, seed, min(most, room))

    @contextlib.contextmanager
    def _timed(self, profiler: Profiler) -> Iterator[None]:
        began = time.perf_counter()
        with profiler or contextlib.nullcontext():
            yield
        self.seconds += time.perf_counter() - began


def _known(logprob: float | None) -> float | None:
    return None if logprob is None or math.isnan(logprob) else logprob


def generate(
    llm: "LLM",
    prompts: Sequence[list[int]],
    sampling: "Sequence[SamplingParams]",
    lora_request: Any,
    follow: "Callable[[list[Ended]], Sequence[tuple[list[int], SamplingParams]]] | None" = None,
) -> list[Completion]:
    """Return one completion for each of ``prompts`` (token ids), sampled by its entry of ``sampling``.

    ``follow`` gets the completions that a step of the engine has ended, and what it returns enters the next step:
    tokens alone decide what is computed together. Its completions are returned after the others. Each entry must have
    ``logprobs=0`` or None; if any needs text, all must have ``flat_logprobs``. Raises RuntimeError if vLLM aborts a
    sequence, or returns other than one log-probability a token; the engine is left without requests.
    """
    engine, parameters = llm.llm_engine, list["SamplingParams"]()
    found, number_of = dict[str, Completion](), dict[str, int]()
    take = step_with_text if any(one.detokenize for one in sampling) else step

    def add(prompts: Sequence[list[int]], sampling: "Sequence[SamplingParams]") -> None:
        requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        names = llm.enqueue(requests, list(sampling), lora_request=lora_request, use_tqdm=False)
        number_of.update(zip(names, itertools.count(len(number_of)), strict=False))
        found.update((name, Completion([], [])) for name in names)
        parameters.extend(sampling)

    try:
        if prompts:
            add(prompts, sampling)
        while engine.has_unfinished_requests():
            ended = []
            for name, is_cut in take(engine, found):
                number, (ids, values) = number_of[name], found[name]
                if parameters[number].logprobs is None:
                    values.extend([None] * len(ids))
                if len(values) != len(ids):
                    raise RuntimeError(f"vLLM gave {len(values)} log probabilities for {len(ids)} tokens")
                ended.append(Ended(number, found[name], is_cut))
            if ended and follow is not None and (following := follow(sorted(ended))):
                add(*zip(*following, strict=True))
    except BaseException:
        engine.abort_request(list(found), internal=True)
        raise
    return list(found.values())


def step(engine: "LLMEngine", completions: Mapping[str, Completion]) -> list[tuple[str, bool]]:
    """Run one step of the engine and append its tokens to ``completions``.

    Returns the names of those that have ended, each with whether its tokens ran out. ``completions`` must
    hold every request that the engine works on. None of them may need text (``detokenize``). The engine records no
    statistics of the step. Raises RuntimeError if vLLM aborts a sequence.
    """
    outputs = engine.engine_core.get_output().outputs
    ended = []
    for output in outputs:
        completion, tokens = completions[output.request_id], output.new_token_ids
        completion.ids.extend(tokens)
        if tokens and output.new_logprobs is not None:  # the sampled token's value is first in its row
            completion.logprobs.extend(output.new_logprobs.logprobs[: len(tokens), 0].tolist())
        if output.finish_reason is not None:
            ended.append(output)
    if ended:
        engine.output_processor.process_outputs(ended)
    return _whole([(output.request_id, str(output.finish_reason)) for output in ended])


def step_with_text(engine: "LLMEngine", completions: Mapping[str, Completion]) -> list[tuple[str, bool]]:
    """Run one step as ``step`` does, of requests that may need text."""
    names = {name.partition("-")[0]: name for name in completions}  # vLLM appends letters to the number it has given
    ended = []
    for output in engine.step():
        if output.finished:
            (sequence,), name = output.outputs, names[output.request_id]
            completions[name].ids.extend(sequence.token_ids)
            completions[name].logprobs.extend(sequence.logprobs.logprobs if sequence.logprobs is not None else ())
            ended.append((name, str(sequence.finish_reason)))
    return _whole(ended)


def _whole(ended: Sequence[tuple[str, str]]) -> list[tuple[str, bool]]:
    """Return which of the sequences that ended were cut by their length; raise RuntimeError for one given up."""
    if given_up := [reason for _, reason in ended if reason not in ("stop", "length")]:
        raise RuntimeError(f"vLLM gave {len(given_up)} sequences up, the first with {given_up[0]}")
    return [(name, reason == "length") for name, reason in ended]
