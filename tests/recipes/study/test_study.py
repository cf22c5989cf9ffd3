"""A study: what its file may say, which runs follow, what is done again, and the numbers of its page."""

import gzip
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.evaluate.request import check_tasks
from qerl_recipes.study import outline, results, table, there
from qerl_recipes.study.check import check
from qerl_recipes.study.conduct import conduct
from qerl_recipes.study.page import cell, wanted
from qerl_recipes.study.page import page as page_of
from qerl_recipes.study.plan import StudyError, best_values, first_runs, later_runs, read

ROOT = Path(__file__).parents[3]
LARGER = {"claim": "a larger rate suits b", "expect": "higher", "margin": 0.01, "metric": "sweep_gain"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"a": {}}}, "at least two"),
        ({"arms": {"a": {"seed": 1}, "b": {}}}, "arms.a: seed is set by the study"),
        ({"arms": {"a": {"learning_rate": 1e-3}, "b": {}}}, "arms.a: learning_rate is set by the study"),
        ({"arms": {"../a": {}, "b": {}}}, "becomes a folder's name"),
        ({"arms": {"a": {"beta": None}, "b": {}}}, "arms.a: beta is null, which no flag can say"),
        ({"comparisons": [["a", "a"]]}, "comparisons: a is compared with itself"),
        ({"comparisons": [["a", "b"], ["a", "b"]]}, "comparisons: each may stand there once"),
        ({"claims": [{"claim": "x", "pair": ["b", "b"], "expect": "higher", "margin": 1}]}, "claims: b is compared"),
        ({"sweep": {"key": "seed", "values": [1, 2], "seeds": [100]}}, "sweep.key: seed is set by the study"),
        ({"sweep": {"key": "beta", "values": [0.1, 0.10000001], "seeds": [100]}}, "differ in their first six digits"),
        (
            {"sweep": {"key": "beta", "values": [0.1, 0.2], "seeds": [100, 100]}},
            "sweep.seeds: each may stand there once",
        ),
        ({"comparisons": [["a", "c"]]}, "'c' is not one of the arms a, b"),
        ({"claims": [{"claim": "x", "pair": ["a", "c"], "expect": "higher", "margin": 1}]}, "claims: 'c' is not one"),
        ({"claims": [{"claim": "x", "pair": ["a", "b"], "expect": "higher", "margin": 0}]}, "claims.0.margin"),
        ({"sweep": None, "claims": [{**LARGER, "pair": ["b", "a"]}]}, "the metric sweep_gain needs a sweep"),
        ({"sweep": None, "afterwards": {"claims": [{**LARGER, "pair": ["b", "a"]}]}}, "sweep_gain needs a sweep"),
        ({"afterwards": {"claims": [{**LARGER, "pair": ["a", "c"]}]}}, "afterwards: 'c' is not one of the arms"),
        (
            {"afterwards": {"claims": [{**LARGER, "pair": ["b", "a"], "also": {"c": {"other.yaml": "c"}}}]}},
            "afterwards.claims: also names c, which its pair has not",
        ),
        ({"primary": "sampled"}, "'sampled' is not one of the evaluations greedy"),
        ({"seeds": [0, 0]}, "each may stand there once"),
        ({"seeds": [0, 100]}, "not be chosen on the seeds that are compared"),
        (
            {"sweep": {"key": "learning_rate", "values": [1e-4, 1e-3], "seeds": [100], "common": 1.0}},
            "1.0 is not one of the values",
        ),
        ({"arm": {}}, "arm: Extra inputs are not permitted"),
        ({"recipe": "nowhere.yaml"}, "recipe nowhere.yaml does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_study_that_cannot_be_run_is_refused_by_its_key(changes, message, study):
    with pytest.raises(StudyError, match=message):
        read(study(**changes))


def test_a_key_that_stands_twice_is_refused_in_the_plan_and_in_its_recipe(study):
    file = study()
    file.write_text(file.read_text() + "seeds: [7]\n")
    with pytest.raises(StudyError, match=r"seeds stands twice \(line \d+\); keep one"):
        read(file)
    plan = read(study())
    Path("recipe.yaml").write_text("beta: 0.0\nmodel_name_or_path: base\nbeta: 0.1\n")
    with pytest.raises(StudyError, match=r"recipe.yaml is not valid YAML: beta stands twice \(line 3\)"):
        plan.settled({})


def test_an_arm_may_be_another_one_and_more(study):
    content = yaml.safe_load(study(sweep=None).read_text())
    del content["arms"]
    arms = "arms:\n  a: &a {lora_r: 8, beta: 0.1}\n  b:\n    <<: *a\n    beta: 0.2\n"
    Path("study.yaml").write_text(arms + yaml.safe_dump(content))
    assert read(Path("study.yaml")).arms["b"] == {"lora_r": 8, "beta": 0.2}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("", "recipe recipe.yaml must be a YAML mapping"),
        ("- a\n", "recipe recipe.yaml must be a YAML mapping"),
        ("beta: 0.1\n", "arms.a has no model_name_or_path, nor has recipe.yaml"),
        ("model_name_or_path: null\n", "arms.a has no model_name_or_path"),
    ],
)
def test_a_recipe_of_no_keys_or_no_model_is_refused(recipe, message, study):
    file = study()
    Path("recipe.yaml").write_text(recipe)
    with pytest.raises(StudyError, match=message):
        read(file)


