"""Intervals of a share, of pass@k and of a vote, against published values and against counting."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_recipes.evaluate.intervals import Z95, disjoint, pass_at_k, several, summary, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3: the Wilson score interval
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_agrees_with_the_published_table(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_both_ends_solve_the_score_equation_and_stay_in_the_unit_interval(case):
    successes, n = case
    share = successes / n
    low, high = wilson(successes, n)
    assert 0 <= low <= share <= high <= 1
    for p in (low, high):
        # rounding alone keeps the ends at exactly 0 and 1 from solving it
        assert (share - p) ** 2 == pytest.approx(Z95**2 * p * (1 - p) / n, abs=1e-9)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_an_impossible_count_is_refused(successes, n):
    with pytest.raises(ValueError, match="0 <= successes <= n"):
        wilson(successes, n)


def test_intervals_that_share_a_point_are_not_disjoint():
    assert disjoint((0.1, 0.2), (0.3, 0.4)) and disjoint((0.3, 0.4), (0.1, 0.2))
    assert not disjoint((0.1, 0.3), (0.3, 0.4)) and not disjoint((0.0, 1.0), (0.4, 0.5))


def test_several_samples_a_problem_are_counted_as_the_clusters_they_are() -> None:
    independent = summary([0.5] * 50 + [0.25, 0.75] * 25, 4)
    identical = summary([0.0, 1.0] * 50, 4)  # four equal answers to each: no more than one of each
    low, high = identical["ci95"]
    assert (low, high) == pytest.approx(wilson(50, 100), abs=2e-3)
    assert independent["ci95"][1] - independent["ci95"][0] < high - low
    assert summary([1.0] * 30, 4)["ci95"] == list(wilson(30, 30))  # not 120 trials
    assert summary([1.0, 0.0, 1.0])["ci95"] == list(wilson(2, 3))
    assert summary([1.0, 0.0, 1.0])["interval"] == "Wilson" and "clustered by problem" in identical["interval"]
    for n in (1, 2, 20):  # of n pairs of problems, one always right and one never: variance 1 / (4 (2n - 1))
        ends = summary([0.0, 1.0] * n, 2)["ci95"]
        assert ends == pytest.approx(wilson((2 * n - 1) / 2, 2 * n - 1))
    assert summary([0.5], 4)["ci95"] == list(wilson(0.5, 1))
    assert summary([0.0] * 30, 4)["ci95"] == list(wilson(0, 30))


def test_pass_at_k_is_the_share_of_draws_of_k_answers_with_a_right_one_among_them() -> None:
    for n, right in ((5, 0), (5, 2), (6, 5), (4, 4)):
        answers = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            draws = list(itertools.combinations(answers, k))
            assert pass_at_k(right, n, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(3, 4, 5)


def test_pass_and_vote_have_intervals_over_problems() -> None:
    right = [[True] + [False] * 5, [False] * 6] * 20
    found = several(right, [True, False] * 20)
    assert list(found["pass_at"]) == ["2", "4", "6"] and list(found["maj_at"]) == ["6"]
    assert found["pass_at"]["2"]["value"] == pytest.approx(1 / 6)  # C(5, 2) / C(6, 2) = 2/3 misses, in half of them
    assert found["pass_at"]["6"] == {"value": 0.5, "ci95": list(wilson(20, 40))}
    assert found["maj_at"]["6"] == {"value": 0.5, "ci95": list(wilson(20, 40))}
    low, high = found["pass_at"]["2"]["ci95"]
    assert low < 1 / 6 < high and high - low < wilson(40 / 6, 40)[1] - wilson(40 / 6, 40)[0]
