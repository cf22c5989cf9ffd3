"""Test tables and folders of a study: what they say about its runs, and which runs are not accepted as this study's."""

import contextlib
import gzip
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.study import check as checks
from qerl_recipes.study import inventory, pages, runner
from qerl_recipes.study.commands import conduct
from qerl_recipes.study.plan import StudyError, first_runs, read
from qerl_recipes.study.results import final, hours

RECIPE = {"model_name_or_path": "base", "quantization": "bf16", "learning_rate": 1e-3, "lora_r": 32}


def test_a_table_is_read_as_it_was_written(rows_table, tmp_path):
    rows = [("none", s, 60, "accuracy", (100 + s) / 512) for s in (0, 1)]  # pandas reads this name as missing
    rows += [("NA", 0, 60, "accuracy", float("nan"))] + [("none", 0, step, "reward", 1 / 3) for step in (1, 2)]
    file = tmp_path / "new" / inventory.TABLE
    inventory.write_table(rows_table(rows), file)
    found = inventory.read_table(file)
    exact = found[found.metric == "accuracy"].value.tolist()
    # values that a run has once decide verdicts, so they stay exact
    assert exact[1:] == [100 / 512, 101 / 512] and pd.isna(exact[0])
    assert set(found[found.metric == "reward"].value) == {0.333333}
    written = file.read_bytes()
    inventory.write_table(found[::-1], file)
    assert file.read_bytes() == written


GOOD = gzip.compress(b"arm,seed,step,metric,value\na,0,1,accuracy,0.5\n", mtime=0)


@pytest.mark.parametrize(
    "content",
    [
        b"no table",
        GOOD[:-9],
        gzip.compress(b"arm,seed,metric,step,value\na,0,1,2,3\n", mtime=0),
        gzip.compress(b"arm,seed,step,metric,value\na,0,1,accuracy,half\n", mtime=0),
        None,
    ],
)
def test_a_broken_table_is_refused(content, study, tmp_path):
    file = tmp_path / "broken.csv.gz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StudyError, match=r"broken\.csv\.gz is no table of a study .*qerl study writes one"):
        conduct(study(), table=file)
    assert not (tmp_path / "README.md").exists()


def steps_of(**columns):
    frame = pd.DataFrame(columns)
    return frame.set_index(frame.pop("step") if "step" in frame else pd.RangeIndex(1, len(frame) + 1))


def test_what_the_steps_of_a_run_come_to():
    steps = steps_of(
        reward=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0], entropy=[3.0, 2.0, 1.0, 1.0, 1.0, 0.0], step_seconds=[2.0] * 6
    )
    found = inventory.summaries(steps, 0.5)
    assert found["mean_reward"] == pytest.approx(0.5) and found["entropy_start"] == pytest.approx(1.6)
    assert found["median_step_seconds"] == 2.0 and found["entropy_end"] == pytest.approx(1.0)
    assert (found["steps_to_target"], found["seconds_to_target"]) == (6, pytest.approx(12.0))  # means of five: 0.4, 0.6
    assert not found.keys() & {"reward_gain", "clipped_end", "sampled_entropy_start", "mean_logp_diff"}
    assert "steps_to_target" not in inventory.summaries(steps, 0.9) and "steps_to_target" not in inventory.summaries(
        steps, None
    )
    # A rollout that serves two steps is scored in the first of them, but the second still takes time.
    halves = steps.set_index(2 * steps.index - 1).reindex(range(1, 13))
    halves.loc[halves.index % 2 == 0, ["entropy", "step_seconds"]] = 9.0, 1.0
    found = inventory.summaries(halves, 0.5)
    assert found["mean_reward"] == pytest.approx(0.5)
    assert (found["steps_to_target"], found["seconds_to_target"]) == (11, pytest.approx(6 * 2.0 + 5 * 1.0))


