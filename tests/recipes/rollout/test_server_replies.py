"""Test how a run handles a server's state and its replies, without a server."""

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.recipe.server_keys import IN_A_REQUEST
from qerl_recipes.rollout import server
from qerl_recipes.rollout.interface import Snapshot, Turn
from qerl_recipes.rollout.sampling import Completion
from qerl_recipes.rollout.server import Request, read
from qerl_recipes.rollout.server_link import AnotherPolicyError, Needs, Pushed, ServerLostError, ServerRefusedError

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
        ({"dtype": "float16"}, "its dtype is float16; start it with --dtype bfloat16"),
        (
            {"logprobs_mode": "raw_logprobs"},
            "its logprobs_mode is raw_logprobs; start it with --logprobs-mode processed_logprobs",
        ),
        ({"quantization": None}, "its quantization is None; start it with --quantization qerl_nvfp4"),
        ({"speculative": "eagle"}, r"it drafts by a second model \(eagle\).*; start it without --speculative-config"),
        (
            {"speculative": "ngram"},
            r"it drafts \(ngram\), and vLLM does not apply min_p to drafts; remove that, or",
        ),
        ({"carrier": "lora"}, "it has no resident adapter; start it with --additional-config"),
    ],
)
def test_a_server_that_does_not_fit_is_named_with_the_way_out(change, text):
    needs = Needs("/models/a", "0" * 64, rank=4, dtype="bfloat16", tokens=64, undrafted="min_p")
    assert needs.lacking(FITTING) == replace(needs, undrafted="").lacking({**FITTING, "speculative": "ngram"}) == []
    (line,) = needs.lacking({**FITTING, **change})
    assert re.match(text, line)
    without = {key: value for key, value in FITTING.items() if key != "logprobs_mode"}
    assert "of an earlier release" in needs.lacking(without)[0]


REQUEST = Request([5, 6], 1, 3)
CHOICE = {"token_ids": [7, 8, 9], "logprobs": {"token_logprobs": [-1.5, -0.25, None]}, "finish_reason": "length"}


