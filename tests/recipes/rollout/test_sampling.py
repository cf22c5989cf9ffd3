"""Test seeds of completions, sampling keys, and reading completions from the engine core.

The completions must equal those of ``LLM.generate`` to the bit.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from qerl_recipes.bench import random_model
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.recipe.generation import sampling_parameters
from qerl_recipes.recipe.shapes import config_json
from qerl_recipes.rollout import sampling
from qerl_recipes.rollout.sampling import Completion, Request, Seeds, completion_seed

PROMPTS = [[5 + row, 9, 7 * row + 2, 11] for row in range(12)]


@pytest.fixture(scope="module")
def llm(light_engines: None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = random_model.start(config_json("tiny"), length=64, sequences=5, logprobs_mode="processed_logprobs")
    yield llm
    llm.llm_engine.engine_core.shutdown()


def parameters(**changes: Any) -> list[SamplingParams]:
    """Return parameters for completions of many lengths, the longest first; some end with a stop token."""
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
    """Record how many tokens each call of vLLM's process_outputs was given."""
    processor, seen = llm.llm_engine.output_processor, []
    process = processor.process_outputs

    def note(outputs: list[Any], *more: Any, **keywords: Any) -> Any:
        seen.append(sum(len(output.new_token_ids) for output in outputs))
        return process(outputs, *more, **keywords)

    monkeypatch.setattr(processor, "process_outputs", note)
    return seen


def test_completions_are_those_of_generate_in_its_order(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], parameters(), use_tqdm=False)
    expected = [Completion(list(o.outputs[0].token_ids), list(o.outputs[0].logprobs.logprobs)) for o in outputs]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "length"}
    seen = counted(llm, monkeypatch)
    assert sampling.generate(llm, PROMPTS, parameters(), None) == expected
    assert sum(seen) == len(PROMPTS) < sum(len(answer.ids) for answer in expected) / 5  # only the last token of each
    assert sampling.generate(llm, PROMPTS[::-1], parameters()[::-1], None) == expected[::-1]
    other = [SamplingParams(max_tokens=9, seed=99, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False)]
    assert sampling.generate(llm, PROMPTS[:1], other, None) != expected[:1]


