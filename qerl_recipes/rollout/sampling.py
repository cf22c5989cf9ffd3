"""Sample completions: what both built-in engines share, and the quick way to a vLLM in this process.

``LLM.generate`` processes every token of every sequence in Python, for decoding and for ranks and ends of lists. None
of that is used before the sequence ends, and a decode step on a GPU waits for it. ``generate`` reads the outputs of
vLLM's engine core step by step instead. vLLM's output processor sees a sequence only when it ends, to drop it. Requests
that need text, as for stop strings, still go through ``LLM.generate``.

Source: ``vllm.v1.engine.llm_engine.LLMEngine.step``, 0.26 to 0.32.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl_recipes.rollout.interface import Completions, Snapshot
from qerl_vllm_plugin.noise import seed_of

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from qerl_recipes.recipe.configs import GRPOConfig


class Completion(NamedTuple):
    """Hold the id and the natural log-probability of each token; NaN or None is a value that vLLM does not know."""

    ids: list[int]
    logprobs: list[float | None]


def completion_seed(run_seed: int, phase: str, rollout: int, call: int, prompt: int, sample: int) -> int:
    """Return the seed of one completion: different for each, and the same in a resumed run.

    ``phase`` is ``train``, ``evaluation`` or ``calibration``. ``call`` counts the batches of this rollout, since
    dynamic sampling draws several. ``prompt`` is the prompt's index in its batch over all ranks, and ``sample`` is the
    completion's index among those of its prompt.
    """
    return seed_of(run_seed, phase, rollout, call, prompt, sample)


class Seeds:
    """Draw the seeds of the rollout or evaluation that is open."""

    def __init__(self, run_seed: int) -> None:
        self._run_seed = run_seed
        self.open("train", 0)

    def open(self, phase: str, rollout: int) -> None:
        """Start the seeds of this rollout anew. An evaluation is always rollout 0."""
        self._phase, self._rollout, self._call = phase, rollout, 0

    def draw(self, first: int, count: int, num_generations: int) -> list[int]:
        """Return this process's seeds of the next batch: its ``count`` completions start at index ``first``."""
        key = (self._run_seed, self._phase, self._rollout, self._call)
        self._call += 1
        places = range(first, first + count)
        return [completion_seed(*key, place // num_generations, place % num_generations) for place in places]


class SeededRollouts:
    """Give each completion a seed of its own, and count tokens and seconds; the base of both built-in engines."""

    def __init__(
        self,
        training: "GRPOConfig",
        snapshot: Callable[[], Snapshot],
        accelerator: "Accelerator | PartialState",
    ) -> None:
        self._training, self._snapshot, self._accelerator = training, snapshot, accelerator
        self._seeds = Seeds(training.seed)
        self.tokens, self.seconds = 0, 0.0  # both since the last begin

    def _open(self, rollout: int) -> None:
        self._seeds.open("train", rollout)
        self.tokens, self.seconds = 0, 0.0

    def _seeded(self, prompts: list[list[int]], images: Any, num_generations: int) -> list[tuple[list[int], int]]:
        """Return each prompt with the seed of its completion; raise ValueError for images."""
        if images is not None:
            raise ValueError("this policy reads text only; remove the image columns from the data set")
        first = self._accelerator.process_index * len(prompts)
        return list(zip(prompts, self._seeds.draw(first, len(prompts), num_generations), strict=True))

    @contextlib.contextmanager
    def _timed(self, profiler: AbstractContextManager[Any] | None) -> Iterator[None]:
        began = time.perf_counter()
        with profiler or contextlib.nullcontext():
            yield
        self.seconds += time.perf_counter() - began

    def _for_trl(self, prompts: list[list[int]], completions: Sequence[Completion]) -> Completions:
        """Count the tokens, and return prompts and completions as TRL takes them.

        Each log-probability is in a list of its own. TRL leaves out a token whose value is None.
        """
        ids = [completion.ids for completion in completions]
        self.tokens += sum(map(len, ids))
        logprobs = [[[_known(value)] for value in completion.logprobs] for completion in completions]
        return [list(prompt) for prompt in prompts], ids, logprobs, None


def _known(logprob: float | None) -> float | None:
    return None if logprob is None or math.isnan(logprob) else logprob


def generate(
    llm: "LLM", prompts: Sequence[list[int]], sampling: "Sequence[SamplingParams]", lora_request: Any
) -> list[Completion]:
    """Return one completion for each of ``prompts`` (token ids), sampled by its entry of ``sampling``.

    Each entry must have ``logprobs=0``; if any entry needs text, all must have ``flat_logprobs``. Raises RuntimeError
    if vLLM aborts a sequence, or returns other than one log-probability a token.
    """
    requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    if any(parameters.detokenize for parameters in sampling):
        outputs = llm.generate(requests, list(sampling), lora_request=lora_request, use_tqdm=False)
        sequences = [output.outputs[0] for output in outputs]
        completions = [Completion(list(one.token_ids), list(one.logprobs.logprobs)) for one in sequences]
    else:
        engine = llm.llm_engine
        request_ids = llm.enqueue(requests, list(sampling), lora_request=lora_request, use_tqdm=False)
        by_request = expected(request_ids)
        while engine.has_unfinished_requests():
            step(engine, by_request)
        completions = list(by_request.values())
    for completion in completions:
        values, tokens = len(completion.logprobs), len(completion.ids)
        if values != tokens:
            raise RuntimeError(f"vLLM gave {values} log probabilities for {tokens} tokens")
    return completions


def expected(request_ids: Sequence[str]) -> dict[str, Completion]:
    """Return an empty completion for each request id from ``LLM.enqueue``, in their order."""
    return {request_id: Completion([], []) for request_id in request_ids}


def step(engine: "LLMEngine", completions: Mapping[str, Completion]) -> None:
    """Run one step of the engine and append its tokens to ``completions``.

    ``completions`` (``expected``) must hold every request that the engine works on. None of them may need text
    (``detokenize``). The engine records no statistics of the step. Raises RuntimeError if vLLM aborts a sequence.
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
        from vllm.v1.engine import FinishReason

        engine.output_processor.process_outputs(ended)
        aborted = [output for output in ended if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)]
        if aborted:
            raise RuntimeError(f"vLLM gave {len(aborted)} sequences up, the first with {aborted[0].finish_reason}")
