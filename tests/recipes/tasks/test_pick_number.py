"""The largest or smallest of four numbers: answers against a plain reading of the question, and what is held out."""

import random
import re

import pytest

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import pick_number
from qerl_recipes.tasks.prompts import read
from qerl_recipes.tasks.rewards import last_number


def test_every_answer_is_the_one_asked_for_and_both_questions_are_asked_alike_often():
    asked = {"largest": 0, "smallest": 0}
    places = [0] * 4
    problems = pick_number.problems(2000, seed=3)
    for prompt, answer in zip(problems["prompt"], problems["answer"], strict=True):
        which, numbers = re.fullmatch(r"What is the (\w+) of these numbers: ([\d, ]+)\?", prompt).groups()
        values = sorted(int(n) for n in numbers.split(", "))
        assert len(set(values)) == 4 and values[0] >= 0 and values[-1] < 100
        assert answer == str(values[-1 if which == "largest" else 0])
        asked[which] += 1
        places[numbers.split(", ").index(answer)] += 1
    # six standard deviations: naming always the first, or always the last, is right for a quarter
    assert all(abs(n - 1000) < 135 for n in asked.values()) and all(abs(n - 500) < 117 for n in places)


def test_held_out_problems_are_fixed_and_never_trained_on():
    held_out = pick_number.held_out()
    # golden: a change here would make every published accuracy incomparable
    assert held_out[0] == {"prompt": "What is the largest of these numbers: 72, 73, 68, 62?", "answer": "73"}
    assert held_out[999]["prompt"] == "What is the largest of these numbers: 98, 62, 51, 17?"
    assert len(set(held_out["prompt"])) == 1000
    for seed in range(2):
        training = pick_number.training_set(5000, seed)
        assert len(set(training["prompt"])) == 5000 and not set(training["prompt"]) & set(held_out["prompt"])


def test_an_excluded_problem_is_left_out_and_the_rest_follow():
    ten = pick_number.problems(10, seed=8)["prompt"]
    nine = pick_number.problems(9, seed=8, exclude=ten[:1])["prompt"]
    assert nine == ten[1:] != pick_number.problems(9, seed=9)["prompt"]


def test_a_problem_drawn_twice_is_given_once(monkeypatch: pytest.MonkeyPatch):
    def few(rng: random.Random) -> tuple[str, str]:
        number = str(rng.randrange(5))
        return number, number

    monkeypatch.setattr(pick_number, "draw", few)
    assert sorted(pick_number.problems(5, seed=0)["prompt"]) == list("01234")


def test_a_recipe_names_it_and_takes_size_and_seed_and_nothing_else():
    train, held_out = read(ScriptArguments(dataset_name="pick_number", dataset_size=300, dataset_seed=4))
    assert train["prompt"] == pick_number.training_set(300, 4)["prompt"] != pick_number.training_set(300, 5)["prompt"]
    assert held_out["prompt"] == pick_number.held_out()["prompt"]
    assert len(read(ScriptArguments(dataset_name="pick_number"))[0]) == 4096
    assert set(last_number([f"It is {answer}." for answer in train["answer"]], train["answer"])) == {1.0}
    for key, value in {"dataset_config": "main", "dataset_test_split": "x"}.items():
        with pytest.raises(ConfigError, match=f"pick_number does not read {key}"):
            read(ScriptArguments(dataset_name="pick_number", **{key: value}))
    with pytest.raises(ConfigError, match="pick_number knows no numbers"):
        read(ScriptArguments(dataset_name="pick_number", dataset_kwargs={"numbers": 5}))