def test_of_equal_values_the_smaller_one_is_the_best_whatever_the_order_of_a_sum(study):
    plan = read(study(sweep={"key": "beta", "values": [0.2, 0.1], "seeds": [100, 101, 102]}))
    right = {0.1: (437, 400, 440), 0.2: (417, 385, 475)}  # of 500; the same sum, and not the same sum of floats
    assert sum(n / 500 for n in right[0.1]) < sum(n / 500 for n in right[0.2])
    found = {(arm, 100 + i, value): n / 500 for arm in "ab" for value, of in right.items() for i, n in enumerate(of)}
    assert best_values(plan, found) == {"a": 0.1, "b": 0.1}


def test_runs_that_were_asked_other_problems_are_not_compared(study, tmp_path, finish):
    plan, out = read(study(sweep=None)), tmp_path / "out"
    for one in first_runs(plan):
        finish(one, out, 0.5)

    def say(folder, problems):
        file = out / folder / "evaluation/greedy/evaluation.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "problems_sha256": {"running_sum": problems}}))

    for one in first_runs(plan):
        say(one.folder, "old")
    rows = results.collect(plan, out)
    assert len({metric for *_, metric, _ in rows if metric.startswith("problems/greedy/")}) == 1
    say("b/seed-1", "new")
    with pytest.raises(StudyError, match=r"evaluations.greedy: b/seed-1 was asked other problems than a/seed-0; put"):
        results.collect(plan, out)


def test_the_best_value_is_chosen_by_arm_on_seeds_of_its_own_and_then_compared(study, tmp_path, finish):
    plan = read(study())
    sweep = first_runs(plan)
    assert {(r.arm, r.seed, r.value) for r in sweep} == {
        (arm, seed, value) for arm in "ab" for seed in (100, 101) for value in (1e-4, 1e-3)
    }
    assert all(r.keys == {**plan.arms[r.arm], "learning_rate": r.value} for r in sweep)
    assert there.all_runs(plan, tmp_path) == sweep  # nothing is known yet
    accuracy = {("a", 100): (0.6, 0.2), ("a", 101): (0.2, 0.3), ("b", 100): (0.1, 0.3), ("b", 101): (0.1, 0.3)}
    for one in sweep:
        finish(one, tmp_path, accuracy[one.arm, one.seed][0 if one.value == 1e-4 else 1])
    best = best_values(plan, there.sweep_accuracies(plan, tmp_path))
    assert best == {"a": 1e-4, "b": 1e-3}
    later = later_runs(plan, best)
    # b's best is the common value: those runs serve both
    assert {(r.arm, r.value, r.kind) for r in later} == {
        ("a", 1e-4, "best"),
        ("b", 1e-3, "best"),
        ("a", 1e-3, "common"),
    }
    assert {r.seed for r in later} == {0, 1, 2} and len(later) == 9
    assert len(there.all_runs(plan, tmp_path)) == len(sweep) + 9


