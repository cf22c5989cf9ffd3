"""The runs of a study: what is done, in which order and where, what is done again, and what a failure leaves."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil
import pytest
import yaml
from rich.console import Console
from waiting import PATIENCE, runs, until

from qerl_recipes.files.whole_folder import lock, write_text
from qerl_recipes.study import processes, results, table, there, work
from qerl_recipes.study import run as runner
from qerl_recipes.study.conduct import conduct
from qerl_recipes.study.plan import Study, StudyError, first_runs, later_runs, read


def test_a_folder_of_another_study_is_left_alone(study, tmp_path, finish):
    plan = read(study(sweep=None))
    for one in first_runs(plan):
        finish(one, tmp_path / "out", 0.5)
    with pytest.raises(StudyError, match="is not empty and holds no study"):
        runner.run(plan, tmp_path / "out")
    (tmp_path / "out" / "study.json").write_text(plan.model_dump_json())
    assert runner.run(plan, tmp_path / "out")  # all is there: nothing is started
    look = {"claim": "x", "pair": ["b", "a"], "expect": "higher", "margin": 0.01}
    assert runner.run(read(study(sweep=None, afterwards={"claims": [look]})), tmp_path / "out")  # which is no plan
    changed = read(study(sweep=None, target_reward=0.7))
    with pytest.raises(StudyError, match="holds another study: target_reward differ"):
        runner.run(changed, tmp_path / "out")


def test_a_run_that_fails_is_named_with_its_reason_and_the_others_have_their_page(study, tmp_path, finish):
    file, out = study(sweep=None, seeds=[0, 1]), tmp_path / "out"
    plan = read(file)
    for one in first_runs(plan):
        if one.folder == "a/seed-0":
            (out / one.folder / "adapter").mkdir(parents=True)  # trained, as it seems: what fails is the evaluation
        else:
            finish(one, out, 0.5)
    (out / "study.json").write_text(plan.model_dump_json())
    with pytest.raises(StudyError) as error:
        conduct(file, out, jobs=2)
    assert re.fullmatch(r"a/seed-0 ended with 2: qerl: .*a/seed-0/adapter is no adapter.*", str(error.value))
    assert "$ qerl evaluate-each '[{" in (out / "a/seed-0/log.txt").read_text()
    assert "3 of 4 runs are there" in (out / "README.md").read_text()
    assert len(results.final(table.read_table(out / table.TABLE))["accuracy"]["b"]) == 2


def test_two_studies_never_work_in_one_folder_and_a_killed_one_leaves_no_process_behind(study, tmp_path, monkeypatch):
    plan, out = read(study(sweep=None, seeds=[0])), tmp_path / "out"
    out.mkdir()
    (out / "study.json").write_text(plan.model_dump_json())
    handle = lock(out)
    with pytest.raises(StudyError, match="another `qerl study` is at work in"):
        runner.run(plan, out)
    os.close(handle)
    # a process that starts another as a study does, and is killed
    script = (
        "import sys, threading; from pathlib import Path; from rich.console import Console;"
        "from qerl_recipes.study import processes; processes.CLI = 'timeit';"
        "m = processes.Machine(None, Console(), 'CPU');"
        f"m.call(['-n', '1', '-r', '1', 'import time; time.sleep(300)'], Path({str(out)!r}) / 'log', None)"
    )
    process = subprocess.Popen([sys.executable, "-c", script])

    def begun():
        return [child.pid for child in psutil.Process(process.pid).children() if "timeit" in child.cmdline()]

    (child,) = until(begun)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert until(lambda: not runs(child))


def test_a_study_that_is_killed_while_it_starts_a_process_leaves_none_behind(tmp_path):
    """Before that one can ask the kernel for its end."""
    script = (
        "import os, signal, sys, time; from pathlib import Path; from types import SimpleNamespace\n"
        "from rich.console import Console\n"
        "from qerl_recipes.machine import processes as ours\n"
        "from qerl_recipes.study import processes\n"
        "libc, parent = ours.LIBC, os.getpid()\n"
        "def prctl(*arguments):\n"
        f"    Path({str(tmp_path / 'started')!r}).write_text(str(os.getpid()))\n"
        "    os.kill(parent, signal.SIGKILL)\n"
        "    while os.getppid() == parent: time.sleep(0.01)\n"
        "    libc.prctl(*arguments)\n"
        "ours.LIBC, processes.CLI = SimpleNamespace(prctl=prctl), 'timeit'\n"
        "machine = processes.Machine(None, Console(), 'CPU')\n"
        f"machine.call(['import time; time.sleep(300)'], Path({str(tmp_path)!r}) / 'log', None)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    started = int((tmp_path / "started").read_text())
    assert until(lambda: not runs(started))


def test_a_training_that_a_killed_study_left_behind_is_waited_for(study, tmp_path, monkeypatch):
    plan, out = read(study(sweep=None, seeds=[0])), tmp_path / "out"
    refused, called = [], []

    def call(self, arguments, log, gpu, beside=()):
        called.append((log.parent, len(refused)))
        return 1

    monkeypatch.setattr(processes.Machine, "call", call)
    run = out / "a/seed-0"
    run.mkdir(parents=True)
    (run / "log.txt").write_text("qerl: no")
    (out / "b/seed-0").mkdir(parents=True)
    (out / "b/seed-0/log.txt").write_text("qerl: no")
    (out / "study.json").write_text(plan.model_dump_json())
    handle = lock(run)

    def ask(folder):
        try:
            return lock(folder)
        except BlockingIOError:
            refused.append(folder)
            if len(refused) == 2:
                os.close(handle)  # the training ends
            raise

    monkeypatch.setattr(work, "lock", ask)
    with pytest.raises(StudyError, match="ended with 1: qerl: no"):
        runner.run(plan, out)
    assert refused == [run, run] and called == [(run, 2), (out / "b/seed-0", 2)]


def test_what_a_study_leaves_is_there_as_a_whole_or_not_at_all(study, tmp_path, monkeypatch, finish):
    """Whoever sums up a folder of studies while one is at work, or after a power cut, finds no half of a file."""
    plan, out = read(study(sweep=None)), tmp_path / "out"
    for write in ("write_text", "write_bytes"):
        monkeypatch.setattr(Path, write, lambda *_, **options: pytest.fail("written where it is read"))
    monkeypatch.setattr(processes.Machine, "call", lambda *given, **more: 1)
    monkeypatch.setattr(work, "_reason", lambda log: "no")
    with pytest.raises(StudyError, match="ended with 1"):
        runner.run(plan, out)
    left = json.loads((out / "study.json").read_text())
    assert left.pop(runner.RECIPE) == {"model_name_or_path": "base"}
    assert Study.model_validate(left) == plan
    table.write_table([("a", 0, 1, "reward", 0.5)], out / table.TABLE)
    assert table.read_table(out / table.TABLE) == [("a", 0, 1, "reward", 0.5)]
    assert "0 of" in conduct(Path("study.yaml"), table=out / table.TABLE).read_text()


def test_a_second_ctrl_c_while_the_first_is_answered_is_answered_too():
    """A signal's handler runs in the very thread that has the lock."""
    machine = processes.Machine(None, Console(), "CPU")

    class Process:
        told = 0

        def send_signal(self, number):
            self.told += 1
            if self.told == 1:
                machine.stop()

    machine.processes.add(process := Process())
    stopping = threading.Thread(target=machine.stop, daemon=True)
    stopping.start()
    stopping.join(PATIENCE)
    assert process.told == 2 and machine.stopping.is_set() and not stopping.is_alive()


