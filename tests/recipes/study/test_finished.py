"""A study that goes on from a table: what it runs then, what its own table holds, and which tables it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.study import finished, results, table, there, work
from qerl_recipes.study import run as runner
from qerl_recipes.study.conduct import conduct
from qerl_recipes.study.plan import StudyError, first_runs, later_runs, read
from qerl_vllm_plugin.adapter.folder import base_hash

RECIPE = {"model_name_or_path": "base", "quantization": "bf16", "learning_rate": 1e-3, "lora_r": 32}


def make_base(value):
    """A checkpoint whose weights are ``value`` -> its name in a table."""
    Path("base").mkdir(exist_ok=True)
    Path("base/config.json").write_text("{}")
    save_file({"w": torch.full((4,), value)}, "base/model.safetensors")
    return base_hash(Path("base"))[:12]


def say_base(folder):
    """As the adapter of a run does."""
    (folder / "adapter").mkdir()
    (folder / "adapter" / "qerl_state.json").write_text(json.dumps({"base_hash": base_hash(Path("base"))}))


def claimed(plan, folder):
    """The folder, as a study that begins in it leaves it."""
    folder.mkdir()
    runner._claim(plan, folder)
    return folder


@pytest.fixture
def published(study, finish, tmp_path):
    """The study, and its table: the sweep, and of the later runs the first three."""
    plan = read(study())
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    name, out = make_base(1.0), claimed(plan, tmp_path / "elsewhere")

    def run(one, accuracy):
        finish(one, out, accuracy, rewards=(0.1, accuracy))
        say_base(out / one.folder)

    for one in first_runs(plan):
        run(one, 0.5 if one.value == (1e-4 if one.arm == "a" else 1e-3) else 0.2)
    later = [one for one in there.all_runs(plan, out) if one.kind != "sweep"]
    for i, one in enumerate(later[:3]):
        run(one, 0.3 + i / 100)
    rows = results.collect(plan, out)
    assert {metric for *_, metric, _ in rows if metric.startswith("base/")} == {f"base/{name}"}
    file = tmp_path / "published" / table.TABLE
    table.write_table(rows, file)
    return plan, file, [one.folder for one in later[3:]]


def fake(monkeypatch, finish, out):
    """Trainings and evaluations that leave at once what they make -> the runs that were trained."""
    trained = []

    def train(study, runs, root, *_):
        for run in runs:
            trained.append(run.folder)
            finish(run, root, 0.9)
            say_base(root / run.folder)
        return []

    monkeypatch.setattr(work, "_train", train)
    monkeypatch.setattr(runner, "check", lambda study: None)
    return trained


def test_the_runs_of_a_table_are_not_made_again_and_stand_in_the_new_one(published, finish, tmp_path, monkeypatch):
    _, file, missing = published
    out = tmp_path / "out"
    trained = fake(monkeypatch, finish, out)
    conduct(Path("study.yaml"), out, finished=file)
    assert sorted(trained) == sorted(missing) and missing
    before, after = table.read_table(file), table.read_table(out / table.TABLE)
    assert set(before) < set(after)
    assert {f"{label}/seed-{seed}" for label, seed, *_ in set(after) - set(before)} == set(missing)
    assert len(after) == len(set(after))
    trained.clear()
    conduct(Path("study.yaml"), out)  # the next call knows them without the option
    assert trained == [] and table.read_table(out / table.TABLE) == after


def test_what_the_table_says_counts_above_what_lies_in_the_folder(published, finish, tmp_path, monkeypatch):
    plan, file, _ = published
    out = tmp_path / "out"
    fake(monkeypatch, finish, out)
    conduct(Path("study.yaml"), out, finished=file)
    finish(first_runs(plan)[0], out, 0.99)
    assert table.read_table(out / table.TABLE) == sorted(results.collect(plan, out))


def test_where_a_table_has_every_run_no_evaluation_needs_to_be_possible(published, finish, tmp_path, monkeypatch):
    _, file, _ = published
    fake(monkeypatch, finish, tmp_path / "first")
    conduct(Path("study.yaml"), tmp_path / "first", finished=file)
    monkeypatch.setattr(runner, "check_tasks", lambda study: pytest.fail("looks for the problems of no evaluation"))
    conduct(Path("study.yaml"), tmp_path / "second", finished=tmp_path / "first" / table.TABLE)


def test_another_table_takes_the_place_of_the_one_before(published, tmp_path):
    plan, file, _ = published
    finished.keep(plan, file, tmp_path)
    before = finished.kept(tmp_path)
    gone = next(iter(before))
    table.write_table(changed(table.read_table(file), gone, lambda row: None), file)
    finished.keep(plan, file, tmp_path)
    assert before.keys() - finished.kept(tmp_path).keys() == {gone}


def changed(rows, key, change):
    """Rows in which those of the run ``key`` are other ones; ``change`` gives a row's successor, or None for none."""
    new = [change(row) if row[:2] == key else row for row in rows]
    return [row for row in new if row is not None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: ("c@0.001", *row[1:]), "is no run of this study"),
        (lambda row: (row[0], 77, *row[2:]), "is no run of this study"),
        (lambda row: (row[0].partition("@")[0] + "@0.5", *row[1:]), "is no run of this study"),
        (lambda row: (row[0].partition("@")[0], *row[1:]), "is no run of this study"),
        (lambda row: None if row[3] == "accuracy" else row, "has no accuracy; leave --finished out"),
        (lambda row: None if row[3].startswith("base/") else row, r"has no base/\.\.\."),
        (lambda row: None if row[3].startswith("plan/") else row, r"has no plan/\.\.\."),
        (lambda row: (*row[:3], "plan/000000000000", 1.0) if row[3].startswith("plan/") else row, "made by other keys"),
        (lambda row: (*row[:3], "base/000000000000", 1.0) if row[3].startswith("base/") else row, "another base"),
    ],
)
def test_a_table_that_is_not_of_this_study_is_refused_and_nothing_is_kept(change, message, published, tmp_path):
    plan, file, _ = published
    rows = table.read_table(file)
    table.write_table(changed(rows, rows[-1][:2], change), file)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(StudyError, match=message):
        finished.keep(plan, file, out)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("target", [0.4, 0.95, None])
