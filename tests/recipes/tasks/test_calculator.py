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
        assert answers[0] == answers[1] and answers[0].count("=") == 1
        numbers.append(1 + answers[0].index("="))
        assert answers[0] == ["+"] * (numbers[-1] - 1) + ["="] + ["-"] * (9 - numbers[-1])
    assert set(numbers) == set(range(1, 10))


@pytest.mark.parametrize(("wrong", "reward"), [(0, 1.0), (1, 0.5), (2, 0.0), (3, 0.0)])
def test_each_guess_costs_until_none_is_left(wrong, reward):
    game = HigherLower(largest=1, most=2)
    game.reset()
    assert game.get_reward() == 0
    for _ in range(wrong):
        assert game.guess(0) == "+"
    assert game.guess(1) == "=" and game.get_reward() == reward
    game.guess(0)
    assert game.get_reward() == reward, "what is guessed after the number was found does not count"
    game.reset()
    assert game.get_reward() == 0


def test_a_game_without_numbers_is_refused():
    for arguments in ({"largest": 0}, {"most": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            HigherLower(**arguments)
