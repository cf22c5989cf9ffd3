"""Judgements by problem from an evaluation to the table, and the intervals over seeds and problems on a page."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from qerl_recipes.evaluate.figures import summarize, unpacked
from qerl_recipes.evaluate.intervals import over_seeds_and_problems
from qerl_recipes.study import by_problem, finished, results, table
from qerl_recipes.study import run as runner
from qerl_recipes.study.compare import compare
from qerl_recipes.study.conduct import conduct
from qerl_recipes.study.page import cell
from qerl_recipes.study.plan import read

SHARES = {"a": 0.3, "b": 0.5}
EVALUATIONS = {"greedy": {"tasks": "running_sum"}, "two": {"tasks": "running_sum,jsonl:x"}}


def judge(rng, share, problems, num_samples=1):
    """An arm of an evaluation as `qerl evaluate` writes it, and what it is of: (problems, samples)."""
    right, cut = (rng.random((problems, num_samples)) < part for part in (share, 0.2))
    judged = [
        SimpleNamespace(right=r.tolist(), cut=c.tolist(), share=r.mean(), vote=bool(r[0]))
        for r, c in zip(right, cut, strict=True)
    ]
    return summarize(judged, num_samples), right


@pytest.fixture
def judged(study, finish, tmp_path):
    """judged(problems) -> the study's file, its folder, and (evaluation, arm, seed) -> what is right of each task."""

    def run(problems=40):
        file, out, rng, known = (
            study(sweep=None, evaluations=EVALUATIONS),
            tmp_path / "out",
            np.random.default_rng(1),
            {},
        )
        plan = read(file)
        out.mkdir()
        runner._claim(plan, out)
        for one in results.all_runs(plan, out):
            finish(one, out, 0.5)
            for name, tasks in (("greedy", {"x": (problems, 1)}), ("two", {"y": (problems, 3), "z": (7, 3)})):
                made = {task: judge(rng, SHARES[one.arm], *size) for task, size in tasks.items()}
                base = {task: judge(rng, 0.1, *size)[0] for task, size in tasks.items()}
                known[name, one.arm, one.seed] = [right for _, right in made.values()]
                policies = {task: {"base": base[task], "adapter": made[task][0]} for task in made}
                folder = out / one.folder / "evaluation" / name
                folder.mkdir(exist_ok=True)
                content = {"tasks": policies, "problems_sha256": dict.fromkeys(made, "0")}
                (folder / "evaluation.json").write_text(json.dumps(content))
        return file, out, known

    return run


def test_a_table_has_what_was_judged_of_each_answer_in_a_few_bytes(judged):
    file, out, known = judged(1000)
    plan = read(file)
    rows = results.collect(plan, out)
    table.write_table(rows, out / table.TABLE)
    there = table.read_table(out / table.TABLE)
    assert there == sorted(rows)
    values = results.final(there)
    for (name, arm, seed), tasks in known.items():
        found = by_problem.right(values, name, arm)[seed]
        assert [of.tolist() for of in found] == [of.mean(axis=1).tolist() for of in tasks]
    (of_two,) = [row for row in there if row[:2] == ("a", 0) and row[3].startswith("by_problem/two/0/adapter/right/3/")]
    assert unpacked(of_two[3].rpartition("/")[2], 1000, 3).tolist() == known["two", "a", 0][0].tolist()
    kinds = {tuple(name.split("/")[1:6]) for *_, name, _ in there if name.startswith(table.BY_PROBLEM)}
    assert ("greedy", "0", "base", "ended", "1") in kinds and ("two", "1", "adapter", "right", "3") in kinds
    greedy = [row for row in there if row[3].startswith(f"{table.BY_PROBLEM}greedy/0/adapter/")]
    table.write_table(greedy, out / "small.csv.gz")
    assert len(greedy) == 12 and (out / "small.csv.gz").stat().st_size / 6 < 400  # a run of 1000 problems