def test_runs_that_reached_another_target_are_refused(target, study, finish, tmp_path):
    """The rewards are 0.1 and 0.9 by turns: of five in a row 0.42 or 0.58 on average, from the fifth on."""
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    make_base(1.0)
    plan, out = read(study(sweep=None)), claimed(read(study(sweep=None)), tmp_path / "elsewhere")
    for one in first_runs(plan):
        finish(one, out, 0.5, rewards=[0.1, 0.9] * 4)
        say_base(out / one.folder)
    file, page = tmp_path / "kept" / table.TABLE, tmp_path / "kept" / "README.md"
    table.write_table(results.collect(plan, out), file)
    conduct(Path("study.yaml"), table=file)
    before = page.read_text()
    assert "steps_to_target: until the mean reward of 5 steps was 0.5." in before and "| 6 ± 0 |" in before
    changed = study(sweep=None, target_reward=target)
    for refused in (
        lambda: finished.keep(read(changed), file, tmp_path),
        lambda: conduct(changed, table=file),
    ):
        with pytest.raises(StudyError, match="reached its target at another step than follows from target_reward"):
            refused()
    assert page.read_text() == before
    finished.keep(read(study(sweep=None, target_reward=0.55)), file, tmp_path)  # reached at the same step


def test_a_reward_that_a_table_has_rounded_below_the_target_has_reached_it(study):
    plan = read(study(sweep=None, target_reward=21 / 256))
    rows = [("a", 0, step, "reward", float(f"{21 / 256:.6g}")) for step in range(1, 8)]
    assert rows[0][4] < 21 / 256
    finished.refuse_other_target(plan, [*rows, ("a", 0, 7, "steps_to_target", 5.0)], "here")
    with pytest.raises(StudyError, match="here reached its target at another step"):
        finished.refuse_other_target(plan, [*rows, ("a", 0, 7, "steps_to_target", 4.0)], "here")
    plan = read(study(sweep=None, target_reward=1.2))
    rewards = [4 / 3, 4 / 3, 4 / 3, 1.0, 1.0, 1.4, 1.4]  # of the first five 6 / 5, of six digits less
    rows = [("a", 0, i + 1, "reward", float(f"{reward:.6g}")) for i, reward in enumerate(rewards)]
    finished.refuse_other_target(plan, [*rows, ("a", 0, 7, "steps_to_target", 5.0)], "here")
    with pytest.raises(StudyError, match="here reached its target at another step"):
        finished.refuse_other_target(plan, rows, "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"a": {"quantization": "nf4"}, "b": {"quantization": "qerl_nvfp4"}}}, "made by other keys"),
        ({"evaluations": {"greedy": {"tasks": "gsm8k"}}}, "made by other keys"),
        ({"arms": {"a": {"quantization": "bf16"}, "d": {}}, "comparisons": None}, "is no run of this study"),
        ({"seeds": [5, 6, 7]}, "is no run of this study"),
    ],
)
def test_no_page_is_made_of_a_table_that_another_plan_has_made(changes, message, published, study):
    _, file, _ = published
    conduct(study(), table=file)
    before = (file.parent / "README.md").read_bytes()
    with pytest.raises(StudyError, match=message):
        conduct(study(**changes), table=file)
    assert (file.parent / "README.md").read_bytes() == before