def test_growth_and_cut_completions_are_of_the_scored_steps():
    numbers = list(range(1, 21))
    grown = steps_of(
        reward=[i / 100 for i in numbers],
        completion_clipped=[i / 100 for i in numbers],
        logp_diff_mean=[0.1] * 20,
        frac_reward_zero_std=[0.25] * 20,
        rollout_tokens_per_s=[100.0 * i for i in numbers],
        sampled_entropy=numbers,
    )
    grown = pd.concat([grown, pd.DataFrame({"completion_clipped": 9.0}, index=grown.index + 0.5)]).sort_index()
    found = inventory.summaries(grown, None)
    assert found["reward_gain"] == pytest.approx(0.155 - 0.03) and found["clipped_end"] == pytest.approx(0.18)
    assert (found["mean_logp_diff"], found["mean_frac_reward_zero_std"]) == (pytest.approx(0.1), 0.25)
    assert found["median_rollout_tokens_per_s"] == 1050.0 and found["sampled_entropy_start"] == pytest.approx(2.0)
    short = steps_of(reward=[0.1] * 14)
    assert "reward_gain" not in inventory.summaries(short, None)


@pytest.mark.parametrize("rewards", [[21 / 256] * 7, [4 / 3, 4 / 3, 4 / 3, 1.0, 1.0, 1.4, 1.4]])
def test_a_reward_that_a_table_has_rounded_has_reached_its_target(rewards):
    target = sum(rewards[:5]) / 5
    short = steps_of(reward=[float(f"{reward:.6g}") for reward in rewards])
    assert short.reward[:5].mean() < target
    assert inventory.summaries(short, target)["steps_to_target"] == 5


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Leave the curves out, which take longer than the rest of a page; test_pages.py draws them."""
    monkeypatch.setattr(pages, "draw", lambda *given: None)


@pytest.fixture
def published(study, finish, make_base, claimed, tmp_path):
    """Make a study, its table with the sweep and the first three later runs, and the folders of the others."""
    plan = read(study())
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    name, out = make_base(1), claimed(plan, tmp_path / "elsewhere")
    for one in first_runs(plan):
        finish(one, out, 0.5 if one.value == (1e-4 if one.arm == "a" else 1e-3) else 0.2)
    later = [one for one in inventory.all_runs(plan, out) if one.kind != "sweep"]
    for i, one in enumerate(later[:3]):
        finish(one, out, 0.3 + i / 100, rewards=[0.1, 0.9] * 4)
    (out / later[0].folder / inventory.TIMES).write_text(
        '{"device": "H200", "seconds": 1800.0, "command": "train"}\n' * 2
    )
    rows = inventory.collect(plan, out)
    assert set(inventory.facts(rows, inventory.BASE)) == {name} and hours(rows) == {"H200": 1.0}
    file = tmp_path / "published" / inventory.TABLE
    inventory.write_table(rows, file)
    return plan, file, [one.folder for one in later[3:]]


@pytest.fixture
def trained(monkeypatch, finish):
    """Replace training by writing the results of runs and evaluations at once; return the runs that were trained."""
    found = []

    def train(study, runs, root, *_):
        found.extend(run.folder for run in runs)
        for run in runs:
            finish(run, root, 0.9)
        return []

    monkeypatch.setattr(runner, "_train", train)
    monkeypatch.setattr(runner, "check", lambda study: None)
    return found


def test_a_run_is_what_its_folder_says(published):
    plan, file, _ = published
    values = final(inventory.read_table(file), plan.target_reward)
    run = values.loc["a@0.0001", 0]
    assert run.mean_frac_reward_zero_std == 0.25 and not {"kept", "mode", "step"} & set(values.columns)
    assert run.accuracy == 0.3 and run.base_accuracy == 0.1 and run.mean_reward == pytest.approx(0.5)
    assert run["eval/reward"] == 9.0 and run.steps_to_target == 6  # five steps in a row average 0.42 or 0.58
    assert final(inventory.read_table(file), 0.4).loc["a@0.0001", 0].steps_to_target == 5, (
        "it is this target that counts"
    )
    assert pd.isna(final(inventory.read_table(file), 0.95).get("steps_to_target", pd.Series([float("nan")]))).all()


def test_the_runs_of_a_table_are_not_made_again(published, trained, finish, tmp_path, monkeypatch):
    plan, file, missing = published
    out, table = tmp_path / "out", tmp_path / "out" / inventory.TABLE
    page = conduct(Path("study.yaml"), out, finished=file).read_text()
    assert page.endswith(f"Repeat: `qerl study study.yaml --output {out} --finished {file}`.\n")
    assert sorted(trained) == sorted(missing) and missing
    before, after = (inventory.read_table(path) for path in (file, table))
    new = pd.concat([before, after]).drop_duplicates(keep=False)
    assert len(new) == len(after) - len(before) and {f"{row.arm}/seed-{row.seed}" for row in new.itertuples()} == {
        *missing
    }
    trained.clear()
    page = conduct(Path("study.yaml"), out).read_text()  # the next call finds them without the option
    assert f"--output {out}`" in page
    assert trained == [] and inventory.read_table(table).equals(after)
    finish(first_runs(plan)[0], out, 0.99)  # the table's value counts
    assert inventory.collect(plan, out).sort_values(inventory.COLUMNS, ignore_index=True).equals(after)
    monkeypatch.setattr(runner, "check_tasks", lambda study: pytest.fail("no evaluation is needed"))
    conduct(Path("study.yaml"), tmp_path / "second", finished=table)


def test_tables_of_other_runs_are_joined(published, tmp_path):
    plan, file, _ = published
    rows, out = inventory.read_table(file), tmp_path / "out"
    runs = [of_run for _, of_run in rows.groupby(["arm", "seed"])]
    for number, of_run in enumerate(runs):
        inventory.write_table(of_run, tmp_path / str(number) / inventory.TABLE)
        inventory.keep(plan, tmp_path / str(number) / inventory.TABLE, out)
    assert len(runs) > 1 and (out / inventory.KEPT).read_bytes() == file.read_bytes()
    inventory.write_table(better := runs[0].assign(value=runs[0].value + 1), file)
    inventory.keep(plan, file, out)  # of a run in both, the later table's value counts
    joined = inventory.kept(out)
    assert (
        len(joined) == len(runs) and joined[tuple(runs[0][["arm", "seed"]].iloc[0])].value.sum() == better.value.sum()
    )


CHANGES = {
    "c@0.001/seed-0 is no run of this study": lambda rows: rows.assign(arm="c@0.001", seed=0),
    "seed-77 is no run of this study": lambda rows: rows.assign(seed=77),
    "has no accuracy; leave --finished out": lambda rows: rows[rows.metric != "accuracy"],
    "has no plan/;": lambda rows: rows[~rows.metric.str.startswith("plan/")],
    "made with other settings": lambda rows: rows.replace(r"^plan/.*", "plan/000000000000", regex=True),
    "another base": lambda rows: rows.replace(r"^base/.*", "base/000000000000", regex=True),
}


def test_a_table_that_is_not_of_this_study_is_refused(published, tmp_path):
    plan, file, _ = published
    rows, out = inventory.read_table(file), tmp_path / "out"
    changed = (rows.arm == rows.arm.iloc[-1]) & (rows.seed == rows.seed.iloc[-1])
    out.mkdir()
    for message, change in CHANGES.items():
        inventory.write_table(pd.concat([rows[~changed], change(rows[changed])]), file)
        with pytest.raises(StudyError, match=message):
            inventory.keep(plan, file, out)
    assert list(out.iterdir()) == []


def test_a_plan_that_was_changed_since_is_refused(published, study, tmp_path):
    _, file, _ = published
    conduct(study(), table=file)
    page = (file.parent / "README.md").read_bytes()

    def refused(message, recipe=None, **changes):
        Path("recipe.yaml").write_text(yaml.safe_dump(dict(reversed({**RECIPE, **(recipe or {})}.items()))))
        plan = read(study(**changes))
        for use in (lambda: inventory.keep(plan, file, tmp_path), lambda: conduct(Path("study.yaml"), table=file)):
            with pytest.raises(StudyError, match=message) if message else contextlib.nullcontext():
                use()

    refused("made with other settings", {"lora_r": 16})
    refused("made with other settings", evaluations={"greedy": {"tasks": "running_sum", "max_new_tokens": 9}})
    refused("is no run of this study", seeds=[5, 6, 7])
    assert (file.parent / "README.md").read_bytes() == page
    refused(None, {"learning_rate": 2e-3})  # each run has its own learning rate from the sweep


def test_former_keys_make_the_same_runs_with_the_same_hash(study):
    former = {"skip_silent_rows": False, "checkpointed_layers": 3, "noise_mode": "rollout"}
    with pytest.warns(FutureWarning, match="arms: checkpointed_layers is called recompute_layers now"):
        plan = read(study(sweep=None, arms={"a": {}, "b": former}))
    assert plan.arms["b"] == {"skip_zero_advantage": False, "recompute_layers": 3, "noise_mode": "engine"}
    (run, *_) = [run for run in first_runs(plan) if run.arm == "b"]
    as_before = [{"model_name_or_path": "base", **former}, run.seed, plan.evaluations]
    assert inventory.plan_of(plan, run) == inventory._digest(as_before)


def test_a_base_that_is_made_anew_is_refused(published, trained, make_base, tmp_path):
    _, file, _ = published
    out = tmp_path / "out"
    conduct(Path("study.yaml"), out, finished=file)
    make_base(2)
    trained.clear()
    with pytest.raises(StudyError, match=r"was trained on another base \(.*put those weights back"):
        conduct(Path("study.yaml"), out)
    for folder in out.glob("*@*"):
        shutil.rmtree(folder)
    with pytest.raises(StudyError, match=r"finished\.csv\.gz: .* was trained on another base .*leave --finished out"):
        conduct(Path("study.yaml"), out)
    assert trained == []


def test_runs_that_were_asked_other_problems_are_not_compared(study, tmp_path, finish):
    plan, out = read(study(sweep=None)), tmp_path / "out"
    for one in first_runs(plan):
        finish(one, out, 0.5, problems="old")
    problems = inventory.facts(inventory.collect(plan, out), inventory.PROBLEMS)
    assert problems.nunique() == 1 and problems.iloc[0].startswith("greedy/")
    finish(next(one for one in first_runs(plan) if one.folder == "b/seed-1"), out, 0.5, problems="new")
    with pytest.raises(StudyError, match=r"evaluations.greedy: b/seed-1 was asked other problems than a/seed-0; put"):
        inventory.collect(plan, out)


# These tests take arms from the table of another study.

TAKEN = {"study": "study.yaml", "arms": {"r32": "b@0.001"}}
RANKS = {"r8": {"quantization": "qerl_nvfp4", "lora_r": 8}, "r32": {"quantization": "qerl_nvfp4", "lora_r": 32}}


@pytest.fixture
def smaller(study, finish, claimed, tmp_path):
    """Return smaller(**changes), a study of ranks that takes one arm from study.yaml, which has run at 1e-3."""
    plan = read(study(arms={"a": {}, "b": {"quantization": "qerl_nvfp4"}}))
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    out = claimed(plan, tmp_path / "out")
    for one in first_runs(plan):
        finish(one, out, 0.2 if one.value == 1e-4 else 0.5)
    for one in inventory.all_runs(plan, out):
        if one.kind != "sweep":
            finish(one, out, 0.3 + one.seed / 100)
    (out / "b@0.001/seed-0" / inventory.TIMES).write_text('{"device": "H200", "seconds": 3600.0}\n')
    inventory.write_table(inventory.collect(plan, out), Path("study") / inventory.TABLE)
    first = Path("study.yaml").read_text()

    def write(**changes):
        plan = {"arms": RANKS, "sweep": None, "comparisons": [["r8", "r32"]], "taken": TAKEN, **changes}
        file = study(**plan).rename("smaller.yaml")
        Path("study.yaml").write_text(first)
        return file

    return write


def test_an_arm_that_is_there_is_not_run_again(smaller, finish, claimed, tmp_path):
    plan = read(smaller())
    checks.check(plan)
    assert {run.arm for run in first_runs(plan)} == {"r8"}
    out = claimed(plan, tmp_path / "small")
    for one in first_runs(plan):
        finish(one, out, 0.25)
    rows = inventory.collect(plan, out)
    accuracies = final(rows, None).accuracy
    assert accuracies["r32"].to_dict() == {0: 0.3, 1: 0.31, 2: 0.32}  # the sweep's accuracies are left out
    assert accuracies["r8"].to_dict() == dict.fromkeys((0, 1, 2), 0.25)
    assert hours(rows) == {}  # hours are counted where the runs took place
    table = tmp_path / "made" / inventory.TABLE
    inventory.write_table(rows, table)
    page = conduct(Path("smaller.yaml"), table=table).read_text()
    assert "3/3 runs." in page and "Taken from study.yaml" in page and "r32 is b@0.001" in page
    assert "| r8 | r32 | 10.0→25.0 | 10.0→31.0 | -6.0 (" in page
    said = CliRunner().invoke(app, ["study", "smaller.yaml", "--dry-run"])
    assert said.exit_code == 0 and "1 arms x 3 seeds" in said.output and "r32 is b@0.001" in said.output
    based = [(arm, seed, 2, f"{inventory.BASE}000000000000", 1.0) for arm in RANKS for seed in (0, 1, 2)]
    inventory.write_table(pd.concat([rows, pd.DataFrame(based, columns=inventory.COLUMNS)]), table)
    inventory.keep(plan, table, tmp_path)  # r32 comes from the other study again
    assert inventory.kept(tmp_path).keys() == {("r8", seed) for seed in (0, 1, 2)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taken": {**TAKEN, "study": "nowhere.yaml"}}, "nowhere.yaml has no table .* run that study first"),
        ({"arms": {**RANKS, "r32": {**RANKS["r32"], "max_steps": 7}}}, "does not say .* so that it is run here"),
        ({"evaluations": {"greedy": {"tasks": "other"}}}, "does not say .* its evaluations"),
        ({"seeds": [0, 1, 7]}, "b@0.001/seed-7 of .* has no accuracy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_arm_whose_runs_would_not_be_the_same_is_not_taken(changes, message, smaller):
    with pytest.raises(StudyError, match=message):
        inventory.taken_rows(read(smaller(**changes)))


def test_an_arm_is_taken_on_the_base_that_it_was_trained_on(smaller, make_base):
    plan, file = read(smaller()), Path("study") / inventory.TABLE
    rows = inventory.read_table(file)
    checks.check(plan)  # no such folder exists, so the name is taken for a model of the hub
    first = make_base(1)
    with pytest.raises(
        StudyError, match=rf"r32: b@0.001.*does not say on which base.*is now {first}; take the configuration out"
    ):
        checks.check(plan)
    based = pd.DataFrame([("b@0.001", s, 2, f"base/{first}", 1.0) for s in (0, 1, 2)], columns=inventory.COLUMNS)
    inventory.write_table(pd.concat([rows, based]), file)
    checks.check(plan)
    second = make_base(2)
    with pytest.raises(StudyError, match=rf"trained on another base \({first}\), and base is now {second}"):
        checks.check(plan)
    inventory.write_table(pd.concat([rows, based, based[:1].assign(metric=f"base/{second}")]), file)
    with pytest.raises(StudyError, match="trained on another base"):
        checks.check(plan)


def test_an_arm_of_other_keys_than_there_are_now_is_refused(smaller):
    """Refuse an arm whose keys have changed.

    Otherwise both studies would agree with each other but with no run.
    """
    plan = read(smaller())
    assert not inventory.taken_rows(plan).metric.str.startswith(inventory.PLAN).any()
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "max_steps": 7}))
    with pytest.raises(StudyError, match=r"taken\.arms\.r32: b@0\.001/seed-\d of .* does not say"):
        inventory.taken_rows(plan)


def test_a_vote_is_of_the_tasks_that_all_have_one(study, finish, tmp_path):
    plan = read(study(sweep=None))
    run = first_runs(plan)[0]
    finish(run, tmp_path, 0.5)
    at = {"4": {"value": 0.75}}
    of = [{"accuracy": 0.5, "pass_at": at, "maj_at": at}, {"accuracy": 0.25, "pass_at": at}]  # episodes have no vote
    for tasks in (of, of[::-1]):
        content = {"tasks": {str(number): {"adapter": task} for number, task in enumerate(tasks)}}
        (tmp_path / run.folder / "evaluation/greedy/evaluation.json").write_text(json.dumps(content))
        assert inventory.figures(plan, run, tmp_path) == {"accuracy": 0.375, "pass@4": 0.75}
