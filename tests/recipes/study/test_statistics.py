"""Comparisons paired by seed: intervals, tests, corrections, and the verdicts that follow."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from qerl_recipes.study import outline, results, table
from qerl_recipes.study.conduct import conduct
from qerl_recipes.study.plan import first_runs, read
from qerl_recipes.study.statistics import holm, judged, paired


def test_equal_differences_have_the_sign_of_their_effect():
    below = paired("a", "b", {0: 0.4, 1: 0.4}, {0: 0.5, 1: 0.5})
    assert (below.effect, paired("b", "a", {0: 0.5, 1: 0.5}, {0: 0.4, 1: 0.4}).effect) == (-math.inf, math.inf)


def test_a_table_holds_what_a_run_comes_to_exactly_so_that_equal_differences_stay_equal(tmp_path):
    """Of 512 problems: 100 and 102 right, and 101 and 103."""
    shares = {"a": (100 / 512, 102 / 512), "b": (101 / 512, 103 / 512)}
    rows = [(arm, seed, 60, "accuracy", of[seed]) for arm, of in shares.items() for seed in (0, 1)]
    rows += [("a", 0, step, "reward", 1 / 3) for step in (1, 2)]
    table.write_table(rows, tmp_path / table.TABLE)
    there = table.read_table(tmp_path / table.TABLE)
    assert sorted(row for row in there if row[3] == "accuracy") == sorted(rows[:4])
    assert {value for *_, metric, value in there if metric == "reward"} == {0.333333}
    exact = paired("b", "a", dict(enumerate(shares["b"])), dict(enumerate(shares["a"])))
    of_six_digits = [{i: float(f"{v:.6g}") for i, v in enumerate(shares[arm])} for arm in "ba"]
    assert exact.p == paired("b", "a", *of_six_digits).p == 0.5, "a table of before"


def test_holms_correction_counts_the_comparisons_that_have_no_result_yet(study):
    arms = {"a": {}, "b": {}, "c": {}}
    plan = read(study(sweep=None, arms=arms, comparisons=[["b", "a"], ["c", "a"], ["c", "b"]]))
    there = {("a", 0): 0.5, ("a", 1): 0.51, ("a", 2): 0.52, ("b", 0): 0.6, ("b", 1): 0.62, ("b", 2): 0.63}
    values = results.final([(arm, seed, 9, "accuracy", v) for (arm, seed), v in there.items()])
    (one,) = results.comparisons(plan, values)["best"]
    assert one.p_holm == pytest.approx(3 * one.p)
    claim = {"claim": "x", "pair": ["b", "a"], "expect": "higher", "margin": 0.01}
    plan = read(study(sweep=None, arms=arms, comparisons=None, claims=[claim, {**claim, "pair": ["c", "a"]}]))
    assert results.verdicts(plan, values)[0].measured.p_holm == pytest.approx(2 * one.p)


def test_a_claim_of_a_metric_that_some_runs_have_not_reached_is_undecided(study):
    claim = {"claim": "x", "pair": ["b", "a"], "expect": "lower", "margin": 1, "metric": "steps_to_target"}
    plan = read(study(sweep=None, claims=[claim]))
    rows = [(arm, seed, 60, "accuracy", 0.5) for arm in "ab" for seed in (0, 1, 2)]
    rows += [("a", seed, 60, "steps_to_target", 30 + seed) for seed in (0, 1, 2)]
    rows += [("b", seed, 60, "steps_to_target", 10 + 1.5 * seed) for seed in (0, 1)]
    (found,) = results.verdicts(plan, results.final(rows))
    assert found.measured.seeds == 2 and found.verdict == "undecided: 1 runs lack it"
    (found,) = results.verdicts(plan, results.final([*rows, ("b", 2, 60, "steps_to_target", 12.0)]))
    assert found.verdict == "supported"


def test_a_comparison_is_paired_by_seed_and_agrees_with_scipy_and_a_published_correction():
    rng = np.random.default_rng(1)
    common = rng.normal(0, 1.0, 8)  # what a seed does to both arms: unpaired, it would drown the difference
    a = {seed: 0.5 + value + 0.05 * rng.normal() for seed, value in enumerate(common)}
    b = dict(enumerate(common)) | {99: 7.0}  # a seed that a does not have counts for nothing
    found = paired("a", "b", a, b)
    assert found.seeds == 8 and found.low < found.difference < found.high
    differences = [a[s] - b[s] for s in range(8)]
    assert found.p == pytest.approx(stats.ttest_rel([a[s] for s in range(8)], [b[s] for s in range(8)]).pvalue)
    assert found.difference == pytest.approx(np.mean(differences)) == pytest.approx(0.5, abs=0.06)
    assert found.effect == pytest.approx(np.mean(differences) / np.std(differences, ddof=1))
    assert stats.ttest_ind(list(a.values()), common).pvalue > 0.05 > found.p  # the control: unpaired sees nothing
    with pytest.raises(ValueError, match="have 1 seeds in common"):
        paired("a", "b", {1: 0.0}, {1: 0.0, 2: 0.0})
    # Holm's procedure on 0.01, 0.04, 0.03, 0.005 gives 0.03, 0.06, 0.06, 0.02 (R's p.adjust documentation)
    raw = [found.__class__("a", "b", 5, 1.0, 0.5, 1.5, 1.0, p) for p in (0.01, 0.04, 0.03, 0.005)]
    assert [c.p_holm for c in holm(raw)] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [c.verdict() for c in holm(raw)] == ["higher", "undecided at this size", "undecided at this size", "higher"]
    likely = [found.__class__("a", "b", 5, 1.0, 0.5, 1.5, 1.0, p) for p in (0.6, 0.7)]
    assert [c.p_holm for c in holm(likely)] == [1.0, 1.0]
    (turned,) = holm([paired("b", "a", b, a)])
    assert turned.difference == pytest.approx(-found.difference) and turned.verdict() == "lower"


def test_the_interval_is_the_percentiles_of_all_resamples_and_the_same_each_time():
    differences = [0.0, 1.0, 2.0, 4.0, 16.0]  # skewed: other kinds of bootstrap end elsewhere
    arms = dict(enumerate(differences)), dict.fromkeys(range(5), 0.0)
    means = [np.mean(resample) for resample in itertools.product(differences, repeat=5)]
    found = paired("a", "b", *arms)
    assert (found.low, found.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.2)
    uneven = dict(enumerate(np.random.default_rng(3).normal(size=8))), dict.fromkeys(range(8), 0.0)
    first, second = (paired("a", "b", *uneven) for _ in range(2))
    assert (first.low, first.high) == (second.low, second.high), "a page would change each time it is made"


@pytest.mark.parametrize(
    ("differences", "expect", "verdict"),
    [
        ([0.03, 0.04, 0.035], "higher", "supported"),
        ([0.03, 0.04, 0.035], "lower", "not supported"),
        ([0.03, 0.04, 0.035], "not lower", "supported"),
        ([0.001, -0.001, 0.002], "higher", "not supported"),  # there may be an effect, and it does not matter
        ([0.001, -0.001, 0.002], "not lower", "supported"),
        ([0.10, -0.05, 0.02], "higher", "undecided at this size"),
        ([0.10, -0.05, 0.02], "not lower", "undecided at this size"),
        ([-0.03, -0.04, -0.035], "lower", "supported"),
        ([-0.03, -0.04, -0.035], "not lower", "not supported"),
    ],
)
def test_a_claim_is_judged_by_its_margin_and_the_t_distribution(differences, expect, verdict):
    (found,) = holm([paired("a", "b", dict(enumerate(differences)), dict.fromkeys(range(3), 0.0))])
    half = stats.t.ppf(0.975, 2) * np.std(differences, ddof=1) / math.sqrt(3)
    assert (found.t_high - found.t_low) / 2 == pytest.approx(half)
    assert judged(found, expect, 0.01) == verdict


def test_equal_differences_over_few_seeds_prove_nothing():
    two, many = (paired("a", "b", dict.fromkeys(range(n), 0.503), dict.fromkeys(range(n), 0.5)) for n in (2, 8))
    assert (two.p, many.p) == (0.5, 2**-7) and two.effect == math.inf
    assert judged(*holm([two]), "higher", 0.001) == "undecided at this size"
    assert judged(*holm([many]), "higher", 0.001) == "supported"
    assert paired("a", "b", {0: 0.1 + 0.2, 1: 0.3}, {0: 0.3, 1: 0.3}).p == 1.0  # equal but for a last bit
    same = paired("a", "b", {0: 0.25, 1: 0.5}, {0: 0.25, 1: 0.5})
    assert (same.effect, same.low, same.high) == (0.0, 0.0, 0.0)


def test_claims_are_judged_on_their_own_metric_and_corrected_together(study, tmp_path, finish):
    claims = [
        {"claim": "b learns faster", "pair": ["b", "a"], "expect": "higher", "margin": 0.01, "metric": "reward_area"},
        {"claim": "b is as good", "pair": ["b", "a"], "expect": "not lower", "margin": 0.02},
    ]
    file = study(sweep=None, claims=claims)
    plan, out = read(file), tmp_path / "out"
    for one in first_runs(plan):
        jitter = 0.001 * one.seed
        finish(one, out, 0.5, rewards=(0.0, 1.0 + jitter) if one.arm == "b" else (0.0, 0.8 - jitter))
    rows = results.collect(plan, out)
    faster, good = results.verdicts(plan, results.final(rows))
    assert [(v.claim.claim, v.verdict) for v in (faster, good)] == [
        ("b learns faster", "supported"),
        ("b is as good", "supported"),
    ]
    c = faster.measured
    assert c.p_holm == pytest.approx(2 * c.p) and c.difference == pytest.approx(0.101)
    table.write_table(rows, out / table.TABLE)
    page = conduct(file, table=out / table.TABLE).read_text()
    assert "| b learns faster | reward_area: b higher than a, margin 0.01; a - b = +0.101, 95 % (t) +0.0985" in page
    told = outline.outline(plan, file)
    assert "claim: b is as good. Supported where b's accuracy is not lower than a's" in told
    assert "over the claims of the study, is below 5% in" in told and "is above minus the margin" in told


def test_a_comparison_of_a_run_without_a_number_leaves_the_correction_of_the_others_as_it_is():
    undecided = paired("a", "b", {0: float("nan"), 1: 0.2}, {0: 0.1, 1: 0.1})
    raw = [replace(undecided, p=p, difference=1.0) for p in (0.01, float("nan"), 0.02, 0.001)]
    found = holm(raw)
    assert [c.p_holm for c in found] == pytest.approx([0.03, float("nan"), 0.04, 0.004], nan_ok=True)
    assert [c.verdict() for c in found] == ["higher", "undecided at this size", "higher", "higher"]
    assert judged(found[1], "higher", 0.1) == judged(found[1], "not lower", 0.1) == "undecided at this size"
