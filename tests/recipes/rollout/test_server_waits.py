"""What rollouts do about answers that a server owes: kept, asked for again, or given up. None owes any on demand."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.rollout import server
from qerl_recipes.rollout.interface import Snapshot
from qerl_recipes.rollout.server_answers import Answer
from qerl_recipes.rollout.server_state import AnotherPolicyError, Pushed, ServerLostError

PROMPTS = [[5, 6, 7]] * 4


class Line:
    """In place of ServerLink: a server that is there at once, and is another one after ``restart``."""

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
    """ask(reply) -> the completions of a rollout of which ``reply(line, places)`` gives, for each request, the answers
    by place and what failed; ``ask.places`` were asked for, ``ask.clock`` is the time of the rollouts."""
    monkeypatch.setattr(server, "ServerLink", Line)
    training = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=4)
    policy, accelerator = Snapshot({}, {}, None), PartialState(cpu=True)
    options = {"rank": 4, "dtype": torch.bfloat16, "snapshot": lambda: policy, "accelerator": accelerator}
    rollouts = server.ServerRollouts("base", training, **options)
    rollouts.begin(0, None)

    def call(reply):
        def one_request(questions, answers, version, watch):
            call.places.append(list(questions))
            assert len(call.places) < 20, "for ever"
            found, failure = reply(rollouts._link, list(questions))
            answers.update({place: Answer(ids, [-1.0] * len(ids)) for place, ids in found.items()})
            return failure

        monkeypatch.setattr(rollouts._questions, "ask", one_request)
        return rollouts.generate(prompts=PROMPTS, images=None, num_generations=4)[1]

    call.places, call.clock = [], 0.0
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: call.clock, perf_counter=lambda: call.clock))
    return call


def test_what_a_broken_connection_left_out_is_asked_for_alone(ask):
    def reply(line, places):
        return {place: [place] for place in places[:2]}, ConnectionError("cut") if len(places) > 2 else None

    assert ask(reply) == [[0], [1], [2], [3]]
    assert ask.places == [[0, 1, 2, 3], [2, 3]]


def test_after_a_restart_the_answers_from_before_it_are_not_taken(ask):
    """They may have come from the server that was started again, before it had the policy and the noise."""

    def reply(line, places):
        if line.starts == 0:
            line.restart()
            return {0: [1], 1: [1]}, ConnectionError("cut")
        return {place: [2] for place in places}, None

    assert ask(reply) == [[2]] * 4
    assert ask.places == [[0, 1, 2, 3]] * 2


def test_the_timeout_is_counted_from_the_last_answer(ask):
    def reply(line, places):
        ask.clock += 1.0
        return ({places[0]: [9]} if len(ask.places) <= 3 else {}), ConnectionError("cut")

    with pytest.raises(ServerLostError, match=r"is up and does not answer \(cut\)"):
        ask(reply)
    assert (len(ask.places), ask.clock) == (6, 6.0), "3 s after the third and last answer, of 2.5"


def test_an_answer_of_another_policy_ends_the_run_at_once(ask):
    with pytest.raises(AnotherPolicyError, match="of version 3"):
        ask(lambda line, places: ({}, AnotherPolicyError("of version 3")))
    assert len(ask.places) == 1