@pytest.mark.parametrize(
    "key", [{"lora_r": 16}, {"learning_rate": 2e-3}, {"max_steps": 100}, {"model_name_or_path": "other"}]
)
def test_a_recipe_that_was_changed_since_is_refused(key, published, tmp_path):
    """Of the learning rate each run has its own, by the sweep."""
    plan, file, _ = published
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **key}))
    tmp_path.joinpath("out").mkdir()
    if "learning_rate" in key:
        finished.keep(plan, file, tmp_path / "out")
        return
    with pytest.raises(StudyError, match="was made by other keys"):
        finished.keep(plan, file, tmp_path / "out")


def test_evaluations_that_were_changed_since_are_refused(published, study, tmp_path):
    _, file, _ = published
    plan = read(study(evaluations={"greedy": {"tasks": "running_sum", "max_new_tokens": 9}}))
    with pytest.raises(StudyError, match="was made by other keys"):
        finished.keep(plan, file, tmp_path)


def test_the_order_of_the_recipes_keys_and_a_base_that_is_not_here_do_not_matter(published, tmp_path):
    """A base of the hub is never here, and one that is made first is not yet."""
    plan, file, _ = published
    Path("recipe.yaml").write_text(yaml.safe_dump(dict(reversed(RECIPE.items())), sort_keys=False))
    shutil.rmtree("base")
    finished.keep(plan, file, tmp_path)
    assert finished.kept(tmp_path)


def test_a_run_of_the_table_needs_all_its_evaluations_and_one_of_the_sweep_the_primary_one(study, tmp_path):
    sampled = {"tasks": "running_sum", "num_samples": 8, "temperature": 1.0}
    plan, name = read(study(evaluations={"greedy": {"tasks": "running_sum"}, "sampled": sampled})), make_base(1.0)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))

    def rows(run, *metrics):
        of_run = (*metrics, f"plan/{finished.plan_of(plan, run)}", f"base/{name}")
        return [(run.label, run.seed, 2, metric, 1.0) for metric in of_run]

    swept, best = first_runs(plan)[0], later_runs(plan, {"a": 1e-3})[0]
    whole, half = tmp_path / "whole.csv.gz", tmp_path / "half.csv.gz"
    table.write_table([*rows(swept, "accuracy"), *rows(best, "accuracy", "accuracy/sampled")], whole)
    finished.keep(plan, whole, tmp_path)
    assert finished.kept(tmp_path).keys() == {(run.label, run.seed) for run in (swept, best)}
    table.write_table([*rows(swept, "accuracy"), *rows(best, "accuracy")], half)
    with pytest.raises(StudyError, match=f"{best.folder} has no accuracy/sampled; leave --finished out"):
        finished.keep(plan, half, tmp_path)


def test_a_base_that_is_made_anew_later_is_refused_by_the_next_call(published, finish, tmp_path, monkeypatch):
    _, file, _ = published
    out = tmp_path / "out"
    trained = fake(monkeypatch, finish, out)
    conduct(Path("study.yaml"), out, finished=file)
    make_base(2.0)
    trained.clear()
    with pytest.raises(StudyError, match=r"finished\.csv\.gz: .* was trained on another base"):
        conduct(Path("study.yaml"), out)
    assert trained == []


def test_a_study_without_a_sweep_goes_on_with_more_seeds(study, finish, tmp_path, monkeypatch):
    plan = read(study(sweep=None, seeds=[0, 1]))
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    make_base(1.0)
    claimed(plan, tmp_path / "first")
    for one in first_runs(plan):
        finish(one, tmp_path / "first", 0.4)
    rows = results.collect(plan, tmp_path / "first")
    rows += [(arm, seed, 2, f"base/{base_hash(Path('base'))[:12]}", 1.0) for arm in "ab" for seed in (0, 1)]
    table.write_table(rows, tmp_path / "first.csv.gz")
    more = study(sweep=None, seeds=[0, 1, 2])
    trained = fake(monkeypatch, finish, tmp_path / "out")
    conduct(more, tmp_path / "out", finished=tmp_path / "first.csv.gz")
    assert sorted(trained) == ["a/seed-2", "b/seed-2"]


@pytest.mark.parametrize("nothing_runs", [["--dry-run"], ["--table", "t.csv.gz"]], ids=["dry-run", "table"])
@pytest.mark.parametrize("option", ["--finished t.csv.gz", "--output out", "--minutes 3", "--jobs 2"])
def test_where_nothing_runs_the_option_is_refused(nothing_runs, option, study, tmp_path):
    said = CliRunner().invoke(app, ["study", str(study()), *option.split(), *nothing_runs])
    assert said.exit_code == 2 and "leave --finished," in " ".join(said.output.split())
