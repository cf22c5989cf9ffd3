import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_recipes.evaluate.intervals import Z95, disjoint, wilson


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
