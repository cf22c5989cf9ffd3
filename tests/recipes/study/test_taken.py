"""A study that takes arms from another one's table: what it runs, what its table holds, and when it must not."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.study import finished, processes, results, table
from qerl_recipes.study import run as runner
from qerl_recipes.study.check import check
from qerl_recipes.study.conduct import conduct
from qerl_recipes.study.plan import StudyError, first_runs, read
from qerl_recipes.study.taken import taken_rows
from qerl_vllm_plugin.adapter.folder import base_hash

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
    tmp_path.joinpath("out").mkdir()
    runner._claim(plan, tmp_path / "out")
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


def test_a_study_that_takes_an_arm_goes_on_from_its_own_table(smaller, other, finish, tmp_path):
    plan = read(smaller())
    tmp_path.joinpath("small").mkdir()
    runner._claim(plan, tmp_path / "small")
    for one in first_runs(plan):
        finish(one, tmp_path / "small", 0.25)
    rows = results.collect(plan, tmp_path / "small")
    rows += [("r8", seed, 2, f"{table.BASE}000000000000", 1.0) for seed in (0, 1, 2)]
    assert any(arm == "r32" for arm, *_ in rows)
    table.write_table(rows, tmp_path / "small.csv.gz")
    finished.keep(plan, tmp_path / "small.csv.gz", tmp_path)
    assert finished.kept(tmp_path).keys() == {("r8", seed) for seed in (0, 1, 2)}  # r32 is taken from the other again


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
        ({"arms": {**RANKS, "r32": {**RANKS["r32"], "max_steps": 7}}}, "differs in max_steps"),
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


@pytest.fixture
def model():
    """The recipe's base: model(seed) writes other weights into it -> its hash, as far as a table has it."""

    def write(seed):
        Path("base").mkdir(exist_ok=True)
        Path("base/config.json").write_text("{}")
        save_file({"w": torch.full((8,), float(seed))}, "base/model.safetensors")
        return base_hash("base")[:12]

    return write


def test_an_arm_is_taken_where_the_base_is_the_one_that_it_was_trained_on(smaller, other, model):
    plan, rows = read(smaller()), table.read_table(Path("study") / table.TABLE)
    check(plan)  # no folder of that name: a model of the hub, known by its name
    first = model(1)
    with pytest.raises(StudyError, match=rf"r32: b@0.001 does not say on which base.*now is {first}; take r32 out"):
        check(plan)
    told = [("b@0.001", seed, 2, f"{table.BASE}{first}", 1.0) for seed in (0, 1, 2)]
    table.write_table([*rows, *told], Path("study") / table.TABLE)
    check(plan)
    second = model(2)
    with pytest.raises(
        StudyError, match=rf"trained on another base \({first}\), and the one that is there now is {second}"
    ):
        check(plan)
    both = [("b@0.001", 0, 2, f"{table.BASE}{second}", 1.0), *told[1:]]
    table.write_table([*rows, *both], Path("study") / table.TABLE)
    with pytest.raises(StudyError, match="trained on another base"):
        check(plan)


