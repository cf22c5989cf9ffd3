"""Completions as a trainer needs them: token ids, and the log-probability that each was sampled with.

``LLM.generate`` hands every token of every sequence to code that could decode it, keeps ranks and ends of lists beside
it, and makes no use of either before the sequence ends. A decode step on a GPU waits for that code. So the answers of
vLLM's engine core are taken from it step by step, and its processing of outputs sees a sequence when it ends, to forget
it. Where text is asked for, as for stop strings, nothing else than ``LLM.generate`` will do.

Source: ``vllm.v1.engine.llm_engine.LLMEngine.step``, 0.26 to 0.32.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.engine import FinishReason

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine


class Answer(NamedTuple):
    """One completion; of each token its id and, one for each, its log-probability (natural; nan: none is known)."""

    ids: list[int]
    logprobs: list[float]


def generate(
    llm: "LLM", prompts: Sequence[list[int]], sampling: "Sequence[SamplingParams]", lora_request: Any
) -> list[Answer]:
    """One answer for each of ``prompts`` (token ids), sampled as its ``sampling`` says, with ``logprobs`` 0.

    Raises RuntimeError where vLLM gives up a sequence, or has not one log-probability for each token.
    """
    requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    if any(one.detokenize for one in sampling):
        outputs = llm.generate(requests, list(sampling), lora_request=lora_request, use_tqdm=False)
        found = [Answer(list(of.outputs[0].token_ids), list(of.outputs[0].logprobs.logprobs)) for of in outputs]
    else:
        engine = llm.llm_engine
        names = llm.enqueue(requests, list(sampling), lora_request=lora_request, use_tqdm=False)
        answers = expected(names)
        while engine.has_unfinished_requests():
            step(engine, answers)
        found = list(answers.values())
    for answer in found:
        if len(answer.logprobs) != len(answer.ids):
            raise RuntimeError(f"vLLM gave {len(answer.logprobs)} log probabilities for {len(answer.ids)} tokens")
    return found


def expected(names: Sequence[str]) -> dict[str, Answer]:
    """An empty answer for each request, in their order, by the names that ``LLM.enqueue`` gave them."""
    return {name: Answer([], []) for name in names}


def step(engine: "LLMEngine", answers: Mapping[str, Answer]) -> None:
    """One step of the engine; its tokens join ``answers`` (``expected``), which has all sequences that it works on.

    None of them may want text (``detokenize``), and the engine keeps no statistics of the step.
    Raises RuntimeError for a sequence that vLLM gives up.
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