@pytest.mark.parametrize("file", sorted((ROOT / "recipes/studies").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_study_of_the_repository_can_be_planned(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = read(file)
    check(plan)
    for options in plan.evaluations.values():
        check_tasks([options["tasks"]])
    printed = CliRunner().invoke(app, ["study", str(file), "--dry-run"])
    assert printed.exit_code == 0 and all(f"| {arm} |" in printed.output for arm in plan.arms)
    assert f"x {len(plan.seeds)} seeds" in printed.output and "paired by seed" in printed.output


def test_the_run_that_the_page_begins_again_is_the_one_that_it_looks_up_in_the_table(monkeypatch):
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```bash\n(qerl train[^`]*zcat [^`]*)```", Path("recipes/studies.md").read_text())
    training, lookup, _ = block.replace("\\\n", " ").strip().splitlines()
    given = dict(itertools.pairwise(shlex.split(training)[2:]))
    file, pattern = re.fullmatch(r"zcat (\S+) \| grep '(\S+)'", lookup).groups()
    plan = read(Path(file).parent.with_suffix(".yaml"))
    rows = [line for line in gzip.decompress(Path(file).read_bytes()).decode().splitlines() if re.match(pattern, line)]
    assert [row.split(",")[2] for row in rows] == ["1", "2", "3"]
    label, seed = rows[0].split(",")[:2]
    assert plan.sweep is None  # so its runs are the first ones
    (run,) = [run for run in first_runs(plan) if (run.label, run.seed) == (label, int(seed))]
    keys = {**run.keys, "config": plan.recipe, "seed": seed, "output_dir": "runs/again"}
    assert {word for word in given if word.startswith("--")} == {f"--{key}" for key in keys}
    for key, value in keys.items():
        found = given[f"--{key}"]
        assert float(found) == value if isinstance(value, float) else found == str(value)


def test_the_plan_counts_runs_and_an_arm_that_train_would_refuse_is_named(study):
    plan = read(study())
    text = outline.outline(plan, Path("study.yaml"))
    assert f"= {len(first_runs(plan))}, for the best value" in text and "2 arms x 3 seeds (0, 1, 2) = 6" in text
    assert "greedy (primary: decides): tasks: running_sum" in text and "judged by" in text.lower() and "b - a" in text
    for keys, message in (
        ({"learning_rat": 1}, r"arms\.b: .*learning_rat"),
        ({"noise_mode": "corrected", "vllm_importance_sampling_correction": False}, r"arms\.b: noise_mode: corrected"),
    ):
        with pytest.raises(StudyError, match=message):
            check(read(study(arms={"a": {"quantization": "bf16"}, "b": keys})))


def test_what_the_steps_of_a_run_come_to():
    steps = [
        {"step": i + 1, "reward": r, "entropy": e, "step_seconds": 2.0}
        for i, (r, e) in enumerate([(0.0, 3.0), (0.2, 2.0), (0.4, 1.0), (0.6, 1.0), (0.8, 1.0), (1.0, 0.0)])
    ]
    found = results.summaries(steps, 0.5)
    assert found["reward_area"] == pytest.approx(0.5) and found["entropy_start"] == pytest.approx(1.6)
    assert "reward_gain" not in found and "clipped_end" not in found  # too few steps, and none of the metric
    grown = [{"step": i, "reward": i / 100, "completion_clipped": i / 100} for i in range(1, 21)]
    grown = [each for step in grown for each in (step, {"step": step["step"] + 0.5, "completion_clipped": 9.0})]
    come = results.summaries(grown, None)  # 0.11 to 0.20 less 0.01 to 0.05, of the steps that a rollout was scored in
    assert (come["reward_gain"], come["clipped_end"]) == (pytest.approx(0.155 - 0.03), pytest.approx(0.18))
    assert found["steps_to_target"] == 6 and found["seconds_to_target"] == pytest.approx(12.0)
    assert "steps_to_target" not in results.summaries(steps, 0.9) and "tokens_per_s" not in found
    both = results.summaries([{**step, "sampled_entropy": 2.0 * step["step"]} for step in steps], None)
    assert (both["entropy_start"], both["sampled_entropy_start"]) == (found["entropy_start"], 6.0)
    assert both["sampled_entropy_end"] == 8.0 and "sampled_entropy_start" not in found
    speeds = [{**step, "rollout_tokens_per_s": 100.0 * step["step"]} for step in steps[:5]]
    assert results.summaries(speeds, None)["tokens_per_s"] == 300.0
    # a rollout that serves two steps is scored in the first of them; the second takes its time all the same
    between = [{"step": 2 * s["step"], "entropy": 9.0, "step_seconds": 1.0} for s in steps]
    halves = [each for s, b in zip(steps, between, strict=True) for each in ({**s, "step": 2 * s["step"] - 1}, b)]
    found = results.summaries(halves, 0.5)
    assert found["reward_area"] == pytest.approx(0.5)
    assert (found["steps_to_target"], found["seconds_to_target"]) == (11, pytest.approx(6 * 2.0 + 5 * 1.0))


def test_of_each_metric_the_last_step_that_has_it_counts():
    rows = [("a", 0, 1, "reward", 0.1), ("a", 0, 2, "reward", 0.7), ("b", 5, 2, "seen", 1.0), ("b", 5, 1, "seen", 0.2)]
    found = results.final(rows)
    assert found["reward"] == {"a": {0: 0.7}} and found["seen"] == {"b": {5: 1.0}}
    assert found["absent"] == {}


def test_a_mean_over_fewer_runs_than_there_are_says_so():
    assert cell([30.0, 34.0], 5) == "32 ± 2.8 (2 of 5)" and cell([30.0], 5) == "30 (1 of 5)"
    assert cell([30.0, 34.0], 2) == "32 ± 2.8" and cell([], 5) == ""
    assert (wanted("steps_to_target", 5), wanted("base_accuracy", 5), wanted("base_accuracy", 0)) == (5, 1, 0)


def test_the_page_follows_from_the_table_alone_and_compares_the_seeds_of_the_study(study, tmp_path, finish):
    file = study()
    plan, out = read(file), tmp_path / "out"
    for one in first_runs(plan):
        finish(one, out, 0.9 if one.value == 1e-3 else 0.1)  # the sweep's seeds: far from what is compared
    for one in later_runs(plan, {"a": 1e-3, "b": 1e-3}):
        finish(one, out, {"a": 0.5, "b": 0.6}[one.arm] + 0.01 * one.seed * (1 if one.arm == "a" else 1.1))
    rows = results.collect(plan, out)
    table.write_table(rows, out / table.TABLE)
    written = (out / table.TABLE).read_bytes()
    again = table.read_table(out / table.TABLE)
    table.write_table(again, out / table.TABLE)
    assert (out / table.TABLE).read_bytes() == written
    page = conduct(file, table=out / table.TABLE).read_text()
    (compared,) = results.comparisons(plan, results.final(again))["best"]
    assert (compared.a, compared.b, compared.seeds) == ("b", "a", 3)
    assert compared.difference == pytest.approx(0.101) and "+10.1%" in page
    assert "| b@0.001 | 3 | 0.611 ± 0.011 |" in page and "0.9" not in page.split("## All arms")[0]
    assert "## learning_rate: accuracy over the seeds 100, 101" in page and "| a | 0.1 ± 0 | 0.9 ± 0 |" in page
    assert "over 3 seeds at least 0.25." in page and "read the unpaired interval" in page
    without_bf16 = read(study(arms={"a": {"quantization": "nf4"}, "b": {"quantization": "qerl_nvfp4"}}))
    assert "read the unpaired interval" not in page_of(without_bf16, again, "", "")
    some = [row for row in again if not (row[0] == "a@0.001" and row[1] == 1 and row[3] == "reward_area")]
    made = page_of(plan, some, "", "")  # one of three runs lacks it
    assert " (2 of 3) |" in made and "of 3)" not in page
    assert (out / "curves_best.png").stat().st_size > 5000
    for content in (b"no table", gzip.compress(b"arm,seed,metric,step,value\na,0,1,2,3\n")):
        (out / table.TABLE).write_bytes(content)
        with pytest.raises(StudyError, match="is no table of a study"):
            conduct(file, table=out / table.TABLE)
