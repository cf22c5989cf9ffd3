"""Generate completions for a trainer: token ids, and the log-probability that each token was sampled with.

``LLM.generate`` processes every token of every sequence in Python, for decoding and for ranks and ends of lists. None
of that is used before the sequence ends, and a decode step on a GPU waits for it. This module reads the outputs of
vLLM's engine core step by step instead. vLLM's output processor sees a sequence only when it ends, to drop it. Requests
that need text, as for stop strings, still go through ``LLM.generate``.

Source: ``vllm.v1.engine.llm_engine.LLMEngine.step``, 0.26 to 0.32.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.engine import FinishReason

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine


class Answer(NamedTuple):
    """Hold one completion: the id and the natural log-probability of each token (NaN: not known)."""

    ids: list[int]
    logprobs: list[float]


def generate(
    llm: "LLM", prompts: Sequence[list[int]], sampling: "Sequence[SamplingParams]", lora_request: Any
) -> list[Answer]:
    """Return one answer for each of ``prompts`` (token ids), sampled by its entry of ``sampling``.

    Each entry must have ``logprobs=0``; if any entry needs text, all must have ``flat_logprobs``. Raises RuntimeError
    if vLLM aborts a sequence, or returns other than one log-probability a token.
    """
    requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    if any(one.detokenize for one in sampling):
        outputs = llm.generate(requests, list(sampling), lora_request=lora_request, use_tqdm=False)
        answers = [
            Answer(list(output.outputs[0].token_ids), list(output.outputs[0].logprobs.logprobs)) for output in outputs
        ]
    else:
        engine = llm.llm_engine
        request_ids = llm.enqueue(requests, list(sampling), lora_request=lora_request, use_tqdm=False)
        by_request = expected(request_ids)
        while engine.has_unfinished_requests():
            step(engine, by_request)
        answers = list(by_request.values())
    for answer in answers:
        if len(answer.logprobs) != len(answer.ids):
            raise RuntimeError(f"vLLM gave {len(answer.logprobs)} log probabilities for {len(answer.ids)} tokens")
    return answers


def expected(request_ids: Sequence[str]) -> dict[str, Answer]:
    """Return an empty answer for each request id from ``LLM.enqueue``, in their order."""
    return {request_id: Answer([], []) for request_id in request_ids}


def step(engine: "LLMEngine", answers: Mapping[str, Answer]) -> None:
    """Run one step of the engine and append its tokens to ``answers``.

    ``answers`` (``expected``) must hold every request that the engine works on. None of them may need text
    (``detokenize``). The engine records no statistics of the step. Raises RuntimeError if vLLM aborts a sequence.
    """
    outputs = engine.engine_core.get_output().outputs
    ended = []
    for output in outputs:
        answer, tokens = answers[output.request_id], output.new_token_ids
        answer.ids.extend(tokens)
        if tokens and output.new_logprobs is not None:
            answer.logprobs.extend(output.new_logprobs.logprobs[: len(tokens), 0].tolist())  # the sampled one is first
        if output.finish_reason is not None:
            ended.append(output)
    if ended:
        engine.output_processor.process_outputs(ended)
        if given_up := [of for of in ended if of.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)]:
            raise RuntimeError(f"vLLM gave {len(given_up)} sequences up, the first with {given_up[0].finish_reason}")
