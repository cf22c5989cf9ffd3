"""Test a study file: what is refused, which runs it plans, and what it would run."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.evaluate.request import check_tasks
from qerl_recipes.study.check import check
from qerl_recipes.study.inventory import all_runs
from qerl_recipes.study.plan import StudyError, best_values, first_runs, later_runs, read

ROOT = Path(__file__).parents[3]
PAIR = {"claim": "x", "pair": ["b", "a"], "expect": "higher", "margin": 0.01}
GAIN = {**PAIR, "metric": "sweep_gain"}
SWEEP = {"key": "beta", "values": [0.1, 0.2], "seeds": [100]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"a": {}}}, "at least two"),
        ({"arms": {"a": {"seed": 1}, "b": {}}}, "arms.a: seed is set by the study"),
        ({"arms": {"a": {"learning_rate": 1e-3}, "b": {}}}, "arms.a: learning_rate is set by the study"),
        ({"arms": {"../a": {}, "b": {}}}, "becomes a folder's name"),
        ({"arms": {"a": {"beta": None}, "b": {}}}, "arms.a: beta is null, which cannot override"),
        ({"arms": {"a": {"trainer": "verl"}, "b": {}}}, "arms.a: trainer is 'verl'; it is one of qerl, trl"),
        ({"comparisons": [["a", "a"]]}, "comparisons: a is compared with itself"),
        ({"comparisons": [["a", "b"], ["a", "b"]]}, "comparisons: each may stand there once"),
        ({"comparisons": [["a", "c"]]}, "'c' is not one of the arms a, b"),
        ({"claims": [{**PAIR, "pair": ["b", "b"]}]}, "claims: b is compared"),
        ({"claims": [{**PAIR, "pair": ["a", "c"]}]}, "claims: 'c' is not one"),
        ({"claims": [{**PAIR, "margin": 0}]}, "claims.0.margin"),
        ({"claims": [{**PAIR, "margin": 1}]}, "margin is 1, and accuracy is a share; 0.01 is one point of 100"),
        ({"sweep": None, "claims": [GAIN]}, "the metric sweep_gain needs a sweep"),
        ({"sweep": None, "afterwards": {"claims": [GAIN]}}, "sweep_gain needs a sweep"),
        ({"afterwards": {"claims": [{**PAIR, "pair": ["a", "c"]}]}}, "afterwards.claims: 'c' is not one of the arms"),
        (
            {"afterwards": {"claims": [{**PAIR, "also": {"c": {"o.yaml": "c"}}}]}},
            "also names c, which its pair has not",
        ),
        ({"afterwards": {"plot": {"arms": ["c"]}}}, "afterwards.plot: 'c' is not one of the arms"),
        ({"sweep": {**SWEEP, "key": "seed"}}, "sweep.key: seed is set by the study"),
        ({"sweep": {**SWEEP, "values": [0.1, 0.10000001]}}, "sweep.values: each may stand there once .*six digits"),
        ({"sweep": {**SWEEP, "seeds": [100, 100]}}, "sweep.seeds: each may stand there once"),
        ({"sweep": {**SWEEP, "common": 1.0}}, "1.0 is not one of the values"),
        ({"taken": {"study": "o.yaml", "arms": {"a": "a"}}}, "with a sweep are all run"),
        ({"sweep": None, "taken": {"study": "o.yaml", "arms": {"c": "a"}}}, "taken.arms: 'c' is not one of the arms"),
        ({"sweep": None, "taken": {"study": "o.yaml", "arms": {}}}, "taken.arms"),
        ({"primary": "sampled"}, "'sampled' is not one of the evaluations greedy"),
        ({"seeds": [0, 0]}, "seeds: each may stand there once"),
        ({"seeds": [0, 100]}, "not be chosen on the seeds that are compared"),
        ({"arm": {}}, "arm: Extra inputs are not permitted"),
        ({"recipe": "nowhere.yaml"}, "recipe nowhere.yaml does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(changes, message, study):
    with pytest.raises(StudyError, match=message):
        read(study(**changes))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("", "recipe recipe.yaml must be a YAML mapping"),
        ("- a\n", "recipe recipe.yaml must be a YAML mapping"),
        ("beta: 0.1\n", "arms.a has no model_name_or_path, nor has recipe.yaml"),
        ("model_name_or_path: null\n", "arms.a has no model_name_or_path"),
        (
            "model_name_or_path: base\nbeta: 0.1\nbeta: 0.2\n",
            r"recipe.yaml is not valid YAML: beta stands twice \(line 3\)",
        ),
    ],
)
def test_refused_recipe(recipe, message, study):
    file = study()
    Path("recipe.yaml").write_text(recipe)
    with pytest.raises(StudyError, match=message):
        read(file)


def test_of_equal_values_the_smaller_one_is_the_best(study):
    plan = read(study(sweep={"key": "beta", "values": [0.2, 0.1], "seeds": [100, 101, 102]}))
    # of 500 problems; the sums are equal, but not as sums of floats
    right = {0.1: (437, 400, 440), 0.2: (417, 385, 475)}
    assert sum(n / 500 for n in right[0.1]) < sum(n / 500 for n in right[0.2])
    found = {(arm, 100 + i, value): n / 500 for arm in "ab" for value, of in right.items() for i, n in enumerate(of)}
    assert best_values(plan, found) == {"a": 0.1, "b": 0.1}


def test_the_best_value_is_chosen_on_seeds_of_its_own(study, tmp_path, finish):
    plan = read(study())
    sweep = first_runs(plan)
    assert {(r.arm, r.seed, r.value) for r in sweep} == {
        (arm, seed, value) for arm in "ab" for seed in (100, 101) for value in (1e-4, 1e-3)
    }
    assert all(r.keys == {**plan.arms[r.arm], "learning_rate": r.value} for r in sweep)
    assert all_runs(plan, tmp_path) == sweep  # no sweep result is known yet
    accuracy = {("a", 100): (0.6, 0.2), ("a", 101): (0.2, 0.3), ("b", 100): (0.1, 0.3), ("b", 101): (0.1, 0.3)}
    for one in sweep:
        finish(one, tmp_path, accuracy[one.arm, one.seed][0 if one.value == 1e-4 else 1])
    later = all_runs(plan, tmp_path)[len(sweep) :]
    assert later == later_runs(plan, {"a": 1e-4, "b": 1e-3})
    # b's best value is the common value, so the same runs serve both
    wanted = {("a", 1e-4, "best"), ("b", 1e-3, "best"), ("a", 1e-3, "common")}
    assert {(r.arm, r.value, r.kind) for r in later} == wanted
    assert {r.seed for r in later} == {0, 1, 2} and len(later) == 9


def test_committed_studies_can_be_planned(monkeypatch):
    monkeypatch.chdir(ROOT)
    for file in sorted((ROOT / "recipes/studies").glob("*.yaml")):
        plan = read(file)
        for options in plan.evaluations.values():
            check_tasks([options["tasks"]])
    printed = CliRunner().invoke(app, ["study", str(file), "--dry-run"])
    assert printed.exit_code == 0 and all(f"| {arm} |" in printed.output for arm in plan.arms)
    assert f"x {len(plan.seeds)} seeds" in printed.output and "paired by seed" in printed.output


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"learning_rat": 1}, r"arms\.b: .*learning_rat"),
        ({"temperature": 0.0}, "this recipe cannot run: .*temperature must be at least"),
    ],
)
def test_arms_that_train_would_refuse(keys, message, study):
    with pytest.raises(StudyError, match=message):
        check(read(study(arms={"a": {"quantization": "bf16"}, "b": {"quantization": "qerl_nvfp4", **keys}})))