def test_a_token_without_a_log_probability_is_an_error(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm.llm_engine.engine_core
    get_output = core.get_output

    def without() -> Any:
        outputs = get_output()
        for one in outputs.outputs:
            one.new_logprobs = None
        return outputs

    with monkeypatch.context() as patched:
        patched.setattr(core, "get_output", without)
        with pytest.raises(RuntimeError, match=r"vLLM gave 0 log probabilities for \d+ tokens"):
            sampling.generate(llm, PROMPTS, parameters(), None)
    assert not llm.llm_engine.has_unfinished_requests()
    asked_for_none = sampling.generate(llm, PROMPTS, parameters(logprobs=None, flat_logprobs=False), None)
    assert [{*one.logprobs} for one in asked_for_none] == [{None}] * len(PROMPTS)


@pytest.mark.parametrize("needs_text", [False, True])
def test_what_follows_enters_the_next_step_in_order(llm: Any, needs_text: bool) -> None:
    """Check a text's own way too: whatever ends together is followed together, by number, and numbered on."""
    ended: list[list[tuple[int, bool]]] = []
    keys: dict[str, Any] = {"stop_token_ids": [], "ignore_eos": True, "top_k": 12, "logprobs": 0, "flat_logprobs": True}

    def asked(number: int, tokens: int) -> tuple[list[int], SamplingParams]:
        return PROMPTS[number], SamplingParams(max_tokens=tokens, seed=number, detokenize=needs_text, **keys)

    def follow(now: list[sampling.Ended]) -> list[Any]:
        ended.append([(one.number, one.is_cut) for one in now])
        return [asked(one.number, 2) for one in now if one.number < 3]

    first = [asked(0, 3), asked(1, 9), asked(2, 3), asked(3, 9)]
    prompts, given = zip(*first, strict=True)
    found = sampling.generate(llm, prompts, given, None, follow)
    assert ended == [[(0, True), (2, True)], [(4, True), (5, True)], [(1, True), (3, True)], [(6, True)]]
    assert [len(one.ids) for one in found] == [3, 9, 3, 9, 2, 2, 2]
    assert found == sampling.generate(llm, prompts, given, None) + found[4:]


def output(name: str, ids: list[int], values: list[float], reason: FinishReason | None = None) -> EngineCoreOutput:
    table = np.array([[value, 0.5] for value in values], dtype=np.float32)  # of the sampled token, of the likeliest
    lists = LogprobsLists(np.zeros(table.shape, int), table, np.zeros(len(values), int))
    return EngineCoreOutput(request_id=name, new_token_ids=ids, new_logprobs=lists, finish_reason=reason)


def made_up(*steps: list[EngineCoreOutput]) -> Any:
    coming = [EngineCoreOutputs(outputs=one) for one in steps]
    processor = SimpleNamespace(process_outputs=lambda outputs: None)
    return SimpleNamespace(output_processor=processor, engine_core=SimpleNamespace(get_output=lambda: coming.pop(0)))


def test_steps_may_bring_nothing_and_several_tokens() -> None:
    """Check an empty step, which scheduling ahead of the GPU gives first, and several tokens in one step.

    Speculation gives several tokens at once, with extra rows.
    """
    found = {"a": Completion([], []), "b": Completion([], [])}
    engine = made_up(
        [],
        [output("b", [4, 5], [-1.0, -2.0, -9.0]), output("a", [7], [-0.25])],
        [output("a", [8], [-0.75], FinishReason.LENGTH)],
    )
    for _ in range(3):
        sampling.step(engine, found)
    assert found == {"a": Completion([7, 8], [-0.25, -0.75]), "b": Completion([4, 5], [-1.0, -2.0])}


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_sequence_that_vllm_gives_up_is_an_error(reason: FinishReason) -> None:
    engine = made_up([output("a", [7], [-0.25], FinishReason.STOP), output("b", [], [], reason)])
    with pytest.raises(RuntimeError, match=f"gave 1 sequences up, the first with {reason}"):
        sampling.step(engine, {"a": Completion([], []), "b": Completion([], [])})


def test_every_completion_has_a_seed_of_its_own():
    keys = [
        (seed, phase, rollout, call, prompt, sample)
        for seed in range(2)
        for phase in ("train", "evaluation")
        for rollout in range(3)
        for call in range(3)
        for prompt in range(4)
        for sample in range(4)
    ]
    assert len({completion_seed(*key) for key in keys}) == len(keys)
    assert completion_seed(0, "train", 1, 0, 2, 3) == 5496574601150059232  # sha256sum of 0:train:1:0:2:3


def test_a_batch_names_run_rollout_call_prompt_and_sample():
    seeds = Seeds(5)
    seeds.open("train", 3)
    assert seeds.draw(0, 4, 2) == [completion_seed(5, "train", 3, 0, p, s) for p, s in ((0, 0), (0, 1), (1, 0), (1, 1))]
    # Draw for the second of two processes, in the next round of dynamic sampling; a group may lie on both.
    assert seeds.draw(3, 3, 2) == [completion_seed(5, "train", 3, 1, p, s) for p, s in ((1, 1), (2, 0), (2, 1))]
    seeds.open("evaluation", 0)
    assert seeds.draw(0, 1, 2) == [completion_seed(5, "evaluation", 0, 0, 0, 0)]


def test_a_later_turn_has_the_seed_of_its_place_and_number():
    seeds = Seeds(5)
    seeds.open("train", 3)
    with seeds.one_batch():
        first = seeds.draw(4, 4, 2)  # of the second of two processes
        assert first == [completion_seed(5, "train", 3, 0, p, s) for p, s in ((2, 0), (2, 1), (3, 0), (3, 1))]
        assert seeds.of(1, 2) == completion_seed(5, "train", 3, 0, 2, 1, 2)
        # A rollout function asks again for fewer rows, each alone; in the other process it may not.
        assert seeds.draw(3, 3, 1) == [seeds.of(place, 1) for place in range(3)]
    assert seeds.draw(4, 1, 2) == [completion_seed(5, "train", 3, 1, 2, 0)]
    drawn = {completion_seed(5, "train", 3, call, 0, 0, turn) for call in range(4) for turn in range(4)}
    assert len(drawn) == 16


@pytest.mark.parametrize(("fewest", "expected"), [(None, {}), (0, {}), (2, {"min_tokens": 2}), (9, {"min_tokens": 3})])
def test_a_short_turn_does_not_ask_for_more_than_it_may_have(fewest, expected):
    parameters = {} if fewest is None else {"min_tokens": fewest}
    assert Request([1], 7, 3).limits(parameters) == {"max_tokens": 3, "seed": 7, **expected}


def test_every_sampling_key_has_its_name_in_vllm(tmp_path):
    keys = {"temperature": 0.7, "top_p": 0.9, "top_k": 8, "min_p": 0.02, "repetition_penalty": 1.1}
    common = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "max_completion_length": 9}
    found = sampling_parameters(GRPOConfig(**common, **keys))
    assert found == {**keys, "max_tokens": 9, "logprobs": 0}
    of_vllm = {"stop": ["x"], "min_tokens": 2}
    found = sampling_parameters(
        GRPOConfig(**common, **keys, generation_kwargs=of_vllm, vllm_structured_outputs_regex="a+")
    )
    assert found == {**keys, "max_tokens": 9, "logprobs": 0, **of_vllm, "structured_outputs": {"regex": "a+"}}
    assert sampling_parameters(GRPOConfig(**common))["min_p"] == 0.0
