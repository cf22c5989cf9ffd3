"""Test generated problems: the largest or smallest of four numbers, and what every generator holds out."""

import random
import re

import pytest

from qerl_recipes.tasks import generators, running_sum
from qerl_recipes.tasks.generators import PICK_NUMBER, Generator, Problem

GENERATORS = (PICK_NUMBER, running_sum.GENERATOR)


def prompts_of(problems):
    return [problem["prompt"] for problem in problems]


def test_every_number_picked_is_right_and_no_place_is_likelier():
    counts = {"largest": 0, "smallest": 0}
    places = [0] * 4
    for problem in PICK_NUMBER.problems(2000, seed=3):
        choice, numbers = re.fullmatch(r"What is the (\w+) of these numbers: ([\d, ]+)\?", problem["prompt"]).groups()
        values = sorted(int(n) for n in numbers.split(", "))
        assert len(set(values)) == 4 and values[0] >= 0 and values[-1] < 100
        assert problem["answer"] == str(values[-1 if choice == "largest" else 0])
        counts[choice] += 1
        places[numbers.split(", ").index(problem["answer"])] += 1
    # six standard deviations: naming always the first, or always the last, is right for a quarter
    assert all(abs(n - 1000) < 135 for n in counts.values()) and all(abs(n - 500) < 117 for n in places)


def test_held_out_problems_are_fixed():
    # A change of these golden values would make every published accuracy incomparable.
    picks, sums = (generator.held_out() for generator in GENERATORS)
    assert picks[0] == {"prompt": "What is the largest of these numbers: 72, 73, 68, 62?", "answer": "73"}
    assert picks[999]["prompt"] == "What is the largest of these numbers: 98, 62, 51, 17?"
    assert prompts_of(sums[:3]) == ["2+9+3+6+2-4=", "1+5+4-7+1+9=", "6+3+2+8-6-8="]
    assert (len(set(prompts_of(picks))), len(set(prompts_of(sums)))) == (1000, 512)


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda generator: generator.name)
def test_a_training_set_repeats_grows_and_holds_out(generator):
    held_out = set(prompts_of(generator.held_out()))
    for seed in range(2):
        prompts = generator.training_set(3000, seed)["prompt"][:]
        assert len(set(prompts)) == 3000 and held_out.isdisjoint(prompts)
        assert generator.training_set(50, seed)["prompt"] == prompts[:50]
    assert generator.training_set(50, 0)["prompt"] != prompts[:50]
    assert generator.held_out(3) == generator.held_out()[:3]


def test_an_excluded_problem_is_left_out_and_the_rest_follow():
    ten = PICK_NUMBER.problems(10, seed=8)
    assert PICK_NUMBER.problems(9, seed=8, exclude=[ten[0]["prompt"]]) == ten[1:] != PICK_NUMBER.problems(9, seed=9)


def test_a_problem_drawn_twice_is_given_once():
    def draw(rng: random.Random) -> Problem:
        number = str(rng.randrange(5))
        return {"prompt": number, "answer": number}

    assert sorted(prompts_of(Generator("few", draw, 1).problems(5, seed=0))) == list("01234")
    assert generators.SIZE == 4096
