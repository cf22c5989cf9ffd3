"""Test `qerl compare`, and that judgements by problem come from evaluations through the table to a comparison."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.evaluate.figures import summarize, unpacked
from qerl_recipes.evaluate.intervals import over_seeds_and_problems
from qerl_recipes.study import results
from qerl_recipes.study.commands import compare
from qerl_recipes.study.inventory import BY_PROBLEM, TABLE, all_runs, collect, keep, read_table, write_table
from qerl_recipes.study.plan import StudyError, read


@pytest.fixture
def file(study, rows_table):
    """Write a study of arms a and b over the seeds 0 to 2, with its table."""

    def accuracies(a, b):
        return [(arm, seed, 9, "accuracy", of[seed]) for arm, of in (("a", a), ("b", b)) for seed in (0, 1, 2)]

    path = study(sweep=None)
    rows = accuracies([0.5] * 3, [0.6, 0.61, 0.62])
    for seed in (0, 1, 2):
        for step in (1, 2, 3, 4):
            rows += [("a", seed, step, "reward", 0.1 * step), ("b", seed, step, "reward", 0.1 * (step + (step > 2)))]
            rows += [(arm, seed, step, "loss", 1.0) for arm in "ab" if (arm, seed, step) != ("b", 1, 4)]
        rows += [("a", seed, 4, "reward_area", 10.0)] + [("b", seed, 4, "reward_area", 12.0 + seed)] * (seed != 1)
        rows += [(arm, seed, 4, "completion_clipped", 0.1 * seed + (arm == "b")) for arm in "ab"]
    write_table(rows_table(rows), Path("study") / TABLE)
    write_table(rows_table(accuracies([0.7] * 3, [0.5] * 3)), Path("other.csv.gz"))
    write_table(rows_table([("c", 0, 4, "accuracy", 0.5)]), Path("wrong.csv.gz"))
    return path


def test_two_arms_are_compared_by_hand(file):
    said = CliRunner().invoke(app, ["compare", "study.yaml", "b", "a"])
    # The differences are 0.10, 0.11, 0.12: mean 0.11, standard error 0.01 / sqrt 3, times 4.303 for two degrees of
    # freedom.
    assert said.output.strip() == (
        "accuracy: b 0.61, a 0.5; a - b = +0.11, 95 % (t) +0.08516 to +0.1348, p = 0.0027, exact 0.25, not corrected; "
        "unpaired +0.08516 to +0.1348; seeds 0, 1, 2: +0.1, +0.11, +0.12"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("reward",), "reward: b 0.5, a 0.4; a - b = +0.1,"),
        (("reward", "2-3"), "reward over steps 2-3: b 0.3, a 0.25; a - b = +0.05,"),
        (("mean_reward",), "seeds 0, 2: +2, +4; left out, since one of the two lacks it: 1"),
        (("clipped_end",), "clipped_end: b 1.1, a 0.1; a - b = +1,"),  # computed from the steps
        (("accuracy", None, Path("other.csv.gz")), "b 0.5, a 0.7; a - b = -0.2"),
    ],
)
def test_another_metric_steps_or_table(options, text, file):
    if options == ("mean_reward",):  # drop the run whose mean_reward is missing from the table
        rows = read_table(Path("study") / TABLE)
        write_table(
            rows[(rows.arm != "b") | (rows.seed != 1) | ~rows.metric.isin(["reward", "mean_reward"])],
            Path("study") / TABLE,
        )
    assert text in compare(file, "b", "a", *options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("c", "a", "accuracy"), "has no arm c; it has a, b"),
        (("b", "a", "entropy"), "has no metric entropy; it has accuracy, clipped_end"),
        (("b", "a", "reward", "4-3"), "it is FIRST-LAST, such as 7-12"),
        (("b", "a", "reward", "3-5"), "--steps 3-5: the last step with reward of a seed 0 is 4; end there"),
        (("b", "a", "loss", "2-4"), "--steps 2-4: the last step with loss of b seed 1 is 3; end there"),
        (("b", "a", "accuracy", None, Path("wrong.csv.gz")), "is no run of this study"),
    ],
)
def test_what_the_table_does_not_have_is_named(given, message, file):
    with pytest.raises(StudyError, match=message):
        compare(file, *given)


def judge(rng, share, problems, num_samples=1):
    """Return an arm of an evaluation as `qerl evaluate` writes it, and which answers are right as (problems,
    samples).
    """
    right, cut = (rng.random((problems, num_samples)) < part for part in (share, 0.2))
    judged = [
        SimpleNamespace(right=r.tolist(), cut=c.tolist(), share=r.mean(), vote=bool(r[0]), room=9)
        for r, c in zip(right, cut, strict=True)
    ]
    return summarize(judged, num_samples), right


def test_judgements_by_problem_come_from_the_evaluation_to_the_comparison(study, finish, claimed, make_base, tmp_path):
    make_base(1)
    evaluations = {"greedy": {"tasks": "running_sum"}, "two": {"tasks": "running_sum,jsonl:x"}}
    file, rng, known = study(sweep=None, evaluations=evaluations), np.random.default_rng(1), {}
    plan = read(file)
    out, table = claimed(plan, tmp_path / "out"), tmp_path / "made" / TABLE
    for one in all_runs(plan, out):
        finish(one, out, 0.5)
        for name, tasks in (("greedy", {"x": (40, 1)}), ("two", {"y": (40, 3), "z": (7, 3)})):
            made = {task: judge(rng, {"a": 0.3, "b": 0.5}[one.arm], *size) for task, size in tasks.items()}
            known[name, one.arm, one.seed] = [right for _, right in made.values()]
            policies = {
                task: {"base": judge(rng, 0.1, *tasks[task])[0], "adapter": of} for task, (of, _) in made.items()
            }
            (out / one.folder / "evaluation" / name).mkdir(exist_ok=True)
            (out / one.folder / "evaluation" / name / "evaluation.json").write_text(json.dumps({"tasks": policies}))
    rows = collect(plan, out)
    values = results.final(rows, None)
    kinds = {tuple(name.split("/")[1:6]) for name in rows.metric if name.startswith(BY_PROBLEM)}
    assert ("greedy", "0", "base", "ended", "1") in kinds and ("two", "1", "adapter", "right", "3") in kinds
    (bits,) = [
        m
        for m in rows.metric[(rows.arm == "a") & (rows.seed == 0)]
        if m.startswith("by_problem/two/0/adapter/right/3/")
    ]
    assert unpacked(bits.rpartition("/")[2], 40, 3).tolist() == known["two", "a", 0][0].tolist()
    of_two = np.mean([of.mean() for of in known["two", "b", 0]])
    assert values.loc[("b", 0), "accuracy/two"] == pytest.approx(of_two) and 0 < values.ended["b", 0] < 1
    assert {"base_ended", "pass@2/two", "maj@3/two"} <= set(values.columns)
    write_table(rows, table)
    differences = [(known["greedy", "b", s][0].astype(float) - known["greedy", "a", s][0])[:, 0] for s in range(3)]
    _, low, high = over_seeds_and_problems([np.array(differences)])
    assert f", over seeds and 40 problems {low:+.4g} to {high:+.4g}, p = " in compare(
        file, "b", "a", "accuracy", table=table
    )
    assert "problems" not in compare(file, "b", "a", "ended", table=table)
    two = results.over_problems(plan.model_copy(update={"primary": "two"}), rows, "b", "a", [0, 1, 2])
    assert two is not None and two[0] == 47
    few = rows[(rows.arm != "a") | (rows.seed == 0) | ~rows.metric.str.startswith(BY_PROBLEM)]
    assert results.over_problems(plan, few, "b", "a", [0, 1, 2]) is None
    lacking = rows[(rows.seed != 2) | ~rows.metric.str.startswith(BY_PROBLEM)]  # no interval of other seeds than a - b
    assert results.over_problems(plan, lacking, "b", "a", [0, 1, 2]) is None
    keep(plan, table, tmp_path)  # a study that continues from its table keeps these rows
    assert len(collect(plan, tmp_path)) == len(rows)
