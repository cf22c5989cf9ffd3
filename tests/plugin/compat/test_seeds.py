"""Test seeded requests with chunked prefill on a CPU. Their answers must equal those of prompts that are computed at
once."""

import pytest

PROMPTS = [[(5 * i + j) % 60 + 2 for i in range(length)] for j, length in enumerate((100, 7, 61))]


@pytest.fixture(scope="module")
def engines(boot, make_nvfp4):
    """Start an engine that computes every prompt at once, and one that computes 16 tokens a step."""
    options = {"max_model_len": 256, "dtype": "float32"}
    return [boot(make_nvfp4("qwen2"), max_num_batched_tokens=tokens, **options) for tokens in (256, 16)]


def sampled(llm, *, first_seed=11, put_back_at=(), **changes):
    """Return the tokens of the seeded prompts; the last prompt has no seed. Before each step in ``put_back_at`` the
    running requests are preempted and lose what was computed, as in a swap under "keep"."""
    from vllm import SamplingParams

    engine, outputs, step = llm.llm_engine, {}, 0
    for i, prompt in enumerate(PROMPTS):
        seed = None if prompt is PROMPTS[-1] else first_seed + i
        sampling = SamplingParams(max_tokens=20, seed=seed, ignore_eos=True, **changes)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        if step in put_back_at:
            assert llm.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            outputs[output.request_id] = output.outputs[0].token_ids
        step += 1
    assert len(outputs["2"]) == 20
    return outputs["0"], outputs["1"]


def test_a_seeded_answer_is_the_same_however_its_prompt_is_cut(engines):
    (whole, cut), changes = engines, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    expected = sampled(whole, **changes)
    assert expected != sampled(whole, first_seed=50, **changes), "nothing is drawn"
    assert sampled(cut, **changes) == expected
    assert sampled(cut, put_back_at=(3, 14, 20, 30), **changes) == expected
    assert sampled(whole, put_back_at=(2, 9), **changes) == expected
