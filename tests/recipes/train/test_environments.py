"""Test training with environments as TRL has them, on the scripted engine."""

import sys
from types import SimpleNamespace

import calling
import pytest
from calling import in_turn
from digit_rewards import digits

from qerl_recipes.tasks.environment_process import in_its_own_interpreter


class Silent:
    """An environment without a reward and an observation."""

    def reset(self, **row):
        self.row = row

    def double(self, number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        return 2 * number


def walked(environments, **columns):
    return [float(one.at) for one in environments]


@pytest.mark.parametrize("reward", [None, [walked]], ids=["its own reward", "beside one that reads it"])
def test_an_environment_is_reset_for_each_episode_and_may_own_its_reward(reward, train):
    calling.Walk.made = 0
    turns, weights = {"environment_factory": calling.Walk}, [0.5] if reward else None
    trainer, records = train(
        in_turn("{move}{move}<eos>", "{move}<eos>", "7<eos>"), turns, reward or [], max_steps=2, reward_weights=weights
    )
    assert calling.Walk.made == len(trainer.environments) == 8, "instances are used again"
    assert [one.resets for one in trainer.environments] == [2] * 8
    assert {one.at for one in trainer.environments} == {6} and records[0]["rewards/Walk/mean"] == 6.0
    assert records[0]["reward"] == (9.0 if reward else 6.0), "the weights are of functions alone"
    assert set(trainer.environments[0].row) == {"prompt", "answer", "seed"}
    prompts = [request.prompt for request in trainer.vllm_generation.asked[0]]
    assert all(prompt[-2:] == calling.ids("7<assistant>") for prompt in prompts), "what reset returns is in the prompt"
    assert records[0]["turns"] == 3.0 and records[0]["tool_calls"] == 3.0


def test_an_environment_may_own_its_data(train):
    turns = {"environment_factory": calling.Walk, "train_dataset": None}
    trainer, records = train(in_turn("{move}<eos>", "7<eos>"), turns, [], max_steps=2)
    assert [record["rewards/Walk/mean"] for record in records] == [2.0, 2.0]
    assert len(trainer.train_dataset) == 2
    (prompt,) = {tuple(request.prompt) for request in trainer.vllm_generation.asked[0]}
    assert list(prompt[-3:]) == calling.ids("<user>7<assistant>"), "the prompt is what reset returns"


def test_each_row_names_its_environment(train):
    rows = calling.prompts(8)
    rows = rows.add_column("environment", ["walk", "silent", "stroll", "silent"] * 2)
    factories = {"walk": calling.Walk, "silent": Silent, "stroll": calling.Walk}
    turns = {"environment_factory": factories, "train_dataset": rows}
    say = in_turn("{move}{double 4}<eos>", "7<eos>")
    trainer, (record,) = train(say, turns, [digits], per_device_train_batch_size=32)
    assert {type(one) for one in trainer.environments} == {calling.Walk, Silent}
    assert record["rewards/Walk/mean"] == 2.0, "of its own episodes alone"
    assert trainer.reward_func_names == ["digits", "Walk"], "two names of a class have one reward"
    assert record["tool_failures"] == 0.5, "each has one of the two tools"


LOSING = '''
import os

class Losing:
    def reset(self, **row):
        self.at = 0

    def move(self, steps: int) -> str:
        """Walk.

        Args:
            steps: How far.
        """
        self.at += steps
        return str(self.at)

    def get_reward(self):
        if self.at == 2:
            os._exit(1)
        return 1.0
'''


def test_processes_lost_outside_of_tools_are_counted(train, tmp_path, monkeypatch):
    (tmp_path / "losing.py").write_text(LOSING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    turns = {"environment_factory": in_its_own_interpreter(sys.executable, "losing.Losing", {}, 20.0)}

    def say(tokens):
        is_first = tokens.count(calling.VOCABULARY.index("<assistant>")) == 1
        return calling.ids("{move}<eos>" if is_first and sum(tokens) % 2 else "7<eos>")

    trainer, (record,) = train(say, turns, [])
    walked = sum(len(one.turns) > 1 for one in trainer._episodes)
    assert 0 < walked < 8 and record["environments_lost"] == walked / 8
    assert record["rewards/Losing/mean"] == 1.0 and record["tool_failures"] == 0.0


def test_a_text_of_reset_that_does_not_fit_is_said(train):
    turns = {"environment_factory": calling.Walk, "train_dataset": None}
    text = "with the text that reset of the environment adds, a prompt has 5 tokens of the {} of a sequence: {}; let"
    cut = text.format(16, r"completions are cut off before max_completion_length \(32\)")
    with pytest.warns(UserWarning, match=cut) as caught:
        train(in_turn("7<eos>"), turns, [], vllm_max_model_length=16, max_steps=2)
    assert len([warning for warning in caught if "adds, a prompt" in str(warning.message)]) == 1
    with pytest.raises(ValueError, match=text.format(5, "there is no room for an answer") + ".* raise vllm_max_model_"):
        train(in_turn("7<eos>"), turns, [], vllm_max_model_length=5)


@pytest.mark.parametrize(
    ("turns", "settings", "text"),
    [
        ({"environment_factory": {"walk": calling.Walk}, "train_dataset": None}, {}, "requires a `train_dataset`"),
        ({"environment_factory": calling.Walk, "train_dataset": None}, {"max_steps": -1}, "`max_steps` must be set"),
        ({"environment_factory": Silent}, {"reward": []}, "No reward source"),
        ({"environment_factory": SimpleNamespace}, {}, "must define a callable `reset`"),
    ],
)
def test_environments_that_cannot_be_played_are_refused(turns, settings, text, train):
    with pytest.raises(ValueError, match=text):
        train(in_turn("7<eos>"), turns, **settings)
