"""Two arms of a table, compared by hand and by ``qerl compare``."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.study import table
from qerl_recipes.study.compare import compare
from qerl_recipes.study.plan import StudyError


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A study of arms a and b over the seeds 0 to 2, with its table."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("model_name_or_path: base\n")
    Path("plan.yaml").write_text(
        "recipe: recipe.yaml\narms: {a: {quantization: bf16}, b: {quantization: qerl_nvfp4}}\nseeds: [0, 1, 2]\n"
        "evaluations: {greedy: {tasks: running_sum}}\nprimary: greedy\n"
    )
    rows = [("a", s, 4, "accuracy", 0.5) for s in (0, 1, 2)]
    rows += [("b", s, 4, "accuracy", 0.6 + 0.01 * s) for s in (0, 1, 2)]
    for seed in (0, 1, 2):
        for step in (1, 2, 3, 4):
            rows += [
                ("a", seed, step, "reward", 0.1 * step),
                ("b", seed, step, "reward", 0.1 * step + 0.1 * (step > 2)),
            ]
    table.write_table(rows, Path("plan") / table.TABLE)
    return Path("plan.yaml")


def test_the_last_values_are_paired_by_seed(file):
    said = CliRunner().invoke(app, ["compare", "plan.yaml", "b", "a"])
    # differences 0.10, 0.11, 0.12: mean 0.11, standard error 0.01 / sqrt 3, times 4.303 of two degrees of freedom
    assert said.output.strip() == (
        "accuracy: b 0.61, a 0.5; a - b = +0.11, 95 % (t) +0.08516 to +0.1348, p = 0.0027, exact 0.25, not corrected; "
        "unpaired +0.08516 to +0.1348; seeds 0, 1, 2: +0.1, +0.11, +0.12"
    )


def test_a_seed_without_the_metric_in_both_is_named(file):
    rows = table.read_table(Path("plan") / table.TABLE)
    rows += [("a", s, 4, "seconds_to_target", 10.0) for s in (0, 1, 2)]
    rows += [("b", s, 4, "seconds_to_target", 12.0 + s) for s in (0, 2)]
    table.write_table(rows, Path("plan") / table.TABLE)
    assert compare(file, "b", "a", "seconds_to_target").endswith(
        "seeds 0, 2: +2, +4; left out, since one of the two lacks it: 1"
    )
    assert "left out" not in compare(file, "b", "a", "accuracy")


def test_a_mean_over_steps_is_of_these_steps_alone(file):
    assert "reward over steps 1-2: b 0.15, a 0.15; a - b = +0," in compare(file, "b", "a", "reward", "1-2")
    assert "reward over steps 2-3: b 0.3, a 0.25; a - b = +0.05," in compare(file, "b", "a", "reward", "2-3")
    assert "reward: b 0.5, a 0.4; a - b = +0.1," in compare(file, "b", "a", "reward")


def test_a_summary_that_an_older_table_lacks_is_made_from_its_steps(file):
    rows = table.read_table(Path("plan") / table.TABLE)
    rows += [(arm, s, 4, "completion_clipped", 0.1 * s + (arm == "b")) for arm in "ab" for s in (0, 1, 2)]
    table.write_table(rows, Path("plan") / table.TABLE)
    assert "clipped_end: b 1.1, a 0.1; a - b = +1, " in compare(file, "b", "a", "clipped_end")


def test_another_table_counts_where_it_is_named(file):
    rows = [(arm, s, 4, "accuracy", 0.7 if arm == "a" else 0.5) for arm in "ab" for s in (0, 1, 2)]
    table.write_table(rows, Path("other.csv.gz"))
    said = CliRunner().invoke(app, ["compare", "plan.yaml", "b", "a", "--table", "other.csv.gz"])
    assert "b 0.5, a 0.7; a - b = -0.2" in said.output


def test_the_seeds_of_a_sweep_are_not_those_of_the_comparison(file):
    sweep = "sweep: {key: learning_rate, values: [1.0e-4, 3.0e-4], seeds: [100, 101], common: 1.0e-4}\n"
    file.write_text(file.read_text() + sweep)
    rows = [(f"{arm}@0.0001", s, 4, "accuracy", s / 100 + (arm == "b")) for arm in "ab" for s in (0, 1, 2, 100, 101)]
    table.write_table(rows, Path("plan") / table.TABLE)
    assert "accuracy: b@0.0001 1.01, a@0.0001 0.01;" in compare(file, "b@0.0001", "a@0.0001", "accuracy")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("c", "a", "accuracy"), "has no arm c; it has a, b"),
        (("b", "a", "entropy"), "has no metric entropy; it has accuracy, reward"),
        (("b", "a", "reward", "3"), "it is FIRST-LAST, such as 7-12"),
        (("b", "a", "reward", "4-3"), "it is FIRST-LAST, such as 7-12"),
        (("b", "a", "reward", "3-5"), "--steps 3-5: the last step with reward is 4; end there"),
        (("b", "a", "reward", "9-12"), "0 seeds have reward of both b and a in 9-12; a comparison needs at least 2"),
    ],
)
def test_what_the_table_does_not_have_is_named(given, message, file):
    with pytest.raises(StudyError, match=message):
        compare(file, *given)


def test_a_table_of_another_study_is_refused(file):
    table.write_table([("c", 0, 4, "accuracy", 0.5)], Path("other.csv.gz"))
    with pytest.raises(StudyError, match="is no run of this study"):
        compare(file, "b", "a", "accuracy", table=Path("other.csv.gz"))