@pytest.mark.parametrize(
    ("change", "served", "error", "text"),
    [
        ({}, "3", AnotherPolicyError, "the server used policy version 3, and this run pushed 4"),
        ({}, "3-4", AnotherPolicyError, "the server used policy version 3-4, and this run pushed 4"),
        ({}, "14", AnotherPolicyError, "version 14"),
        ({}, None, AnotherPolicyError, "stale completion: the server used policy version unknown"),
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
def test_a_reply_to_another_request_is_refused(change, served, error, text):
    assert read(CHOICE, "4", REQUEST, 4).logprobs == [-1.5, -0.25, None]
    with pytest.raises(error, match=text):
        read({**CHOICE, **change}, served, REQUEST, 4)


def test_a_request_carries_what_vllm_reads_there():
    from vllm import SamplingParams
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    assert set(CompletionRequest.model_fields) >= IN_A_REQUEST
    assert set(SamplingParams.__struct_fields__) >= IN_A_REQUEST


PROMPTS = [[5, 6, 7]] * 4


class Line:
    """Stand in for ServerLink: the server is there at once, and is another one after ``restart``."""

    url, api_key, login, timeout, tokens = "http://the-server", None, None, 2.5, 64

    def __init__(self, *given, **named):
        self.starts = 0

    def push(self, policy, noise):
        return Pushed(1, "hash", noise, 0, str(self.starts), 1)

    def restart(self):
        self.starts += 1

    def settle(self, pushed, policy):
        return self.push(policy, pushed.noise)

    def watch(self, pushed, every):
        raise AssertionError("nobody asks")

    def lost(self, reason):
        return ServerLostError(reason)


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Return ask(reply), which returns the completions of a rollout.

    For each request, ``reply(line, places)`` returns the answers by place and what failed. ``ask.places`` are the
    places asked for, and ``ask.clock`` is the time of the rollouts. With ``go_on`` they are turns.
    """
    monkeypatch.setattr(server, "ServerLink", Line)
    training = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=4)
    policy, accelerator = Snapshot({}, {}, None), PartialState(cpu=True)
    options = {"rank": 4, "dtype": torch.bfloat16, "snapshot": lambda: policy, "accelerator": accelerator}
    rollouts = server.ServerRollouts("base", training, **options)
    rollouts.begin(0, None)

    def call(reply, go_on=None):
        async def one_request(requests, version, watch):
            further = requests
            while further:
                call.places.append(list(further))
                assert len(call.places) < 20, "for ever"
                replies, failure = reply(rollouts._link, list(further))
                answered = {place: Completion(ids, [-1.0] * len(ids)) for place, ids in replies.items()}
                further = (yield answered) if answered else {}
            yield failure

        monkeypatch.setattr(rollouts._client, "complete", one_request)
        if go_on is None:
            return rollouts.generate(prompts=PROMPTS, images=None, num_generations=4)[1]
        with rollouts.episodes():
            rollouts.play([Turn(ids, place, 0, 9) for place, ids in enumerate(PROMPTS)], go_on, 4)

    call.places, call.clock = [], 0.0
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: call.clock))
    return call


def test_what_a_broken_connection_left_out_is_asked_alone(ask):
    def reply(line, places):
        return {place: [place] for place in places[:2]}, ConnectionError("cut") if len(places) > 2 else None

    assert ask(reply) == [[0], [1], [2], [3]]
    assert ask.places == [[0, 1, 2, 3], [2, 3]]


def test_completions_from_before_a_restart_are_not_taken(ask):
    """Drop them, because the restarted server may have sent them before it had the policy and the noise."""

    def reply(line, places):
        if line.starts == 0:
            line.restart()
            return {0: [1], 1: [1]}, ConnectionError("cut")
        return {place: [2] for place in places}, None

    assert ask(reply) == [[2]] * 4
    assert ask.places == [[0, 1, 2, 3]] * 2


def test_turns_that_have_been_followed_are_not_asked_again(ask):
    """Check a restart under the turns of episodes: what came before is taken, and its tools have been called."""
    taken = []

    def go_on(ended):
        taken.extend((turn.place, turn.number, ids) for turn, (ids, _) in ended)
        return [Turn([*turn.tokens, *ids], turn.place, 1, 9) for turn, (ids, _) in ended if turn.number == 0]

    def reply(line, numbers):
        if numbers == [4] and line.starts == 0:  # the later turn of what came first
            line.restart()
            return {4: [8]}, None
        return {number: [number] for number in (numbers if line.starts else numbers[:1])}, None

    ask(reply, go_on)
    assert ask.places == [[0, 1, 2, 3], [4], [1, 2, 3, 4], [5, 6, 7]]
    assert taken == [(0, 0, [0]), (0, 1, [4]), *((n, 0, [n]) for n in (1, 2, 3)), *((n - 4, 1, [n]) for n in (5, 6, 7))]


def test_tools_may_run_a_loop_of_their_own(ask):
    seen = []

    async def look():
        seen.append(asyncio.get_running_loop())

    def reply(line, numbers):
        return {number: [7] for number in numbers}, None

    ask(reply, lambda ended: asyncio.run(look()) or ())
    assert len(seen) == 1


def test_the_timeout_is_counted_from_the_last_answer(ask):
    def reply(line, places):
        ask.clock += 1.0
        return ({places[0]: [9]} if len(ask.places) <= 3 else {}), ConnectionError("cut")

    with pytest.raises(ServerLostError, match=r"is up and does not answer \(cut\)"):
        ask(reply)
    assert (len(ask.places), ask.clock) == (6, 6.0), "3 s after the third and last answer, of 2.5"


def test_a_reply_of_another_policy_ends_the_run_at_once(ask):
    with pytest.raises(AnotherPolicyError, match="of version 3"):
        ask(lambda line, places: ({}, AnotherPolicyError("of version 3")))
    assert len(ask.places) == 1
