"""Test comparisons paired by seed against values known from elsewhere, and verdicts on claims."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from qerl_recipes.study.statistics import compare, correct, holm, judge, visible

pytestmark = pytest.mark.filterwarnings("error")  # numpy's and scipy's would reach the user of `qerl study`


def paired(differences, **options):
    """Compare two arms whose values differ by these amounts."""
    of_a = pd.Series(list(differences), dtype=float)
    return compare(("a", "b"), of_a, of_a * 0.0, **options)


def test_paired_by_seed_as_scipy_does_it():
    rng = np.random.default_rng(1)
    common = rng.normal(0, 1.0, 8)  # each seed shifts both arms alike; unpaired, this would hide the difference
    of_a, of_b = pd.Series(0.5 + common + 0.05 * rng.normal(size=8)), pd.Series([*common, 7.0])
    found = compare(("a", "b"), of_a, of_b[::-1])  # b comes in another order and has a seed that a lacks
    assert found.seeds == 8 and found.low < found.difference < found.high
    assert found.p == pytest.approx(stats.ttest_rel(of_a, common).pvalue)
    assert found.difference == pytest.approx((of_a - common).mean()) == pytest.approx(0.5, abs=0.06)
    unpaired = stats.ttest_ind(of_a, common, equal_var=False)
    assert unpaired.pvalue > 0.05 > found.p  # control: the unpaired test sees nothing
    assert (found.unpaired_low, found.unpaired_high) == pytest.approx(tuple(unpaired.confidence_interval()))
    (turned,) = correct([compare(("b", "a"), of_b, of_a)])
    assert turned.difference == pytest.approx(-found.difference) and turned.verdict() == "lower"  # exact p is 2 / 2**8
    assert compare(("a", "b"), of_a[:1], of_b) is None


def test_holms_correction():
    """Compare with R's p.adjust; without the correction all four would be below 5 %."""
    p = [0.01, 0.04, 0.03, 0.005]
    assert holm(p, 4) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(p, 40) == pytest.approx([0.39, 1.0, 1.0, 0.2])  # of 40 planned comparisons 36 have no result yet
    assert holm([0.6, 0.7], 2) == [1.0, 1.0] and holm([], 3) == []
    raw = [replace(paired([0.1, 0.2]), p=one, p_exact=one) for one in p]
    found = correct(raw)
    assert [c.verdict() for c in found] == ["higher", "not significant", "not significant", "higher"]
    assert [c.verdict() for c in correct(raw, 40)] == ["not significant"] * 4
    assert [c.exact_holm for c in found] == [c.p_holm for c in found] == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_the_exact_test_flips_all_signs():
    found = paired([0.031, 0.04, 0.035, 0.052, 0.029])
    assert found.p < 0.01 and found.p_exact == 2 / 2**5  # five seeds cannot pass the exact test
    mixed = [0.05, -0.01, 0.02, 0.04, -0.03, 0.01]
    signs = itertools.product((1, -1), repeat=6)
    sums = [abs(sum(s * d for s, d in zip(of, mixed, strict=True))) for of in signs]
    assert paired(mixed).p_exact == pytest.approx(sum(of >= abs(sum(mixed)) - 1e-12 for of in sums) / 2**6)
    of_a = pd.Series([300, 401, 250, 333, 512, 128, 77, 90]) / 1319  # one problem more or less, in floats
    found = compare(("a", "b"), of_a, of_a - pd.Series([1, 0, -1, 1, 1, 0, -1, 1]) / 1319)
    assert found.p_exact == paired([1, 0, -1, 1, 1, 0, -1, 1]).p_exact == pytest.approx(0.6875)
    many = [paired([0.1 + n / 100 for n in range(16)]) for _ in range(2)]
    assert many[0].p_exact == many[1].p_exact < 0.001  # sampled at random, with the same result each time


