"""A study that takes arms from another one's table: what it runs, what its table holds, and when it must not."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.study import results, table
from qerl_recipes.study.check import check
from qerl_recipes.study.conduct import conduct
from qerl_recipes.study.plan import StudyError, first_runs, read
from qerl_recipes.study.taken import taken_rows

RECIPE = {"model_name_or_path": "base", "quantization": "bf16", "learning_rate": 1e-3, "lora_r": 32}
TAKEN = {"study": "study.yaml", "arms": {"r32": "b@0.001"}}
RANKS = {"r8": {"quantization": "qerl_nvfp4", "lora_r": 8}, "r32": {"quantization": "qerl_nvfp4", "lora_r": 32}}
ALIKE = {"alike": {"tasks": "running_sum"}}  # the primary evaluation of study.yaml under another name
SMALLER = {"arms": RANKS, "sweep": None, "comparisons": [["r8", "r32"]], "taken": TAKEN}


@pytest.fixture
def other(study, finish, tmp_path):
    """study.yaml, whose arms have run at 1e-3 with every seed, and its table beside it."""
    plan = read(study(arms={"a": {}, "b": {"quantization": "qerl_nvfp4"}}))
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    for one in first_runs(plan):
        finish(one, tmp_path / "out", 0.2 if one.value == 1e-4 else 0.5)
    for i, one in enumerate(r for r in results.all_runs(plan, tmp_path / "out") if r.kind != "sweep"):
        finish(one, tmp_path / "out", 0.3 + i / 100)
    rows = [*results.collect(plan, tmp_path / "out"), ("b@0.001", 0, 2, "hours/H200", 1.0)]
    table.write_table(rows, Path("study") / table.TABLE)
    return {(seed, metric): value for arm, seed, _, metric, value in rows if arm == "b@0.001"}


@pytest.fixture
def smaller(study, other):
    """smaller(**changes): a study of ranks that takes one arm from study.yaml."""
    first = Path("study.yaml").read_text()

    def write(**changes):
        file = study(**{**SMALLER, **changes}).rename("smaller.yaml")
        Path("study.yaml").write_text(first)
        return file

    return write


def test_an_arm_that_is_there_already_is_not_run_again_and_stands_in_the_table(smaller, other, finish, tmp_path):
    plan = read(smaller())
    check(plan)
    assert {run.arm for run in first_runs(plan)} == {"r8"}
    for one in first_runs(plan):
        finish(one, tmp_path / "small", 0.25)
    rows = results.collect(plan, tmp_path / "small")
    accuracies = results.final(rows)["accuracy"]
    expected = {seed: other[seed, "accuracy"] for seed in (0, 1, 2)}  # not those of the sweep
    assert accuracies["r32"] == pytest.approx(expected)
    assert accuracies["r8"] == dict.fromkeys((0, 1, 2), 0.25)
    assert not any(metric.startswith(table.HOURS) for *_, metric, _ in rows)  # they are counted where they ran
    table.write_table(rows, tmp_path / "small" / table.TABLE)
    made = conduct(Path("smaller.yaml"), table=tmp_path / "small" / table.TABLE).read_text()
    assert "All 3 runs are there." in made and "Taken from study.yaml" in made and "r32 is b@0.001" in made
    assert "| r8 | r32 | 3 |" in made
    said = CliRunner().invoke(app, ["study", "smaller.yaml", "--dry-run"])
    assert said.exit_code == 0 and "1 arms x 3 seeds" in said.output and "r32 is b@0.001" in said.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taken": {**TAKEN, "arms": {"r16": "b@0.001"}}}, "r16 is not one of the arms r32, r8"),
        ({"taken": {**TAKEN, "arms": {}}}, "taken.arms"),
        ({"taken": {**TAKEN, "study": "nowhere.yaml"}}, "no study file nowhere.yaml"),
        ({"taken": {**TAKEN, "arms": {"r32": "b"}}}, "has no b; with a sweep"),
        ({"taken": {**TAKEN, "arms": {"r32": "c@0.001"}}}, "has no c@0.001"),
        ({"taken": {**TAKEN, "arms": {"r32": "b@0.0001"}}}, "b@0.0001 of study.yaml differs in learning_rate"),
        ({"taken": {**TAKEN, "arms": {"r32": "a@0.001"}}}, "differs in quantization"),
        ({"taken": {**TAKEN, "arms": {"r8": "b@0.001"}}}, "differs in lora_r"),
        ({"taken": {**TAKEN, "arms": {"r32": "b@"}}}, "has no b; with a sweep"),
        ({"taken": {**TAKEN, "arms": {"r32": "b@0.001@2"}}}, "b@0.001@2 is of no value .* 0.0001, 0.001$"),
        ({"taken": {**TAKEN, "arms": {"r32": "b@fast"}}}, "b@fast is of no value"),
        ({"taken": {**TAKEN, "arms": {"r32": "b@0.001", "r8": "b@0.001"}}}, "r32 and r8 are both b@0.001"),
        ({"arms": {**RANKS, "r32": {**RANKS["r32"], "max_steps": None}}}, "differs in max_steps"),
        ({"evaluations": {"greedy": {"tasks": "other"}}}, "primary evaluation of study.yaml is another"),
        (
            {"evaluations": {**ALIKE, "hard": {"tasks": "x"}}, "primary": "alike"},
            "no evaluation hard, or another of that",
        ),
        ({"evaluations": {**ALIKE, "greedy": {"tasks": "x"}}, "primary": "alike"}, "no evaluation greedy, or another"),
        ({"target_reward": 0.75}, "target_reward of study.yaml is 0.5, and here 0.75"),
        ({"seeds": [0, 1, 7]}, "no accuracy of b@0.001 with seed 7"),
        ({"sweep": {"key": "beta", "values": [0.0, 0.1], "seeds": [100]}}, "with a sweep are all run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_arm_whose_runs_would_not_be_the_same_is_not_taken(changes, message, smaller):
    with pytest.raises(StudyError, match=message):
        taken_rows(read(smaller(**changes)))


def test_the_primary_evaluation_may_have_another_name(smaller, other):
    rows = taken_rows(read(smaller(evaluations=ALIKE, primary="alike")))
    assert results.final(rows)["accuracy"]["r32"] == pytest.approx(
        {seed: other[seed, "accuracy"] for seed in (0, 1, 2)}
    )


def test_a_study_that_has_not_run_has_nothing_to_take(smaller):
    (Path("study") / table.TABLE).unlink()
    with pytest.raises(StudyError, match="run that study first"):
        check(read(smaller()))


def test_the_committed_studies_take_what_is_the_same(monkeypatch):
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    found = {file.stem: read(file) for file in Path("recipes/studies").glob("*.yaml")}
    taken = {name: taken_rows(plan) for name, plan in found.items() if plan.taken is not None}
    assert set(taken) == {"smollm2_noise", "smollm2_rank", "smollm2_scales"} and all(taken.values())
