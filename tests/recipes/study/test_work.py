"""In which order a study trains and evaluates, and which evaluations share a process."""

import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from waiting import PATIENCE, until

from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.study import processes, work
from qerl_recipes.study import run as runner
from qerl_recipes.study.plan import StudyError, read
from qerl_recipes.study.there import all_runs

pytestmark = pytest.mark.timeout(60)  # all take 10 s, and a study that begins the same again and again never ends


def written(*asked):
    """What `qerl evaluate-each` leaves behind."""
    for one in asked:
        folder = Path(one["output_dir"])
        folder.mkdir(parents=True)
        result = {"tasks": {"running_sum": {"adapter": {"accuracy": 0.5}}}}
        write_text(folder / "evaluation.json", json.dumps(result))


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """evaluated(plan, evaluate, jobs) -> what is said of failures, where all runs of a plan are trained and
    ``evaluate(asked, log)``, which gives its exit code, is the command."""

    def finish(plan, evaluate, jobs=1):
        for run in all_runs(plan, tmp_path / "out"):
            (tmp_path / "out" / run.folder / "adapter").mkdir(parents=True)
        monkeypatch.setattr(
            processes.Machine, "call", lambda self, line, log, gpu, beside=(): evaluate(json.loads(line[1]), log)
        )
        return work.finish_all(plan, tmp_path / "out", jobs, processes.Machine(None, Console(quiet=True), "CPU"))

    return finish


def names(asked):
    """The run and the name of each evaluation that was asked for together."""
    folders = [Path(one["output_dir"]) for one in asked]
    return [("/".join(folder.parts[-4:-2]), folder.name) for folder in folders]


def test_runs_that_wait_for_their_evaluation_on_the_same_weights_get_it_together(study, tmp_path, monkeypatch):
    sampled = {"tasks": "running_sum", "num_samples": 8, "temperature": 1}
    both = {"greedy": {"tasks": "running_sum"}, "sampled": sampled}
    plan, out = read(study(sweep=None, evaluations=both)), tmp_path / "out"
    trained, asked_together, logs, lock = [], [], [], threading.Lock()

    def call(self, arguments, log, gpu, beside=()):
        if arguments[0] == "train":
            if log.parent.name == "seed-0" and log.parent.parent.name == "b":
                until(lambda: asked_together)  # the first evaluation begins before it ends
            elif len(trained) == 5:
                until(lambda: len(asked_together) >= 2)
            with lock:
                trained.append(log.parent)
            return 0
        asked = json.loads(arguments[1])
        with lock:
            asked_together.append(asked)
            logs.append((log, list(beside)))
        if len(asked_together) == 1:
            until(lambda: len(trained) >= 5)
        written(*asked)
        return 0

    monkeypatch.setattr(processes.Machine, "call", call)
    assert runner.run(plan, out, jobs=2)
    first, second, *others = map(names, asked_together)
    assert first == [("a/seed-0", "greedy"), ("a/seed-0", "sampled")], "none waits for others to come"
    assert second[:2] == [("b/seed-0", "greedy"), ("b/seed-1", "greedy")], "those of a name behind each other"
    assert second[2:] == [("b/seed-0", "sampled"), ("b/seed-1", "sampled")]
    rest = {run for those in others for run, _ in those}
    assert rest == {"a/seed-1", "a/seed-2", "b/seed-2"} and len([one for those in others for one in those]) == 6
    assert logs[1] == (out / "b/seed-0/log.txt", [out / "b/seed-1/log.txt"])
    assert {one["quantization"] for one in asked_together[1]} == {"qerl_nvfp4"}


@pytest.mark.parametrize(("jobs", "most"), [(1, 1), (4, 1), (8, 2), (16, 4)])
def test_a_quarter_of_the_jobs_evaluates_while_there_is_something_to_train(jobs, most, study):
    runs = all_runs(read(study(sweep=None)), Path("out"))
    for at_work in range(most + 2):
        left = work.Left(read(study(sweep=None)), jobs, untrained=runs[:3], trained=runs[3:], evaluations=at_work)
        those, trained = left.next(jobs)
        assert trained is (at_work < most) and those == ([runs[3], runs[5]] if trained else [runs[0]])
        left = work.Left(read(study(sweep=None)), jobs, trained=runs[3:], evaluations=at_work)
        assert left.next(1) == ([runs[3], runs[5]], True), "there is nothing else to do"
        left.trained = runs[3:4]
        assert left.next(2) == ([runs[3]], True), "of fewer than there are places, too"


