"""Test the tool calculator and the environment higher_lower."""

import pytest

from qerl_recipes.tasks.calculator import calculator
from qerl_recipes.tasks.higher_lower import HigherLower


@pytest.mark.parametrize(
    ("expression", "result"),
    [("12-3", "9"), (" 2 * (3 + 4) ", "14"), ("-7+5", "-2"), ("7/2", "3.5"), ("0.1+0.2", "0.3"), ("6/3", "2")],
)
def test_a_calculator_is_exact(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression", ["", "7+", "9**9**9", "abs(3)", "a", "True", "'7'", "1/0", "1e999", "(" * 201, "7+" * 101 + "7"]
)
def test_what_is_no_sum_is_an_error(expression):
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculator(expression)


def test_the_number_of_a_game_follows_from_its_seed_alone():
    games = [HigherLower(), HigherLower()]
    numbers = []
    for seed in range(50):
        assert {game.reset(seed=seed, prompt="") for game in games} == {"1-9"}
        answers = [[game.guess(guess) for guess in range(1, 10)] for game in games]
        number = 1 + answers[0].index("=")
        assert answers[0] == answers[1]
        assert answers[0] == [f"{guess + 1}-9" for guess in range(1, number)] + ["="] * (10 - number)
        numbers.append(number)
    assert set(numbers) == set(range(1, 10))


def test_each_guess_leaves_a_range_in_which_the_number_is():
    game = HigherLower()
    game.reset(seed=1)
    game._number = 4
    ranges = [(7, "1-6"), (2, "3-6"), (12, "3-6"), (-3, "3-6"), (6, "3-5")]
    assert [game.guess(number) for number, _ in ranges] == [left for _, left in ranges]
    assert game.get_reward() == (9 - 3) / 9 / 2
    assert game.guess(4) == "=" and game.get_reward() == (9 - 1 - 5 + 3) / 9 / 2, "the sixth guess is one too many"


@pytest.mark.parametrize(("wrong", "reward"), [(0, 1.0), (1, 0.75), (2, 0.0), (3, 0.0)])
def test_each_guess_costs_until_none_is_left(wrong, reward):
    game = HigherLower(largest=1, most=2)
    game.reset()
    assert game.get_reward() == 0
    for _ in range(wrong):
        assert game.guess(0) == "1-1"
    assert game.guess(1) == "=" and game.get_reward() == reward
    game.guess(0)
    assert game.get_reward() == reward, "what is guessed after the number was found does not count"
    game.reset()
    assert game.get_reward() == 0


def test_a_game_without_numbers_is_refused():
    for arguments in ({"largest": 0}, {"most": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            HigherLower(**arguments)
