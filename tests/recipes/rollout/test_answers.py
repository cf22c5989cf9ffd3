"""Answers taken from the engine core are those of ``LLM.generate``, to the bit, and cost nothing that nobody reads."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from qerl_recipes.bench import random_model
from qerl_recipes.recipe.shapes import config_json
from qerl_recipes.rollout import answers
from qerl_recipes.rollout.answers import Answer

PROMPTS = [[5 + row, 9, 7 * row + 2, 11] for row in range(12)]


@pytest.fixture(scope="module")
def llm(classes_looked_at_here: None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = random_model.start(config_json("tiny"), length=64, sequences=5, logprobs_mode="processed_logprobs")
    yield llm
    llm.llm_engine.engine_core.shutdown()


def sampling(**changes: Any) -> list[SamplingParams]:
    """Completions of many lengths, the first ones the longest; some end with a token that ends them."""
    fields: dict[str, Any] = {
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
        "top_k": 12,
        "temperature": 0.8,
    }
    fields |= {"stop_token_ids": list(range(2, 20))} | changes
    return [SamplingParams(max_tokens=40 - 3 * row, seed=row, **fields) for row in range(len(PROMPTS))]


def counted(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of vLLM's processing of outputs was given."""
    processor, seen = llm.llm_engine.output_processor, []
    process = processor.process_outputs

    def note(outputs: list[Any], *more: Any, **keywords: Any) -> Any:
        seen.append(sum(len(output.new_token_ids) for output in outputs))
        return process(outputs, *more, **keywords)

    monkeypatch.setattr(processor, "process_outputs", note)
    return seen


def test_they_are_those_of_generate_and_in_its_order(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling(), use_tqdm=False)
    expected = [Answer(list(o.outputs[0].token_ids), list(o.outputs[0].logprobs.logprobs)) for o in outputs]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "length"}
    seen = counted(llm, monkeypatch)
    assert answers.generate(llm, PROMPTS, sampling(), None) == expected
    assert sum(seen) == len(PROMPTS) < sum(len(answer.ids) for answer in expected) / 5  # a token each, its last one
    assert answers.generate(llm, PROMPTS[::-1], sampling()[::-1], None) == expected[::-1]
    other = [SamplingParams(max_tokens=9, seed=99, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False)]
    assert answers.generate(llm, PROMPTS[:1], other, None) != expected[:1]


def test_nothing_is_left_behind(llm: Any) -> None:
    answers.generate(llm, PROMPTS, sampling(), None)
    processor = llm.llm_engine.output_processor
    assert not llm.llm_engine.has_unfinished_requests() and not processor.external_req_ids
    assert len(llm.generate({"prompt_token_ids": [3, 4]}, sampling()[0], use_tqdm=False)) == 1


def test_more_log_probabilities_than_one_are_not_taken_for_the_sampled_one(llm: Any) -> None:
    alone = answers.generate(llm, PROMPTS, sampling(), None)
    assert answers.generate(llm, PROMPTS, sampling(logprobs=3), None) == alone


def test_a_token_without_a_log_probability_is_an_error(llm: Any) -> None:
    with pytest.raises(RuntimeError, match=r"vLLM gave 0 log probabilities for \d+ tokens"):
        answers.generate(llm, PROMPTS, sampling(logprobs=None, flat_logprobs=False), None)


def output(name: str, ids: list[int], values: list[float], reason: FinishReason | None = None) -> EngineCoreOutput:
    table = np.array([[value, 0.5] for value in values], dtype=np.float32)  # the sampled token's, the likeliest one's
    lists = LogprobsLists(np.zeros(table.shape, int), table, np.zeros(len(values), int))
    return EngineCoreOutput(request_id=name, new_token_ids=ids, new_logprobs=lists, finish_reason=reason)


def made_up(*steps: list[EngineCoreOutput]) -> Any:
    coming = [EngineCoreOutputs(outputs=one) for one in steps]
    processor = SimpleNamespace(process_outputs=lambda outputs: None)
    return SimpleNamespace(output_processor=processor, engine_core=SimpleNamespace(get_output=lambda: coming.pop(0)))


def test_steps_may_bring_nothing_and_several_tokens() -> None:
    """Scheduling ahead of the GPU gives an empty step first; speculation several tokens at once, with more rows."""
    found = {"a": Answer([], []), "b": Answer([], [])}
    engine = made_up(
        [],
        [output("b", [4, 5], [-1.0, -2.0, -9.0]), output("a", [7], [-0.25])],
        [output("a", [8], [-0.75], FinishReason.LENGTH)],
    )
    for _ in range(3):
        answers.step(engine, found)
    assert found == {"a": Answer([7, 8], [-0.25, -0.75]), "b": Answer([4, 5], [-1.0, -2.0])}


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_sequence_that_vllm_gives_up_is_an_error(reason: FinishReason) -> None:
    engine = made_up([output("a", [7], [-0.25], FinishReason.STOP), output("b", [], [], reason)])
    with pytest.raises(RuntimeError, match=f"gave 1 sequences up, the first with {reason}"):
        answers.step(engine, {"a": Answer([], []), "b": Answer([], [])})