def test_what_is_left_to_evaluate_is_shared_by_the_places(study, evaluated):
    groups = []

    def evaluate(asked, log):
        groups.append(names(asked))
        written(*asked)
        return 0

    assert evaluated(read(study(sweep=None, arms={"a": {}, "b": {}})), evaluate, jobs=3) == []
    assert sorted(map(len, groups)) == [2, 2, 2] and len({one for group in groups for one in group}) == 6


@pytest.mark.parametrize("weights", [{"lora_r": 8}, {"model_name_or_path": "other"}, {"quantization": "nf4"}])
def test_other_weights_or_another_rank_are_evaluated_apart(weights, study):
    plan = read(
        study(sweep=None, seeds=[0, 1], arms={"a": {"quantization": "bf16"}, "b": {"quantization": "bf16", **weights}})
    )
    left = work.Left(plan, jobs=1, trained=all_runs(plan, Path("out")))
    assert [run.folder for run in left.next(1)[0]] == ["a/seed-0", "a/seed-1"]
    assert [run.folder for run in left.next(1)[0]] == ["b/seed-0", "b/seed-1"]
    assert left.next(1) == ([], False)


@pytest.mark.parametrize(
    ("reasons", "left_out"),
    [
        (["this recipe cannot run:\n  - no data"] * 4, True),
        (["this recipe cannot run:\n  - no data", "this recipe cannot run:\n  - no hub"] * 2, False),
        (["the engine has no room"] * 4, False),
    ],
)
def test_of_a_recipe_that_was_refused_twice_for_the_same_no_other_seed_is_begun(
    reasons, left_out, study, tmp_path, monkeypatch, capsys
):
    plan, seen = read(study(sweep=None, seeds=[0, 1, 2, 3])), []

    def call(self, arguments, log, gpu, beside=()):
        if arguments[0] == "evaluate-each":
            written(*json.loads(arguments[1]))
            return 0
        seen.append("/".join(log.parent.parts[-2:]))
        if seen[-1].startswith("b"):
            return 0
        log.write_text(f"$ qerl train\nqerl: {reasons[int(seen[-1][-1])]}\n")
        return 2

    monkeypatch.setattr(processes.Machine, "call", call)
    with pytest.raises(runner.RunsFailedError) as raised:
        runner.run(plan, tmp_path / "out")
    assert [run for run in seen if run.startswith("b")] == [f"b/seed-{i}" for i in range(4)]
    assert [run for run in seen if run.startswith("a")] == [f"a/seed-{i}" for i in range(2 if left_out else 4)]
    told = "2 more of a are not begun: two were refused for the same, and only seeds differ"
    assert (told in str(raised.value)) is (told in " ".join(capsys.readouterr().err.split())) is left_out
    assert "a/seed-0 ended with 2: qerl: " in str(raised.value)


def test_an_evaluation_that_fails_takes_no_other_with_it(study, evaluated):
    groups = []

    def evaluate(asked, log):
        groups.append([name for name, _ in names(asked)])
        for one in asked:
            if "b/seed-1" in one["output_dir"]:
                log.write_text("$ qerl evaluate-each\nqerl: it holds NaN\n")
                return 2
            written(one)
        return 0

    (failed,) = evaluated(read(study(sweep=None, arms={"a": {}, "b": {}})), evaluate)
    assert failed.startswith("b/seed-1 ended with 2: qerl: it holds NaN")
    runs = [f"{arm}/seed-{seed}" for seed in (0, 1, 2) for arm in "ab"]
    assert groups == [runs, ["b/seed-1"], ["a/seed-2"], ["b/seed-2"]], "what is there is not asked again"


def test_a_group_whose_engine_did_not_start_is_begun_once_more_as_a_group(study, evaluated):
    sizes = []

    def evaluate(asked, log):
        sizes.append(len(asked))
        log.write_text("$ qerl evaluate-each\nEngine core initialization failed\n")
        if len(sizes) == 1:
            return 1
        written(*asked)
        return 0

    assert evaluated(read(study(sweep=None, arms={"a": {}, "b": {}})), evaluate) == []
    assert sizes == [6, 6]