def test_a_study_does_not_go_on_where_its_base_has_been_made_anew(study, finish, model, tmp_path, monkeypatch):
    plan, out = read(study(sweep=None, seeds=[0, 1])), tmp_path / "out"
    began, calls = model(1), []

    def call(self, arguments, log, gpu, beside=()):
        calls.append(arguments[0])
        write_text(log, "$ qerl\nit said this\n")
        if arguments[0] == "train":
            write_text(log.parent / "metrics.jsonl", json.dumps({"step": 1, "reward": 1.0}) + "\n")
            (log.parent / "adapter").mkdir()
            write_text(log.parent / "adapter/qerl_state.json", json.dumps({"base_hash": base_hash("base")}))
            return 0
        if len(calls) > 4:
            return 1
        folder = Path(json.loads(arguments[1])[0]["output_dir"])
        folder.mkdir(parents=True)
        arms = {"base": {"accuracy": 0.1}, "adapter": {"accuracy": 0.5}}
        write_text(folder / "evaluation.json", json.dumps({"tasks": {"running_sum": arms}}))
        return 0

    monkeypatch.setattr(processes.Machine, "call", call)
    with pytest.raises(StudyError, match="ended with 1"):
        runner.run(plan, out)
    told = {(arm, metric) for arm, _, _, metric, value in results.collect(plan, out) if metric.startswith(table.BASE)}
    assert told == {("a", f"base/{began}"), ("b", f"base/{began}")}
    calls.clear()
    now = model(2)
    with pytest.raises(StudyError, match=rf"a/seed-0 was trained on base while that .*\(base {began}, now {now}\)"):
        runner.run(plan, out)
    assert not calls
    model(1)
    assert runner.run(plan, out) and calls == ["evaluate-each"] * 2  # what was missing


@pytest.mark.parametrize("edited", ["recipe.yaml", "another recipe", "evaluations"])
def test_an_arm_whose_table_is_of_other_keys_than_its_study_has_now_is_refused(edited, smaller, other, tmp_path):
    """Both studies would agree with each other, and with nothing that has run."""
    file = smaller()
    assert not any(metric.startswith(table.PLAN) for *_, metric, _ in taken_rows(read(file)))
    if edited == "recipe.yaml":
        Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "max_steps": 7}))
    elif edited == "evaluations":
        for path in (file, Path("study.yaml")):
            content = yaml.safe_load(path.read_text())
            content["evaluations"] = {"greedy": {"tasks": "running_sum", "max_new_tokens": 9}}
            path.write_text(yaml.safe_dump(content))
    else:
        Path("second.yaml").write_text(yaml.safe_dump({**RECIPE, "max_steps": 7}))
        for path in (file, Path("study.yaml")):
            path.write_text(path.read_text().replace("recipe: recipe.yaml", "recipe: second.yaml"))
    with pytest.raises(StudyError, match=r"taken\.arms\.r32: b@0\.001/seed-0 of .* was made by other keys"):
        taken_rows(read(file))


def test_the_problems_of_a_taken_arm_are_those_of_the_primary_evaluation_whatever_it_is_called(
    smaller, other, finish, tmp_path
):
    file = Path("study") / table.TABLE
    names = ("greedy/first", "alike/second")
    of_both = [("b@0.001", 0, 2, f"{what}/{name}", 1.0) for what in ("problems", "by_problem") for name in names]
    table.write_table([*table.read_table(file), *of_both], file)
    plan, out = read(smaller(evaluations=ALIKE, primary="alike")), tmp_path / "small"
    taken = {row[3] for row in taken_rows(plan) if row[3].startswith((table.PROBLEMS, table.BY_PROBLEM))}
    assert taken == {"problems/alike/first", "by_problem/alike/first"}
    for one in first_runs(plan):
        finish(one, out, 0.25)
        (out / one.folder / "evaluation/greedy").rename(out / one.folder / "evaluation/alike")
    results.collect(plan, out)
    found = out / "r8/seed-1/evaluation/alike/evaluation.json"
    found.write_text(json.dumps({**json.loads(found.read_text()), "problems_sha256": {"running_sum": "others"}}))
    with pytest.raises(StudyError, match=r"evaluations.alike: r8/seed-1 was asked other problems than r32/seed-0"):
        results.collect(plan, out)


def test_an_arm_is_not_taken_from_a_table_that_does_not_say_its_keys(smaller, other):
    """One of before, or the table of a study that has taken the arm itself, from a third one."""
    plan, file = read(smaller()), Path("study") / table.TABLE
    rows = table.read_table(file)
    table.write_table([row for row in rows if row[1] != 1 or not row[3].startswith(table.PLAN)], file)
    with pytest.raises(StudyError, match=r"b@0.001/seed-1 of .* does not say that it was made by the keys"):
        taken_rows(plan)