def test_the_processes_get_the_environment_of_the_command_not_what_libraries_add_to_it(study, tmp_path, monkeypatch):
    plan, out, seen = read(study(sweep=None, seeds=[0])), tmp_path / "out", []
    monkeypatch.setenv("A_VARIABLE", "of the user's")
    monkeypatch.setattr(runner, "check", lambda study: monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of a library"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    popen = subprocess.Popen

    def start(command, **options):
        seen.append(options["env"])
        return popen([sys.executable, "-c", "raise SystemExit(1)"], **options)

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    with pytest.raises(StudyError, match="ended with 1"):
        runner.run(plan, out)
    assert len(seen) == 4 and all(given["A_VARIABLE"] == "of the user's" for given in seen)
    assert not any("TORCHINDUCTOR_CACHE_DIR" in given for given in seen)


@pytest.mark.parametrize(
    ("jobs", "own", "threads"), [(1, None, None), (2, None, "4"), (3, None, "2"), (9, None, "1"), (2, "7", "7")]
)
def test_each_job_gets_its_share_of_the_cores_and_engines_of_its_own(jobs, own, threads, monkeypatch):
    """A port that this process has found free for its own engine would be one for the engines of all jobs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("MASTER_PORT", "1234")
    if own is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    given = runner._environment(jobs)
    assert given.get("OMP_NUM_THREADS") == threads and "MASTER_PORT" not in given


def test_an_arm_goes_on_at_its_best_value_while_another_is_at_its_sweep_or_has_failed(
    study, tmp_path, monkeypatch, finish
):
    plan, out, order = read(study()), tmp_path / "out", []

    def call(self, arguments, log, gpu, beside=()):
        if arguments[0] == "train":
            order.append(f"{log.parent.parent.name}/{log.parent.name}")
            if order[-1] == "b@0.001/seed-101":
                log.write_text("qerl: not this one")
                return 3
        else:
            finish(next(r for r in there.all_runs(plan, out) if out / r.folder == log.parent), out, 0.5)
        return 0

    monkeypatch.setattr(processes.Machine, "call", call)
    with pytest.raises(StudyError, match=r"b@0\.001/seed-101 ended with 3"):
        runner.run(plan, out)
    sweep, later = order[:8], order[8:]
    assert sweep == [r.folder for r in first_runs(plan)]
    # both values are equally good: the smaller one, and the common one beside it; b has no best value
    assert later == [f"a@{value}/seed-{seed}" for value in ("0.0001", "0.001") for seed in (0, 1, 2)]
    order.clear()
    monkeypatch.setattr(processes.Machine, "call", lambda *given, **more: order.append(given[2].parent.name) or 3)
    (out / "b@0.001/seed-101/log.txt").write_text("qerl: no\n")
    with pytest.raises(StudyError, match="ended with 3: qerl: no"):
        runner.run(plan, out)
    assert order == ["seed-101"]  # what is there is not done again


def test_what_failed_to_start_is_begun_once_more_and_what_was_refused_or_had_begun_is_not(
    study, tmp_path, monkeypatch, finish
):
    plan, out, called = read(study(sweep=None, seeds=[0, 1, 2, 3])), tmp_path / "out", Counter()
    ends = {"a/seed-1": "OSError: address already in use", "a/seed-2": "qerl: no such model", "a/seed-3": "died"}

    def call(self, arguments, log, gpu, beside=()):
        name = f"{log.parent.parent.name}/{log.parent.name}"
        called[name, arguments[0]] += 1
        log.write_text(f"$ qerl {arguments[0]}\n{ends.get(name, '')}\n")
        if arguments[0] == "train" and name in ends:
            if name == "a/seed-3":
                (log.parent / "metrics.jsonl").write_text("{}\n")
            if name != "a/seed-1" or called[name, "train"] == 1:
                return 1
        if arguments[0] == "evaluate-each":
            if name == "b/seed-0" and called[name, "evaluate-each"] == 1:
                return -9  # somebody ended it
            finish(next(r for r in there.all_runs(plan, out) if r.folder == name), out, 0.5)
        return 0

    monkeypatch.setattr(processes.Machine, "call", call)
    with pytest.raises(StudyError) as error:
        runner.run(plan, out)
    assert [name for name in ("a/seed-1", "a/seed-2", "a/seed-3", "b/seed-0") if name in str(error.value)] == [
        "a/seed-2",
        "a/seed-3",
        "b/seed-0",
    ]
    twice = {key for key, times in called.items() if times == 2}
    assert twice == {("a/seed-1", "train")} and max(called.values()) == 2


def test_what_is_begun_once_more_is_what_is_still_missing(study, tmp_path, monkeypatch):
    sampled = {"tasks": "running_sum", "num_samples": 8, "temperature": 1}
    plan = read(study(sweep=None, seeds=[0], evaluations={"greedy": {"tasks": "running_sum"}, "sampled": sampled}))
    out, asked = tmp_path / "out", defaultdict(list)

    def call(self, arguments, log, gpu, beside=()):
        log.write_text("$ qerl\nOSError: address already in use\n")
        if arguments[0] == "train":
            (log.parent / "metrics.jsonl").write_text("{}\n")
            (log.parent / "adapter").mkdir()
            return 0
        missing, mine = json.loads(arguments[1]), asked[log.parent.parent.name]
        mine.append([Path(one["output_dir"]).name for one in missing])
        for one in missing[: 1 if len(mine) == 1 else None]:
            folder = Path(one["output_dir"])
            folder.mkdir(parents=True)
            result = {"tasks": {"running_sum": {"adapter": {"accuracy": 0.5}}}}
            write_text(folder / "evaluation.json", json.dumps(result))
        return 1 if len(mine) == 1 else 0

    monkeypatch.setattr(processes.Machine, "call", call)
    assert runner.run(plan, out)
    assert dict(asked) == {arm: [["greedy", "sampled"], ["sampled"]] for arm in "ab"}


def test_the_jobs_are_dealt_out_to_the_gpus_and_the_base_is_judged_once(study, tmp_path, monkeypatch):
    both = {
        "greedy": {"tasks": "running_sum"},
        "sampled": {"tasks": "running_sum", "num_samples": 8, "temperature": 1.0},
    }
    plan, out = read(study(evaluations=both)), tmp_path / "out"
    calls, at_work, most = [], Counter(), Counter()

    def call(self, arguments, log, gpu, beside=()):
        with self.lock:
            calls.append((arguments, gpu))
            at_work[gpu] += 1
            most[gpu] = max(most[gpu], at_work[gpu])
        time.sleep(0.02)  # as long as the others need to take a GPU each
        for asked in json.loads(arguments[1]) if arguments[0] == "evaluate-each" else ():
            folder = Path(asked["output_dir"])
            folder.mkdir(parents=True)
            accuracy = {"accuracy": 0.5, "pass_at": {"8": {"value": 0.75}}, "maj_at": {"8": {"value": 0.25}}}
            arms = {"adapter": accuracy, **({} if asked["adapter_only"] else {"base": {"accuracy": 0.1}})}
            write_text(folder / "evaluation.json", json.dumps({"tasks": {"running_sum": arms}}))  # as it is written
        with self.lock:
            at_work[gpu] -= 1
        return 0

    monkeypatch.setattr(processes.Machine, "call", call)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert runner.run(plan, out, jobs=4)
    assert most.keys() == {"2", "5"} and max(most.values()) <= 2, "two of four on each"
    evaluated = [json.loads(arguments[1]) for arguments, _ in calls if arguments[0] == "evaluate-each"]
    folders = Counter(one["output_dir"] for asked in evaluated for one in asked)
    of_sweep = {folder for folder in folders if "seed-10" in folder}
    assert len(of_sweep) == 8 and {Path(folder).name for folder in of_sweep} == {"greedy"}
    assert len(folders.keys() - of_sweep) == 2 * 12 and set(folders.values()) == {1}
    with_base = {one["output_dir"] for asked in evaluated for one in asked if not one["adapter_only"]}
    labels = [f"{arm}@{value}" for arm in "ab" for value in (0.0001, 0.001)]
    assert with_base == {str(out / f"{of}/seed-0/evaluation/{name}") for of in labels for name in both}
    found = there.figures(plan, later_runs(plan, {"a": 1e-3, "b": 1e-3})[0], out)
    assert found == {"accuracy": 0.5, "pass@8": 0.75, "maj@8": 0.25, "base_accuracy": 0.1} | {
        "accuracy/sampled": 0.5, "pass@8/sampled": 0.75, "maj@8/sampled": 0.25, "base_accuracy/sampled": 0.1
    }  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert work.visible_gpus() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.integration
def test_a_killed_study_goes_on_where_it_was_and_ends_as_one_that_was_not(tmp_path):
    """Two arms of the demo, one seed; killed by the clock once, the same first steps as a run that was left alone."""
    root = Path(__file__).parents[3]
    content = {
        "recipe": str(root / "recipes/demo/grpo/nvfp4_lora.yaml"),
        "arms": {
            arm: {
                "quantization": quantization,
                "max_steps": 4,
                "save_strategy": "steps",
                "save_steps": 1,
                "model_name_or_path": str(root / "recipes/demo/starting_model"),
            }
            for arm, quantization in (("bf16_lora", "bf16"), ("nvfp4_lora", "qerl_nvfp4"))
        },
        "seeds": [0],
        "evaluations": {"greedy": {"tasks": "running_sum", "max_samples": 8, "gpu_memory_utilization": 0.2}},
        "primary": "greedy",
    }
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(content))

    def call(folder, *options):
        line = [sys.executable, "-m", "qerl_recipes.cli", "study", str(file), "--output", str(folder), *options]
        assert subprocess.run(line, timeout=280).returncode == 0
        return sorted(table.read_table(folder / table.TABLE))

    broken, whole = tmp_path / "broken", tmp_path / "whole"
    assert not any(metric == "accuracy" for *_, metric, _ in call(broken, "--minutes", "0.25"))
    again, at_once = call(broken), call(whole)
    timed = ("seconds", "per_s", "hours/", "adapter_version")
    assert all(any(row[3] == "hours/CPU" for row in rows) for rows in (again, at_once))
    kept = [[row for row in rows if not any(word in row[3] for word in timed)] for rows in (again, at_once)]
    assert kept[0] == kept[1] and sum(row[3] == "accuracy" for row in again) == 2
    assert all(math.isfinite(row[4]) for row in again)
