"""Test what a study's table gives: comparisons, verdicts on claims, its page, and the page over all studies."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.study import pages, results
from qerl_recipes.study.commands import conduct, sum_up
from qerl_recipes.study.inventory import TABLE, collect, read_table, write_table
from qerl_recipes.study.plan import StudyError, first_runs, later_runs, read

ROOT = Path(__file__).parents[3]
CLAIM = {"claim": "noise helps", "pair": ["b", "a"], "expect": "higher", "margin": 0.01}
RATES = {"claim": "larger rates suit b", "pair": ["b", "a"], "expect": "higher", "margin": 0.01, "metric": "sweep_gain"}


def accuracies(of_a, of_b, first=0):
    """Return rows of the accuracies of two arms, by seed."""
    return [(arm, first + s, 9, "accuracy", v) for arm, of in (("a", of_a), ("b", of_b)) for s, v in enumerate(of)]


def page_of(plan, rows, values):
    return pages.page(plan, rows, values, results.compared(plan, values), Path("study.yaml"))


# These tests are about the committed studies.


@pytest.fixture
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    return Path("recipes/studies")


def test_committed_pages_are_those_of_the_committed_tables(at_root):
    found, comparisons = {}, {}
    for file in sorted(at_root.glob("*.yaml")):
        study, table = read(file), file.with_suffix("") / TABLE
        if not table.is_file():
            found[file] = study, pd.DataFrame(), pd.DataFrame()
            continue
        rows = read_table(table)
        values = results.final(rows, study.target_reward)
        found[file] = study, rows, values
        comparisons[file] = results.compared(study, values)
        page = (table.parent / "README.md").read_text()
        assert page == pages.page(study, rows, values, comparisons[file], file), "run: qerl study recipes/studies"
        tables = {pages.COMPARISONS: comparisons[file]}
        tables[pages.CONFIGURATIONS] = results.by_arm(study, rows, values)
        for name, content in tables.items():
            made = content.to_csv(index=False, float_format="%.5g", lineterminator="\n")
            assert content.empty or (table.parent / name).read_text() == made, "run: qerl study recipes/studies"
        assert (table.parent / pages.CURVES).stat().st_size > 10_000 and "{" not in page
    assert pages.overview(at_root, found, comparisons) == (at_root / "README.md").read_text(), (
        "run: qerl study recipes/studies"
    )


# These are values that earlier versions of this code published, computed differently.
PUBLISHED = [
    ("smollm2_scales", "planned", "nvfp4_gptq", "nvfp4", 0.0426, 0.0301, 0.0551, 0.0035),
    ("smollm2_scales", "planned, without cut runs", "nvfp4", "bf16", -0.0333, -0.0519, -0.0146, 0.0432),
    ("smollm2_updates", "planned", "nvfp4_1", "bf16_1", -0.0438, -0.05805, -0.02955, 0.0052),
    ("smollm2_steps", "planned", "nvfp4_lora@0.0001", "nf4_lora@0.0003", -0.0162, -0.0766, 0.0442, 1.0),
    (
        "smollm2_steps",
        "planned, at the common value",
        "nvfp4_lora@0.0001",
        "nf4_lora@0.0001",
        -0.0292,
        -0.07711,
        0.01871,
        0.6634,
    ),
    ("smollm2_pick", "planned", "nvfp4_lora@0.0003", "nf4_lora@0.0003", 0.6, np.nan, np.nan, 1.0),
]


@pytest.mark.parametrize(("study", "kind", "a", "b", "difference", "low", "high", "p"), PUBLISHED)
def test_figures_are_those_published_before(study, kind, a, b, difference, low, high, p, at_root):
    found = pd.read_csv(at_root / study / pages.COMPARISONS)
    (row,) = found[(found.kind == kind) & (found.a == a) & (found.b == b)].to_dict("records")
    assert [row["difference"], row["low"], row["high"]] == pytest.approx([difference, low, high], abs=6e-5, nan_ok=True)
    assert row["p_holm"] == pytest.approx(p, abs=6e-4)


# These tests are about what follows from a table.


def test_holm_counts_what_has_no_result_yet(study, rows_table):
    arms, pairs = {"a": {}, "b": {}, "c": {}}, [["b", "a"], ["c", "a"], ["c", "b"]]
    claims = [CLAIM, {**CLAIM, "pair": ["c", "a"]}]
    plan = read(study(sweep=None, arms=arms, comparisons=pairs, claims=claims))
    values = results.final(rows_table(accuracies([0.5, 0.51, 0.52], [0.6, 0.62, 0.63])), None)
    (one,) = results.comparisons(plan, values)
    assert one.p_holm == pytest.approx(3 * one.p)
    found = results.verdicts(plan, values, plan.claims)
    assert (
        found.p_holm[0] == pytest.approx(2 * one.p) and found.verdict[1] == "inconclusive: no seed has accuracy of both"
    )


def test_a_metric_that_some_runs_lack_decides_nothing(study, rows_table):
    claim = {**CLAIM, "expect": "lower", "margin": 1, "metric": "reward_gain"}
    plan = read(study(sweep=None, claims=[claim, CLAIM]))
    rows = accuracies([0.5] * 3, [0.5] * 3)
    rows += [("a", seed, 60, "reward_gain", 30 + seed) for seed in (0, 1, 2)]
    rows += [("b", seed, 60, "reward_gain", 10 + 1.5 * seed) for seed in (0, 1)]
    found = results.verdicts(plan, results.final(rows_table(rows), None), plan.claims)
    assert found.seeds.tolist() == [2, 3] and found.verdict[0] == "inconclusive: 1 runs lack it"
    rows += [("b", 2, 60, "reward_gain", float("nan"))]
    assert results.verdicts(plan, results.final(rows_table(rows), None), plan.claims).verdict[0].endswith("lack it")
    rows[-1] = ("b", 2, 60, "reward_gain", 12.0)
    found = results.verdicts(plan, results.final(rows_table(rows), None), plan.claims)
    assert found.verdict[0] == "supported (t test only)" and found.p_holm[0] == pytest.approx(2 * found.p[0])


def test_a_run_that_never_reached_its_target_counts_its_last_step(study, rows_table):
    claim = {**CLAIM, "expect": "lower", "margin": 1, "metric": "steps_within"}
    plan = read(study(sweep=None, afterwards={"claims": [claim]}))
    rows = accuracies([0.5] * 3, [0.5] * 3)
    reached = {("b", s): 10 + s for s in (0, 1, 2)} | {("a", s): 20 + s for s in (0, 1)}
    for arm, seed in [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]:
        rows += [(arm, seed, t, "reward", 2.5 * (t >= reached.get((arm, seed), 99))) for t in range(1, 41)]
    values = results.final(rows_table(rows), plan.target_reward)
    assert values.steps_within["a"].tolist() == [20.0, 21.0, 40.0]
    found = results.verdicts(plan, values, plan.afterwards.claims)
    assert (
        found.difference[0] == pytest.approx((-10 - 10 + 12 - 40) / 3) and len(results.verdicts(plan, values, [])) == 0
    )


def test_seeds_of_other_studies_are_pooled_and_reruns_averaged(study, rows_table):
    rows = rows_table(accuracies([0.5] * 3, [0.53, 0.54, 0.55]))
    other = [("c", s, 9, "accuracy", 0.40) for s in (10, 11)] + [
        ("d", s, 9, "accuracy", 0.2 + s / 100) for s in (10, 11)
    ]
    other += [("e", s, 9, "accuracy", 0.60 + s / 100) for s in (0, 1, 2)]
    write_table(rows_table(other), Path("other") / TABLE)
    pooled = {**CLAIM, "also": {"a": {"other.yaml": "c"}, "b": {"other.yaml": "d"}}}
    averaged = {**CLAIM, "also": {"a": {"other.yaml": "e"}}}
    plan = read(study(sweep=None, afterwards={"claims": [pooled, averaged]}))
    five, three = results.verdicts(plan, results.final(rows, None), plan.afterwards.claims).to_dict("records")
    p = stats.ttest_ind((0.03, 0.04, 0.05), (-0.1, -0.09), equal_var=False).pvalue
    assert five["difference"] == pytest.approx(-0.07 / 5) and (five["seeds"], five["seeds_elsewhere"]) == (5, 2)
    assert [five[key] for key in ("here", "elsewhere", "p_same")] == pytest.approx([0.04, -0.095, p])
    assert three["difference"] == pytest.approx(-0.015) and np.isnan(three["here"])
    plan = read(study(sweep=None, afterwards={"claims": [{**CLAIM, "also": {"a": {"other.yaml": "z"}}}]}))
    with pytest.raises(StudyError, match=r"other/results.csv.gz has no accuracy of z; name an arm that has"):
        results.verdicts(plan, results.final(rows, None), plan.afterwards.claims)


def test_runs_whose_answers_do_not_end_are_named_and_left_out(study, rows_table):
    plan = read(study(sweep=None))
    rows = [
        (arm, s, t, "completion_clipped", 0.1 * (arm == "a")) for arm in "ab" for s in (0, 1, 2) for t in range(1, 8)
    ]
    rows = [(a, s, t, m, 0.9 if (a, s) == ("b", 1) and t > 2 else v) for a, s, t, m, v in rows]
    rows += [(arm, s, step, "reward", 0.1) for arm, s, step, *_ in rows]
    rows = rows_table(rows + accuracies([0.5] * 3, [0.60, 0.30, 0.62]))
    values = results.final(rows, None)
    assert results.cut(values).to_dict() == {("b", 1): pytest.approx(0.9)}  # exactly a tenth is not above the limit
    _, (without,) = results.without_cut(plan, values)
    assert without.difference == pytest.approx(0.11) and without.seeds == 2
    page = page_of(plan, rows, values)
    assert "of completions cut at the end: b seed 1 (90 %)." in page and "+0.7 (-" in page
    found = results.compared(plan, values)
    (left,) = found[found.kind == "planned, without cut runs"].to_dict("records")
    assert [left[key] for key in ("difference", "mean_a", "mean_b")] == pytest.approx([0.11, 0.61, 0.5])
    fine = results.final(rows.assign(value=rows.value.where(rows.metric != "completion_clipped", 0.1)), None)
    assert "completions cut" not in page_of(plan, rows, fine)
    assert results.without_cut(plan, fine)[1] == []


def test_a_swept_run_that_is_cut_still_chooses_the_best_value(study, rows_table):
    plan = read(study())
    rows = [(f"{arm}@0.0001", s, 9, "accuracy", 0.2) for arm in "ab" for s in (100, 101)]
    rows += [(f"{arm}@0.001", s, 9, "accuracy", 0.5) for arm in "ab" for s in (100, 101)]
    rows += [(f"{arm}@0.001", s, 9, "accuracy", 0.5 + s / 100 * (arm == "b")) for arm in "ab" for s in (0, 1, 2)]
    rows += [("a@0.0001", 100, 9, "clipped_end", 0.4), ("b@0.001", 0, 9, "clipped_end", 0.4)]
    _, (without,) = results.without_cut(plan, results.final(rows_table(rows), None))
    assert (without.a, without.seeds) == ("b@0.001", 2)


@pytest.mark.parametrize("two_states", [None, 0.75])
def test_pages_of_no_runs_and_of_seeds_that_do_not_differ(two_states, study, rows_table):
    plan = read(study(sweep=None, afterwards={"two_states": two_states}))
    assert results.by_arm(plan, rows_table([]), results.final(rows_table([]), None)).empty
    rows = rows_table(accuracies([0.5] * 3, [0.5] * 3))
    page = page_of(plan, rows, results.final(rows, None))
    assert "Detectable" not in page and ("The seeds do not differ" in page) == (two_states is None)


def test_runs_of_two_states_are_counted(study, rows_table):
    of_b, of_a = (0.82, 0.83, 0.81, 0.84, 0.80, 0.82, 0.83), (0.82, 0.60, 0.59, 0.61, 0.62, 0.60, 0.58)
    claims = [CLAIM, {**CLAIM, "expect": "not lower"}]
    changes = {"sweep": None, "seeds": list(range(7)), "claims": claims, "afterwards": {"two_states": 0.75}}
    plan, rows = read(study(**changes)), rows_table(accuracies(of_a, of_b))
    values = results.final(rows, None)
    (found,), (by_t,) = results.comparisons(plan, values), results.comparisons(plan, values, by_t=True)
    assert found.above == (7, 1) and found.verdict() == "higher" and by_t.above is None and by_t.low > 0
    assert found.p == pytest.approx(stats.fisher_exact([[7, 0], [1, 6]]).pvalue)
    assert np.isnan(found.low) and found.difference == pytest.approx(6 / 7)
    page = page_of(plan, rows, values)
    assert f"| b | a | 82.1 | 63.1 | 7 | 1 | **{found.p:.3f}** |" in page and "Fisher's exact test" in page
    assert results.verdicts(plan, values, plan.claims).verdict.tolist() == ["supported", "inconclusive"]
    (part,) = results.comparisons(plan, values.drop(index=[("a", 0), ("a", 1)]))  # counts are of the seeds of both
    assert (part.seeds, part.above, part.difference) == (5, (5, 0), 1.0)
    with pytest.raises(StudyError, match=r"two_states: Input should be less than 1"):
        read(study(**{**changes, "afterwards": {"two_states": 75}}))
    states = results.by_arm(plan, rows, values).query("metric == 'in_upper_state'")
    assert states["mean"].tolist() == pytest.approx([1 / 7, 1.0]) and states.runs.tolist() == [7, 7]


def test_the_page_follows_from_the_table(study, tmp_path, finish, claimed):
    answer = "{b} and {a}, before {base a}: {b - a}.\n{claim: noise helps}"
    file = study(claims=[CLAIM], question="Does it?", afterwards={"answer": answer})
    plan, table = read(file), tmp_path / "made" / TABLE
    out = claimed(plan, tmp_path / "out")
    for one in first_runs(plan):
        finish(one, out, 0.9 if one.value == 1e-3 else 0.1)  # the sweep's seeds have values far from those compared
    for one in later_runs(plan, {"a": 1e-3, "b": 1e-3}):
        finish(one, out, {"a": 0.5, "b": 0.6}[one.arm] + 0.01 * one.seed * (1 if one.arm == "a" else 1.1))
    rows = collect(plan, out)
    write_table(rows, table)
    page = conduct(file, table=table).read_text()
    mean = 0.101
    assert page.startswith(
        "# Study: study\n\n**Does it?**\n\n61.1 % and 51.0 %, before 10.0 %: +10.1 points (+9.9 to +10.3)."
    )
    assert "| b@0.001 | a@0.001 | 10.0→61.1 | 10.0→51.0 | +10.1 (+9.9 to +10.3) | **0.000**† |" in page
    assert "cannot go below 0.25" in page and ", 3 seeds, each" in page
    assert "14/14 runs" in page
    assert (table.parent / pages.CURVES).stat().st_size > 5000
    means = pd.read_csv(table.parent / pages.CONFIGURATIONS).set_index(["arm", "runs_of", "metric"])
    assert means.loc[("b@0.001", "study", "accuracy"), ["runs", "mean"]].tolist() == [3, 0.611]
    assert means.loc[("a@0.0001", "sweep", "accuracy"), ["runs", "mean"]].tolist() == [2, 0.1]
    metrics = set(means.index.get_level_values("metric"))
    assert "mean_reward" in metrics and not metrics & {"reward", "last_step"}, "what each step has is no result"
    found = pd.read_csv(table.parent / pages.COMPARISONS)
    assert found.difference.tolist() == pytest.approx([mean] * 3) and found.kind.tolist()[-1] == "claim"
    # With a run missing, the page says so and compares the remaining seeds.
    write_table(rows[(rows.arm != "b@0.001") | (rows.seed != 1)], table)
    page = conduct(file, table=table).read_text()
    assert "13/14 runs" in page and ", 2 seeds, each" in page
    write_table(rows[(rows.arm != "b@0.001") | (rows.seed != 2)], table)
    assert "| 10.0→50.5 | +10.0" in conduct(file, table=table).read_text(), "accuracies are of the seeds compared"
    write_table(rows[rows.seed >= 100], table)
    assert "8/14 runs" in (page := conduct(file, table=table).read_text()) and "points" not in page
    for wrong in ("{c}", "{a - b}", "{claim: other}"):
        with pytest.raises(StudyError, match=r"afterwards\.answer: .* names no"):
            write_table(rows, table)
            conduct(study(afterwards={"answer": wrong}), table=table)


# These tests are about the page over all studies.

PLAN = {
    "recipe": "recipe.yaml",
    "arms": {"a": {"quantization": "bf16"}, "b": {"quantization": "qerl_nvfp4"}},
    "seeds": [0, 1, 2],
    "sweep": {"key": "learning_rate", "values": [1e-4, 3e-4, 1e-3], "seeds": [100, 101], "common": 1e-4},
    "evaluations": {"greedy": {"tasks": "running_sum"}},
    "primary": "greedy",
    "comparisons": [["b", "a"]],
    "claims": [CLAIM, RATES],
    "afterwards": {"answer": "{b}, {b - a} more.\nAnd so on.", "untested": {"more steps help": "no run has them"}},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a folder with the plans ``one`` and ``two``."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("model_name_or_path: base\n")
    Path("studies").mkdir()
    for name in ("one", "two"):
        Path(f"studies/{name}.yaml").write_text(yaml.safe_dump({**PLAN, "question": f"what is {name}?"}))
    return Path("studies")


def of_the_sweep(gains=(0.2, 0.3)):
    """Yield rows of the sweep, by seed.

    3e-4 is the best rate of both arms, and ``b`` gains more from the largest rate.
    """
    for seed, gain in zip((100, 101), gains, strict=True):
        for value, a, b in (("0.0001", 0.1, 0.1), ("0.0003", 0.7, 0.8), ("0.001", 0.2, 0.1 + gain)):
            yield from ((f"a@{value}", seed, 60, "accuracy", a), (f"b@{value}", seed, 60, "accuracy", b))


def at_best(of_a, of_b):
    return [(f"{arm}@0.0003", *rest) for arm, *rest in accuracies(of_a, of_b)]


def test_the_page_over_all_studies(folder, rows_table):
    took = [("a@0.0003", 0, 60, "hours/NVIDIA H200", 0.25), ("b@0.0003", 1, 60, "hours/NVIDIA H200", 0.5)]
    rows = rows_table([*of_the_sweep(), *at_best([0.5] * 3, [0.6, 0.601, 0.602]), *took])
    write_table(rows, folder / "one" / TABLE)
    text = sum_up(folder).read_text()
    assert text == (folder / "README.md").read_text() and "18 runs, 0.8 H200-hours" in text
    assert "* [one](one/README.md): what is one?\n" in text
    assert "* Not run yet: [two](two.yaml)." in text
    assert (
        "1 of 1 pre-registered comparisons of accuracy are significant" in text
        and "over all 1, 1: b@0.0003 - a@" in text
    )
    assert "* supported†:\n  * noise helps (one)\n" in text
    # a gains 0.1 and b gains 0.2 and 0.3, which may be chance
    assert "* inconclusive:\n  * larger rates suit b (one)\n" in text
    assert "* not tested:\n  * more steps help (no run has them)\n" in text
    # 12 runs of the sweep and 6 at the best value are there, of 12 + 12; those at the common value are missing.
    page = (folder / "one/README.md").read_text()
    assert (
        "18/24 runs, 0.8 H200-hours." in page
        and "60.1 %, +10.1 points (+9.9 to +10.3) more.\nAnd so on." in page
        and not (folder / "two").exists()
    )


def test_what_is_significant_is_corrected_over_all_studies_too(folder, rows_table):
    """Check the correction over all studies: p is 0.034 in either, significant alone but not among two."""
    for name in ("one", "two"):
        rows = [*of_the_sweep(), *at_best([0.5] * 3, [0.6, 0.56, 0.62])]
        write_table(rows_table(rows), folder / name / TABLE)
    text = sum_up(folder).read_text()
    assert "2 of 2 pre-registered comparisons" in text and "corrected over all 2, 0.\n" in text
    assert "| **0.034**† |" in (folder / "two/README.md").read_text()


def test_a_folder_takes_no_options_and_holds_studies(folder, tmp_path):
    for options in (["--jobs", "2"], ["--dry-run"]):
        refused = CliRunner().invoke(app, ["study", str(folder), *options])
        assert refused.exit_code == 2 and "it takes no options" in refused.output
    assert not (folder / "README.md").exists()
    said = CliRunner().invoke(app, ["study", str(folder)])
    assert re.sub(r"\s", "", said.output) == "studies/README.md"
    with pytest.raises(StudyError, match="has no study file"):
        sum_up(tmp_path / "none")
