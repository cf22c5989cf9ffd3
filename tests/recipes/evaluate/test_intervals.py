"""Test intervals of a share, of pass@k and of a vote, against published values and exhaustive counts."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from qerl_recipes.evaluate.figures import packed, unpacked
from qerl_recipes.evaluate.intervals import mean, over_seeds_and_problems, pass_at_k, several, summary, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Source: Newcombe, Statistics in Medicine 17 (1998), table I, method 3, the Wilson score interval.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_agrees_with_the_published_table(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_several_samples_of_a_problem_are_a_cluster() -> None:
    independent = summary([0.5] * 50 + [0.25, 0.75] * 25, 4)
    identical = summary([0.0, 1.0] * 50, 4)  # four equal answers to a problem are worth one
    low, high = identical["ci95"]
    assert (low, high) == pytest.approx(wilson(50, 100), abs=2e-3)
    assert independent["ci95"][1] - independent["ci95"][0] < high - low
    assert summary([1.0] * 30, 4)["ci95"] == list(wilson(30, 30))  # not 120 trials
    assert summary([1.0, 0.0, 1.0])["ci95"] == list(wilson(2, 3))
    assert summary([1.0, 0.0, 1.0])["interval"] == "Wilson" and "clustered by problem" in identical["interval"]
    for n in (1, 2, 20):  # n pairs of problems, one always right and one never, have variance 1 / (4 (2n - 1))
        ends = summary([0.0, 1.0] * n, 2)["ci95"]
        assert ends == pytest.approx(wilson((2 * n - 1) / 2, 2 * n - 1))
    assert summary([0.5], 4)["ci95"] == list(wilson(0.5, 1))
    assert summary([0.0] * 30, 4)["ci95"] == list(wilson(0, 30))


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer() -> None:
    for n, right in ((5, 0), (5, 2), (6, 5), (4, 4)):
        answers = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            draws = list(itertools.combinations(answers, k))
            assert pass_at_k(right, n, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_and_vote_have_intervals_over_problems() -> None:
    right = [[True] + [False] * 5, [False] * 6] * 20
    found = several(right, [True, False] * 20)
    assert list(found["pass_at"]) == ["2", "4", "6"] and list(found["maj_at"]) == ["6"]
    # half of the problems miss with C(5, 2) / C(6, 2) = 2/3
    assert found["pass_at"]["2"]["value"] == pytest.approx(1 / 6)
    assert found["pass_at"]["6"] == {"value": 0.5, "ci95": list(wilson(20, 40))}
    assert found["maj_at"]["6"] == {"value": 0.5, "ci95": list(wilson(20, 40))}
    low, high = found["pass_at"]["2"]["ci95"]
    assert low < 1 / 6 < high and high - low < wilson(40 / 6, 40)[1] - wilson(40 / 6, 40)[0]


def drawn(
    rng: np.random.Generator, seeds: int, problems: int, of_seeds: float, of_problems: float, rest: float
) -> np.ndarray:
    """Draw differences of mean zero; their three parts have these standard deviations."""
    parts = rng.normal(0, of_seeds, (seeds, 1)), rng.normal(0, of_problems, (1, problems))
    return parts[0] + parts[1] + rng.normal(0, rest, (seeds, problems))


@pytest.mark.parametrize(
    ("seeds", "of_seeds", "of_problems"),
    [(5, 0.03, 0.4), (5, 0.0, 0.4), (3, 0.05, 0.3), (9, 0.02, 0.3), (5, 0.05, 0.0)],
    ids=["both", "problems", "three-seeds", "nine-seeds", "seeds"],
)
def test_an_interval_holds_the_mean_as_often_as_it_says(seeds, of_seeds, of_problems) -> None:
    rng = np.random.default_rng(1)
    held = alone = 0
    for _ in range(1000):
        differences = drawn(rng, seeds, 100, of_seeds, of_problems, 0.5)
        mean, low, high = over_seeds_and_problems([differences])
        held += low <= 0 <= high
        half = stats.t.ppf(0.975, seeds - 1) * differences.mean(axis=1).std(ddof=1) / seeds**0.5
        alone += abs(mean) <= half
    assert 930 <= held <= 985
    if of_problems > of_seeds * 10:  # control: an interval over seeds alone misses the problems' variance
        assert alone < 900


def test_the_interval_is_that_of_the_textbooks_table_of_squares() -> None:
    table = [[3.0, 1.0, 4.0, 0.5], [2.0, 1.5, 5.0, 0.0], [2.5, 0.5, 4.0, 1.0]]
    seeds, problems = 3, 4
    grand = sum(map(sum, table)) / 12
    rows, columns = [sum(row) / 4 for row in table], [sum(column) / 3 for column in zip(*table, strict=True)]
    of_seeds = problems * sum((row - grand) ** 2 for row in rows) / (seeds - 1)
    of_problems = seeds * sum((column - grand) ** 2 for column in columns) / (problems - 1)
    rest = sum((table[s][p] - rows[s] - columns[p] + grand) ** 2 for s in range(3) for p in range(4)) / 6
    square = of_seeds + of_problems - rest
    freedom = square**2 / (of_seeds**2 / 2 + of_problems**2 / 3 + rest**2 / 6)
    half = stats.t.ppf(0.975, freedom) * (square / 12) ** 0.5
    assert over_seeds_and_problems([np.array(table)]) == pytest.approx((grand, grand - half, grand + half))


@given(st.integers(1, 9).flatmap(lambda k: st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=1)))
def test_judgements_come_back_from_their_digits(judged) -> None:
    digits = packed(judged)
    assert len(digits) <= len(judged) * len(judged[0]) / 4 + 2
    assert unpacked(digits, len(judged), len(judged[0])).tolist() == judged


@pytest.mark.parametrize(
    ("digits", "problems", "num_samples"), [("ff", 9, 1), ("ff", 7, 1), ("ffff", 4, 2), ("fe", 2, 3)]
)
def test_digits_of_another_number_of_answers_are_refused(digits, problems, num_samples) -> None:
    with pytest.raises(ValueError, match=f"are not {num_samples} answers to each of {problems} problems"):
        unpacked(digits, problems, num_samples)


def test_the_interval_of_a_mean_is_the_seeded_bootstrap_over_problems() -> None:
    values = np.random.default_rng(1).normal(2.0, 3.0, 200)
    figure = mean(values.tolist())
    low, high = figure["ci95"]
    half = 1.96 * values.std(ddof=1) / np.sqrt(200)
    assert figure["value"] == pytest.approx(values.mean())
    assert low == pytest.approx(values.mean() - half, abs=0.05) and high == pytest.approx(
        values.mean() + half, abs=0.05
    )
    assert mean(values.tolist()) == figure
    assert mean([0.5]) == {"value": 0.5, "ci95": None, "interval": "bootstrap over problems"}
