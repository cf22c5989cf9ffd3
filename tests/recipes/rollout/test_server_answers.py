"""What a run asks of a server and reads from its answers, without a server."""

import re

import pytest

from qerl_recipes.recipe.checks import IN_A_REQUEST
from qerl_recipes.rollout.server_answers import Question, read
from qerl_recipes.rollout.server_state import AnotherPolicyError, Needs, ServerRefusedError

FITTING = {
    "base": "/models/a",
    "base_hash": "0" * 64,
    "carrier": "resident",
    "max_rank": 4,
    "quantization": "qerl_nvfp4",
    "dtype": "bfloat16",
    "logprobs_mode": "processed_logprobs",
    "max_model_len": 64,
    "changes": 1,
    "paused": False,
    "speculative": None,
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "float16"}, "it computes in float16, not in bfloat16; start it with --dtype bfloat16"),
        (
            {"logprobs_mode": "raw_logprobs"},
            "its log-probabilities are raw_logprobs, .*; start it with --logprobs-mode processed_logprobs",
        ),
        ({"quantization": None}, "its quantization is None; start it with --quantization qerl_nvfp4"),
        ({"speculative": "ngram"}, r"it decodes speculatively \(ngram\).*; start it without --speculative-config"),
        ({"carrier": "lora"}, "it has no resident adapter; start it with --additional-config"),
    ],
)
def test_what_a_server_computes_otherwise_is_named_with_the_way_out(change, text):
    needs = Needs("/models/a", "0" * 64, rank=4, dtype="bfloat16", tokens=64)
    assert needs.lacking(FITTING) == []
    (line,) = needs.lacking({**FITTING, **change})
    assert re.match(text, line)
    without = {key: value for key, value in FITTING.items() if key != "logprobs_mode"}
    assert "of an earlier release" in needs.lacking(without)[0]


QUESTION = Question([5, 6], 1, 3)
CHOICE = {"token_ids": [7, 8, 9], "logprobs": {"token_logprobs": [-1.5, -0.25, None]}, "finish_reason": "length"}


def test_an_answer_is_read_with_what_it_lacks():
    assert read(CHOICE, "4", QUESTION, 4).logprobs == [-1.5, -0.25, None]


@pytest.mark.parametrize(
    ("change", "served", "error", "text"),
    [
        ({}, "3", AnotherPolicyError, "an answer is of policy version 3, and 4 was pushed"),
        ({}, "3-4", AnotherPolicyError, "an answer is of policy version 3-4, and 4"),
        ({}, "14", AnotherPolicyError, "version 14"),
        ({}, None, AnotherPolicyError, "an answer is of policy version unknown"),
        ({"finish_reason": "abort"}, "4", AnotherPolicyError, r"broken off by the server \(abort\)"),
        ({"token_ids": None}, "4", ServerRefusedError, "None token ids and 3 log-probabilities"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, "4", ServerRefusedError, "3 token ids and 1 log-probabilities"),
        ({"logprobs": None}, "4", ServerRefusedError, "3 token ids and None log-probabilities"),
        ({"prompt_token_ids": [6]}, "4", ServerRefusedError, "changed a prompt"),
        (
            {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}},
            "4",
            ServerRefusedError,
            "cut a completion after 1 of 3 tokens: .* --generation-config vllm",
        ),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(change, served, error, text):
    with pytest.raises(error, match=text):
        read({**CHOICE, **change}, served, QUESTION, 4)


def test_what_a_request_can_carry_is_what_vllm_reads_there():
    from vllm import SamplingParams
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    assert set(CompletionRequest.model_fields) >= IN_A_REQUEST
    assert set(SamplingParams.__struct_fields__) >= IN_A_REQUEST
