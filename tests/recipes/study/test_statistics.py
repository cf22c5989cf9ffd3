"""Comparisons paired by seed: intervals, tests, corrections, and the verdicts that follow."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from qerl_recipes.study import outline, results, table
from qerl_recipes.study.conduct import conduct
from qerl_recipes.study.page import page as page_of
from qerl_recipes.study.plan import StudyError, first_runs, read
from qerl_recipes.study.statistics import holm, if_normal, judged, paired, visible


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
    assert found.verdict == "supported, if normal"


def test_until_its_target_a_run_that_never_reached_it_counts_its_last_step(study):
    claim = {"claim": "x", "pair": ["b", "a"], "expect": "lower", "margin": 1, "metric": "steps_within"}
    plan = read(study(sweep=None, afterwards={"claims": [claim]}))
    rows = [(arm, seed, step, "reward", 0.5) for arm in "ab" for seed in (0, 1, 2) for step in (1, 40)]
    rows += [(arm, seed, 40, "accuracy", 0.5) for arm in "ab" for seed in (0, 1, 2)]
    rows += [("b", seed, 40, "steps_to_target", 10.0 + seed) for seed in (0, 1, 2)]
    rows += [("a", seed, 40, "steps_to_target", 20.0 + seed) for seed in (0, 1)]
    (found,) = results.looks(plan, results.final(rows))
    assert found.measured.differences == (-10.0, -10.0, 12.0 - 40.0) and results.verdicts(plan, {}) == []


def test_a_comparison_is_paired_by_seed_and_agrees_with_scipy_and_a_published_correction():
    rng = np.random.default_rng(1)
    common = rng.normal(0, 1.0, 8)  # what a seed does to both arms: unpaired, it would drown the difference
    a = {seed: 0.5 + value + 0.05 * rng.normal() for seed, value in enumerate(common)}
    b = dict(enumerate(common)) | {99: 7.0}  # a seed that a does not have counts for nothing
    found = paired("a", "b", a, b)
    assert found.seeds == 8 and found.t_low < found.difference < found.t_high
    differences = [a[s] - b[s] for s in range(8)]
    assert found.p == pytest.approx(stats.ttest_rel([a[s] for s in range(8)], [b[s] for s in range(8)]).pvalue)
    assert found.difference == pytest.approx(np.mean(differences)) == pytest.approx(0.5, abs=0.06)
    unpaired = stats.ttest_ind([a[s] for s in range(8)], common, equal_var=False)
    assert unpaired.pvalue > 0.05 > found.p  # the control: unpaired sees nothing
    assert (found.unpaired_low, found.unpaired_high) == pytest.approx(tuple(unpaired.confidence_interval()))
    with pytest.raises(ValueError, match="have 1 seeds in common"):
        paired("a", "b", {1: 0.0}, {1: 0.0, 2: 0.0})
    # Holm's procedure on 0.01, 0.04, 0.03, 0.005 gives 0.03, 0.06, 0.06, 0.02 (R's p.adjust documentation)
    raw = [found.__class__("a", "b", 5, 1.0, p, p) for p in (0.01, 0.04, 0.03, 0.005)]
    assert [c.p_holm for c in holm(raw)] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [c.verdict() for c in holm(raw)] == ["higher", "undecided at this size", "undecided at this size", "higher"]
    likely = [found.__class__("a", "b", 5, 1.0, p, p) for p in (0.6, 0.7)]
    assert [c.p_holm for c in holm(likely)] == [1.0, 1.0]
    (turned,) = holm([paired("b", "a", b, a)])
    assert turned.difference == pytest.approx(-found.difference) and turned.verdict() == "lower"


def test_the_exact_test_flips_all_signs_and_five_seeds_cannot_pass_it():
    differences = [0.031, 0.04, 0.035, 0.052, 0.029]
    found = paired("a", "b", dict(enumerate(differences)), dict.fromkeys(range(5), 0.0))
    assert found.p < 0.01 and found.p_exact == 2 / 2**5
    mixed = [0.05, -0.01, 0.02, 0.04, -0.03, 0.01]
    sums = [
        abs(sum(s * d for s, d in zip(signs, mixed, strict=True))) for signs in itertools.product((1, -1), repeat=6)
    ]
    as_far = sum(of >= abs(sum(mixed)) - 1e-12 for of in sums) / 2**6
    assert paired("a", "b", dict(enumerate(mixed)), dict.fromkeys(range(6), 0.0)).p_exact == pytest.approx(as_far)
    many = [(paired("a", "b", dict(enumerate(0.1 + n / 100 for n in range(16))), dict.fromkeys(range(16), 0.0)))] * 2
    assert many[0].p_exact == many[1].p_exact < 0.001, "a page would change each time it is made"


@pytest.mark.parametrize(
    ("seeds", "expect", "verdict"),
    [
        (5, "higher", "supported, if normal"),
        (6, "higher", "supported"),
        (5, "not lower", "supported, if normal"),
        (6, "not lower", "supported"),
        (5, "lower", "not supported, if normal"),
        (6, "lower", "not supported"),
    ],
)
def test_a_verdict_that_the_exact_test_does_not_give_says_that_it_rests_on_normality(seeds, expect, verdict):
    (found,) = holm([paired("a", "b", {s: 0.03 + s / 1000 for s in range(seeds)}, dict.fromkeys(range(seeds), 0.0))])
    assert if_normal(found, expect, 0.02, judged(found, expect, 0.02)) == verdict
    assert if_normal(found, expect, 0.02, "undecided at this size") == "undecided at this size"
    assert found.verdict() == ("higher" if seeds == 6 else "higher, if normal")
    twice = holm([found, replace(found, p=0.001)])[0]  # 2 / 64, corrected for two comparisons
    assert twice.verdict() == "higher, if normal"
    assert if_normal(twice, "higher", 0.02, "supported") == "supported, if normal"


@pytest.mark.parametrize(("seeds", "rests"), [(5, ", if normal"), (6, "")])
def test_that_there_is_no_effect_of_the_margin_is_tested_at_the_margin(seeds, rests):
    """Not at zero, from which these differences do not differ."""
    values = {seed: (0.004, -0.005)[seed % 2] for seed in range(seeds)}
    (found,) = holm([paired("a", "b", values, dict.fromkeys(range(seeds), 0.0))])
    for expect, verdict in (("higher", "not supported"), ("lower", "not supported"), ("not lower", "supported")):
        assert if_normal(found, expect, 0.02, judged(found, expect, 0.02)) == f"{verdict}{rests}"


def test_runs_that_end_in_two_states_are_counted_and_compared_by_fishers_exact_test(study):
    of_b, of_a = (0.82, 0.83, 0.81, 0.84, 0.80, 0.82, 0.83), (0.82, 0.60, 0.59, 0.61, 0.62, 0.60, 0.58)
    claims = [
        {"claim": "x", "pair": ["b", "a"], "expect": expect, "margin": 0.01} for expect in ("higher", "not lower")
    ]
    changes = {"sweep": None, "seeds": list(range(7)), "claims": claims}
    rows = [(arm, s, 9, "accuracy", v) for arm, of in (("a", of_a), ("b", of_b)) for s, v in enumerate(of)]
    plan, values = read(study(**changes, afterwards={"two_states": 0.75})), results.final(rows)
    (found,) = results.comparisons(plan, values)["best"]
    p = stats.fisher_exact([[7, 0], [1, 6]]).pvalue
    assert (found.above, found.p, found.verdict()) == ((7, 1), pytest.approx(p), "higher")
    assert math.isnan(found.t_low) and found.difference == pytest.approx(6 / 7)
    assert [v.verdict for v in results.verdicts(plan, values)] == ["supported", "undecided at this size"]
    (planned,) = results.comparisons(plan, values, as_planned=True)["best"]
    assert planned == results.comparisons(read(study(**changes)), values)["best"][0] and planned.above is None
    page = page_of(plan, rows, "", "")
    assert f"| b | a | 7 | 7 | 1 | {p:.2g} | {p:.3f} | higher |" in page and "95 %, unpaired" not in page
    assert "By it 1 of 1 are decided" in page
    assert f"in the upper state 7 and 1 of 7, Fisher's p {p:.2g} | supported |" in page


def test_what_few_seeds_can_see_is_what_a_simulation_finds():
    rng, size = np.random.default_rng(0), visible(0.02, 5, 7)
    drawn = rng.normal(size, 0.02, (20_000, 5))
    assert np.mean(stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05 / 7) == pytest.approx(0.8, abs=0.02)
    assert visible(0.04, 5, 7) == pytest.approx(2 * size) and visible(0.02, 12, 7) < size < visible(0.02, 5, 8)
    assert visible(0.02, 2, 9) > 1.0  # two seeds see nothing that a share can be


def test_seeds_of_other_studies_are_pooled_and_reruns_of_one_seed_are_averaged(study):
    rows = [("a", s, 9, "accuracy", 0.50) for s in (0, 1, 2)] + [
        ("b", s, 9, "accuracy", 0.53 + s / 100) for s in (0, 1, 2)
    ]
    other = [("c", s, 9, "accuracy", 0.40) for s in (10, 11)] + [
        ("d", s, 9, "accuracy", 0.30 + s / 100) for s in (10, 11)
    ]
    other += [("e", s, 9, "accuracy", 0.60 + s / 100) for s in (0, 1, 2)]
    table.write_table(other, Path("other") / table.TABLE)
    look = {"claim": "x", "pair": ["b", "a"], "expect": "higher", "margin": 0.01}
    pooled = {**look, "also": {"a": {"other.yaml": "c"}, "b": {"other.yaml": "d"}}}
    averaged = {**look, "also": {"a": {"other.yaml": "e"}}}
    plan = read(
        study(sweep=None, claims=[look, {**look, "expect": "lower"}], afterwards={"claims": [pooled, averaged]})
    )
    five, three = results.looks(plan, results.final(rows))
    assert five.measured.differences == pytest.approx((0.03, 0.04, 0.05, 0.0, 0.01))
    p = stats.ttest_ind((0.03, 0.04, 0.05), (0.0, 0.01), equal_var=False).pvalue
    assert five.parts == results.Parts(3, pytest.approx(0.04), 2, pytest.approx(0.005), pytest.approx(p))
    assert three.measured.differences == pytest.approx((-0.02, -0.015, -0.01)) and three.parts is None
    assert three.measured.p_holm == pytest.approx(2 * three.measured.p)  # over what was looked at
    page = page_of(plan, rows, "", "").partition("## Looked at afterwards")[2]
    assert (
        f"of 3 seeds here +0.04, 2 elsewhere +0.005, which differ with p {p:.2g}" in page and "with e of other" in page
    )
    plan = read(study(sweep=None, afterwards={"claims": [{**look, "also": {"a": {"other.yaml": "z"}}}]}))
    with pytest.raises(StudyError, match=r"other/results.csv.gz has no accuracy of z; name an arm that has"):
        results.looks(plan, results.final(rows))


def test_runs_whose_answers_do_not_end_are_named_and_left_out_of_a_second_look(study):
    plan = read(study(sweep=None))
    rows = [(arm, s, step, "completion_clipped", 0.0) for arm in "ab" for s in (0, 1, 2) for step in range(1, 8)]
    rows = [(a, s, t, m, 0.9 if (a, s) == ("b", 1) and t > 2 else 0.1 if a == "a" else v) for a, s, t, m, v in rows]
    rows += [(arm, s, step, "reward", 0.1) for arm, s, step, *_ in rows]
    accuracy = {("b", s): v for s, v in enumerate((0.60, 0.30, 0.62))} | {("a", s): 0.5 for s in (0, 1, 2)}
    rows += [(arm, s, 7, "accuracy", v) for (arm, s), v in accuracy.items()]
    values = results.final(rows)
    assert results.cut(values) == {("b", 1): pytest.approx(0.9)}  # a tenth itself is not above it
    ((pair, (all_runs, without)),) = results.without_cut(plan, values).items()
    assert pair == ("b", "a") and all_runs.difference == pytest.approx(0.02 / 3)
    assert without.difference == pytest.approx(0.11) and without.seeds == 2
    page = page_of(plan, rows, "", "")
    assert "| b | 1 | 90% | 30.0% |" in page and "| b | a | +0.7% | +11.0% | " in page
    fine = [(a, s, t, m, min(v, 0.1) if m == "completion_clipped" else v) for a, s, t, m, v in rows]
    assert "completions cut\n" not in page_of(plan, fine, "", "")


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
    assert (two.p, many.p) == (0.5, 2**-7)
    assert judged(*holm([two]), "higher", 0.001) == "undecided at this size"
    assert judged(*holm([many]), "higher", 0.001) == "supported"
    assert paired("a", "b", {0: 0.1 + 0.2, 1: 0.3}, {0: 0.3, 1: 0.3}).p == 1.0  # equal but for a last bit
    same = paired("a", "b", {0: 0.25, 1: 0.5}, {0: 0.25, 1: 0.5})
    assert (same.difference, same.t_low, same.t_high, same.p) == (0.0, 0.0, 0.0, 1.0)


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
        ("b learns faster", "supported, if normal"),
        ("b is as good", "supported, if normal"),
    ]
    c = faster.measured
    assert c.p_holm == pytest.approx(2 * c.p) and c.difference == pytest.approx(0.101)
    table.write_table(rows, out / table.TABLE)
    page = conduct(file, table=out / table.TABLE).read_text()
    assert "| b learns faster | reward_area: b higher than a, margin 0.01; +0.101 (+0.0985" in page
    told = outline.outline(plan, file)
    assert "claim: b is as good. Supported where b's accuracy is not lower than a's" in told
    assert "over the claims of the study, is below 5% in" in told and "is above minus the margin" in told


def test_a_comparison_of_a_run_without_a_number_leaves_the_correction_of_the_others_as_it_is():
    undecided = paired("a", "b", {0: float("nan"), 1: 0.2}, {0: 0.1, 1: 0.1})
    raw = [replace(undecided, p=p, p_exact=p, difference=1.0) for p in (0.01, float("nan"), 0.02, 0.001)]
    found = holm(raw)
    assert [c.p_holm for c in found] == pytest.approx([0.03, float("nan"), 0.04, 0.004], nan_ok=True)
    assert [c.verdict() for c in found] == ["higher", "undecided at this size", "higher", "higher"]
    assert judged(found[1], "higher", 0.1) == judged(found[1], "not lower", 0.1) == "undecided at this size"