def test_equal_differences_over_few_seeds_prove_nothing():
    two, many = (compare(("a", "b"), *(pd.Series([v] * n) for v in (0.503, 0.5))) for n in (2, 8))
    assert (two.p, many.p) == (0.5, 2**-7) and (many.unpaired_low, many.unpaired_high) == pytest.approx((0.003, 0.003))
    assert judge(*correct([two]), "higher", 0.001) == "inconclusive"
    assert judge(*correct([many]), "higher", 0.001) == "supported"
    # equal except for the last bit
    assert compare(("a", "b"), pd.Series([0.1 + 0.2, 0.3]), pd.Series([0.3, 0.3])).p == 1.0
    same = compare(("a", "b"), pd.Series([0.25, 0.5]), pd.Series([0.25, 0.5]))
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    # differences of 1/512 each
    six_digits = compare(("a", "b"), pd.Series([0.197266, 0.201172]), pd.Series([0.195312, 0.199219]))
    assert six_digits.p == 0.5


def test_the_power_is_what_a_simulation_finds():
    rng, size = np.random.default_rng(0), visible(0.02, 5, 7)
    drawn = rng.normal(size, 0.02, (20_000, 5))
    assert np.mean(stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05 / 7) == pytest.approx(0.8, abs=0.02)
    assert visible(0.04, 5, 7) == pytest.approx(2 * size) and visible(0.02, 12, 7) < size < visible(0.02, 5, 8)
    assert visible(0.02, 2, 9) > 1.0  # with two seeds no possible difference of shares is visible


@pytest.mark.parametrize(
    ("differences", "expect", "verdict"),
    [
        ([0.03, 0.04, 0.035], "higher", "supported (t test only)"),
        ([0.03, 0.04, 0.035], "lower", "not supported (t test only)"),
        ([0.03, 0.04, 0.035], "not lower", "supported (t test only)"),
        ([0.001, -0.001, 0.002], "higher", "not supported (t test only)"),  # any effect is too small to matter
        ([0.001, -0.001, 0.002], "not lower", "supported (t test only)"),
        ([0.10, -0.05, 0.02], "higher", "inconclusive"),
        ([0.10, -0.05, 0.02], "not lower", "inconclusive"),
        ([-0.03, -0.04, -0.035], "lower", "supported (t test only)"),
        ([-0.03, -0.04, -0.035], "higher", "not supported (t test only)"),  # the sign is wrong
        ([-0.03, -0.04, -0.035], "not lower", "not supported (t test only)"),
        ([0.03 + s / 1000 for s in range(6)], "higher", "supported"),  # six seeds can pass the exact test
        ([0.03 + s / 1000 for s in range(6)], "not lower", "supported"),
        ([0.03 + s / 1000 for s in range(6)], "lower", "not supported"),
        ([0.004, -0.005] * 3, "lower", "not supported"),  # the test is at the margin, not at zero
        ([0.004, -0.005] * 3, "higher", "not supported"),
        ([0.004, -0.005, 0.004, -0.005, 0.004], "not lower", "supported (t test only)"),
    ],
)
def test_a_claim_is_judged_by_its_margin(differences, expect, verdict):
    (found,) = correct([paired(differences)])
    half = stats.t.ppf(0.975, len(differences) - 1) * np.std(differences, ddof=1) / math.sqrt(len(differences))
    assert (found.high - found.low) / 2 == pytest.approx(half)
    assert judge(found, expect, 0.01) == verdict


def test_a_verdict_is_of_the_corrected_tests():
    (found,) = correct([paired([0.03 + s / 1000 for s in range(6)])])
    assert found.verdict() == "higher"
    of_two = correct([found, replace(found, p=0.001)])[0]  # the exact p of 2 / 64 is corrected for two comparisons
    assert of_two.verdict() == "higher (t test only)"
    assert judge(of_two, "higher", 0.02) == "supported (t test only)"
    # without the correction it would be supported
    assert judge(replace(found, p_holm=0.06), "higher", 0.5) == "not supported"