def test_an_interval_over_seeds_and_problems_stands_on_the_page_and_in_a_comparison(judged):
    file, out, known = judged()
    rows = results.collect(read(file), out)
    table.write_table(rows, out / table.TABLE)
    page = conduct(file, table=out / table.TABLE).read_text()
    differences = np.array(
        [(known["greedy", "b", s][0].astype(float) - known["greedy", "a", s][0])[:, 0] for s in range(3)]
    )
    mean, low, high = over_seeds_and_problems([differences])
    assert f"| b | a | 3 | 40 | {mean:+.1%} | {low:+.1%} to {high:+.1%} |" in page and by_problem.OF_PROBLEMS in page
    assert f"| b | a | 3 | {mean:+.1%} |" in page, "the accuracies are of other answers"
    said = compare(file, "b", "a", "accuracy", table=out / table.TABLE)
    assert f", over seeds and 40 problems {low:+.4g} to {high:+.4g}, p = " in said
    assert "problems" not in compare(file, "b", "a", "ended", table=out / table.TABLE)
    with pytest.raises(ValueError, match=r"has no metric x; it has accuracy, accuracy/two, .*") as refused:
        compare(file, "b", "a", "x", table=out / table.TABLE)
    assert "by_problem/" not in str(refused.value) and "problems/" not in str(refused.value)
    of_a_sweep = [(arm, 100, *rest) for arm, seed, *rest in rows if seed == 0]  # whose seeds are not compared
    assert by_problem.lines(read(file), results.final([*rows, *of_a_sweep]), {"a": "a", "b": "b"})[2] in page
    of_other = read(file).model_copy(update={"primary": "two"})
    two = by_problem.interval(of_other, results.final(rows), ("b", "a"))
    assert two is not None and two[:2] == (3, 47)
    of_two = [sum(known["two", arm, s][t].mean() for s in range(3) for t in (0, 1)) / 6 for arm in "ba"]
    assert two[2][0] == pytest.approx(of_two[0] - of_two[1])


def test_the_page_says_how_many_answers_ended(judged):
    file, out, _ = judged()
    rows = results.collect(read(file), out)
    ended = results.final(rows)["ended"]
    contents = [json.loads((out / f"b/seed-{s}/evaluation/greedy/evaluation.json").read_text()) for s in range(3)]
    assert ended["b"] == {s: content["tasks"]["x"]["adapter"]["ended"] for s, content in enumerate(contents)}
    of_base = results.final(rows)["base_ended"]["b"]
    assert of_base == {s: content["tasks"]["x"]["base"]["ended"] for s, content in enumerate(contents)}
    table.write_table(rows, out / table.TABLE)
    page = conduct(file, table=out / table.TABLE).read_text()
    assert "| arm | seeds | accuracy | ended | accuracy/two | ended/two |" in page
    assert f"| {cell(list(ended['b'].values()))} |" in page
    assert "accuracy counts the others by what they had written" in page


def test_a_table_of_before_has_its_page_without_them(judged):
    file, out, _ = judged()
    rows = results.collect(read(file), out)
    older = [row for row in rows if not row[3].startswith((table.BY_PROBLEM, "ended", "base_ended"))]
    table.write_table(older, out / table.TABLE)
    page = conduct(file, table=out / table.TABLE).read_text()
    assert "over seeds and problems" not in page and "ended" not in page and "| b | a | 3 |" in page
    one = [row for row in rows if not (row[:2] == ("a", 0) and row[3].startswith(table.BY_PROBLEM))]
    table.write_table(one, out / table.TABLE)
    assert "| b | a | 2 | 40 |" in conduct(file, table=out / table.TABLE).read_text(), "the two seeds that both have"
    few = [row for row in rows if not (row[0] == "a" and row[1] and row[3].startswith(table.BY_PROBLEM))]
    table.write_table(few, out / table.TABLE)
    assert "over seeds and problems" not in conduct(file, table=out / table.TABLE).read_text()


def test_a_study_that_goes_on_from_its_table_keeps_them(judged, tmp_path):
    file, out, _ = judged()
    plan = read(file)
    rows = results.collect(plan, out)
    rows += [(arm, seed, 2, f"{table.BASE}0", 1.0) for arm in "ab" for seed in (0, 1, 2)]
    table.write_table(rows, tmp_path / "before.csv.gz")
    (tmp_path / "anew").mkdir()
    finished.keep(plan, tmp_path / "before.csv.gz", tmp_path / "anew")
    again = results.collect(plan, tmp_path / "anew")
    assert sorted(again) == sorted(rows) and any(row[3].startswith(table.BY_PROBLEM) for row in again)