def test_a_group_is_no_longer_than_an_argument_may_be(study, evaluated):
    long, sizes = {"greedy": {"tasks": "running_sum", "system_prompt": "say it " * 4000}}, []

    def evaluate(asked, log):
        sizes.append(len(json.dumps(asked)))
        written(*asked)
        return 0

    assert evaluated(read(study(sweep=None, arms={"a": {}, "b": {}}, evaluations=long)), evaluate) == []
    assert len(sizes) == 2 and max(sizes) < 128 * 1024 < sum(sizes)


def test_a_stop_begins_nothing_more_and_names_no_failure(study, tmp_path, monkeypatch):
    plan, out, called = read(study(sweep=None)), tmp_path / "out", []

    def call(self, arguments, log, gpu, beside=()):
        called.append(arguments[0])
        if arguments[0] == "evaluate-each":
            self.stop()
            return -15
        return None if self.stopping.is_set() else 0

    monkeypatch.setattr(processes.Machine, "call", call)
    result = []
    asking = threading.Thread(target=lambda: result.append(work.finish_all(plan, out, 1, machine)))
    machine = processes.Machine(None, Console(quiet=True), "CPU")
    asking.start()
    asking.join(PATIENCE)
    assert result == [[]] and called[:2] == ["train", "evaluate-each"] and "evaluate-each" not in called[2:]


def test_a_refusal_of_several_lines_is_told_whole_when_it_comes_and_at_the_end_the_first_five_are(
    study, tmp_path, monkeypatch, capsys
):
    plan, out = read(study(sweep=None)), tmp_path / "out"

    def call(self, arguments, log, gpu, beside=()):
        refusal = "qerl: no room for the engine:\n  3 GB are free\n(QERL_TRACEBACK=1 shows the traceback)"
        log.write_text(f"$ qerl train\na warning\n{refusal}\n")
        return 2

    monkeypatch.setattr(processes.Machine, "call", call)
    with pytest.raises(StudyError) as error:
        runner.run(plan, out)
    assert "a/seed-0 ended with 2: qerl: no room for the engine: 3 GB are free (all" in str(error.value)
    assert "b/seed-2" not in str(error.value) and str(error.value).endswith("and 1 more, whose reasons stand above")
    said = " ".join(capsys.readouterr().err.split())
    assert "b/seed-2: failed: qerl: no room for the engine: 3 GB are free" in said


def test_a_base_that_is_not_there_is_refused_before_anything_runs(study, tmp_path, monkeypatch):
    monkeypatch.setattr(processes.Machine, "call", lambda *given, **more: pytest.fail("something runs"))
    Path("recipe.yaml").write_text("model_name_or_path: runs/models/small\n")
    with pytest.raises(StudyError, match=r"there is no folder runs/models/small; the head of recipe.yaml says how"):
        runner.run(read(study()), tmp_path / "out")


def test_only_the_bases_of_what_is_to_be_run_need_to_be_there(study, tmp_path, monkeypatch, finish, capsys):
    arms = {"a": {"model_name_or_path": "runs/models/gone"}, "b": {}}
    plan, out = read(study(sweep=None, arms=arms)), tmp_path / "out"
    out.mkdir()
    runner._claim(plan, out)
    for one in all_runs(plan, out):
        if one.arm == "a":
            finish(one, out, 0.5)
    clock = SimpleNamespace(now=100.0, sleep=time.sleep)
    clock.monotonic = lambda: clock.now

    def call(self, arguments, log, gpu, beside=()):
        finish(next(one for one in all_runs(plan, out) if out / one.folder == log.parent), out, 0.5)
        clock.now += 7
        return 0

    monkeypatch.setattr(processes.Machine, "call", call)
    monkeypatch.setattr(work, "time", clock)
    assert runner.run(plan, out)  # those of b
    said = capsys.readouterr().err
    first, *_, last = re.findall(r"(\d of 6) runs are there", said)
    assert (first, last) == ("3 of 6", "6 of 6")
    assert re.findall(r"b/seed-(\d): done, (.*)", said) == [(seed, "7 s, 50.0%") for seed in "012"]
    monkeypatch.setattr(processes.Machine, "call", lambda *given, **more: pytest.fail("something runs"))
    assert runner.run(plan, out)  # none
