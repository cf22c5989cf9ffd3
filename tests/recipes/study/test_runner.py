"""Test how a study runs: which runs are done, in which order and where, which are done again, and what a
failure leaves.
"""

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

import pytest
import yaml
from tqdm import tqdm
from typer.testing import CliRunner
from waiting import PATIENCE, until

from qerl_recipes import cli
from qerl_recipes.cli import app
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.study import inventory, runner
from qerl_recipes.study.inventory import all_runs, read_table
from qerl_recipes.study.plan import StudyError, first_runs, read

pytestmark = pytest.mark.timeout(60)  # a bug that restarts a study forever would never end
SAMPLED = {"tasks": "running_sum", "num_samples": 8, "temperature": 1.0}
BOTH = {"greedy": {"tasks": "running_sum"}, "sampled": SAMPLED}


def written(*options):
    """Write what `qerl evaluate-each` leaves."""
    for one in options:
        folder = Path(one["output_dir"])
        folder.mkdir(parents=True)
        policies = {"adapter": {"accuracy": 0.5}, **({} if one["adapter_only"] else {"base": {"accuracy": 0.1}})}
        write_text(folder / "evaluation.json", json.dumps({"tasks": {"running_sum": policies}}))


def name_of(log):
    return f"{log.parent.parent.name}/{log.parent.name}"


@pytest.fixture
def calls(monkeypatch):
    """Return calls(train, evaluate), which replaces the commands.

    Each gets the run's name, its log and its options, and returns an exit code.
    """

    def replace(train=lambda *_: 0, evaluate=lambda name, log, options: written(*options)):
        made = []

        def call(self, arguments, log, gpu, *, beside=()):
            if self.stopping.is_set():
                return None
            with self.lock:
                made.append((arguments[0], name_of(log)))
            if arguments[0] == "train":
                return train(name_of(log), log, self) or 0
            return evaluate(name_of(log), log, json.loads(arguments[1])) or 0

        monkeypatch.setattr(runner.Machine, "call", call)
        return made

    return replace


def test_a_missing_base_is_refused_for_what_is_to_be_run(study, finish, claimed, calls, tmp_path):
    made = calls()
    Path("recipe.yaml").write_text("model_name_or_path: runs/models/small\n")
    with pytest.raises(StudyError, match=r"there is no folder runs/models/small; the head of recipe.yaml says how"):
        runner.run(read(study()), tmp_path / "none")
    file = study(sweep=None, arms={"a": {"model_name_or_path": "runs/models/gone"}, "b": {"model_name_or_path": "hub"}})
    plan = read(file)
    out = claimed(plan, tmp_path / "out")
    assert made == []
    for one in all_runs(plan, out):
        if one.arm == "a":
            finish(one, out, 0.5)
    assert runner.run(plan, out) and {name[0] for _, name in made} == {"b"}


# These tests are about processes.

SHOWS = """
import os, sys, time
print("it sees", os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["A_VARIABLE"], flush=True)
print("it fails", file=sys.stderr)
time.sleep(60 if "sleep" in sys.argv else 0)
raise SystemExit(3)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Provide a machine whose commands print which GPU they see, complain, and end with 3."""
    (tmp_path / "shows.py").write_text(SHOWS)
    monkeypatch.setattr(runner, "CLI", "shows")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1,2", "A_VARIABLE": "mine"}
    return runner.Machine("H200", environment, share=0.5)


def test_a_log_has_every_command_and_no_login(machine, tmp_path):
    log = tmp_path / "log.txt"
    assert machine.call(["train", "--vllm_server_base_url", "http://me:secret@host"], log, "5") == 3
    assert machine.call(["evaluate-each"], log, None) == 3
    first = ["$ qerl train --vllm_server_base_url http://***@host", "it sees 5 mine", "it fails"]
    assert log.read_text().splitlines() == [*first, "$ qerl evaluate-each", "it sees 0,1,2 mine", "it fails"]
    assert not machine.processes, "what has ended is asked for nothing more"


def test_a_stop_reaches_what_runs_and_nothing_is_started_after_it(machine, tmp_path):
    ended = []
    running = threading.Thread(target=lambda: ended.append(machine.call(["sleep"], tmp_path / "log.txt", None)))
    running.start()
    until(lambda: "it fails" in (tmp_path / "log.txt").read_text() if (tmp_path / "log.txt").exists() else False)
    assert all(os.getpgid(process.pid) != os.getpgrp() for process in machine.processes), "Ctrl-C would end it at once"
    machine.stop()
    running.join(PATIENCE)
    assert ended == [-signal.SIGTERM]
    assert machine.call(["train"], tmp_path / "other.txt", None) is None and not (tmp_path / "other.txt").exists()


def test_who_trains_an_arm_decides_its_command_and_what_is_judged(study, tmp_path, monkeypatch):
    """Judge a whole model as it was asked in training, and keep the figures of what was trained apart from a base's."""
    recipe = "model_name_or_path: base\nsystem_prompt: Add.\nmax_completion_length: 40\n"
    sampled = "chat_template_kwargs: {thinks: false}\ntop_k: 5\ngeneration_kwargs: '{\"ignore_eos\": true}'\n"
    Path("recipe.yaml").write_text(recipe + sampled)
    arms = {"a": {"trainer": "trl"}, "b": {"trainer": "trl_all_weights", "dtype": "float32", "bf16": False}}
    plan, out, made = read(study(sweep=None, arms=arms, seeds=[0], comparisons=[])), tmp_path / "out", []

    def call(self, arguments, log, gpu, *, beside=()):
        made.append(arguments)
        if arguments[0] == "evaluate-each":
            for one in json.loads(arguments[1]):
                policies = {"adapter": {"accuracy": 0.5}, "base": {"accuracy": 0.1}}
                if one["adapter"] is None:
                    policies = {"base": {"accuracy": 0.7}}
                Path(one["output_dir"]).mkdir(parents=True)
                write_text(Path(one["output_dir"]) / "evaluation.json", json.dumps({"tasks": {"x": policies}}))
        else:
            (log.parent / ("model" if "--all-weights" in arguments else "adapter")).mkdir()
            write_text(log.parent / "metrics.jsonl", json.dumps({"step": 1, "reward": 0.5}) + "\n")
        return 0

    monkeypatch.setattr(runner.Machine, "call", call)
    assert runner.finish_all(plan, out, 1, runner.Machine("CPU")) == []
    trained = [words for words in made if words[0] != "evaluate-each"]
    assert [words[: words.index("--config")] for words in trained] == [
        ["train-stock-trl"],
        ["train-stock-trl", "--all-weights"],
    ]
    assert not any("--trainer" in words for words in trained) and all("--seed" in words for words in trained)
    a, b = sorted((json.loads(words[1])[0] for words in made if words not in trained), key=lambda one: one["base"])
    a, b = (a, b) if a["adapter"] else (b, a)
    assert (a["base"], Path(a["adapter"])) == ("base", out / "a/seed-0/adapter")
    assert (Path(b["base"]), b["system_prompt"], b["max_new_tokens"]) == (out / "b/seed-0/model", "Add.", 40)
    assert (b["dtype"], a.get("dtype")) == ("float32", None)
    assert (b["chat_template_kwargs"], b["generation_kwargs"]) == ({"thinks": False}, {"ignore_eos": True}), "greedy"
    rows = inventory.collect(plan, out).set_index(["arm", "metric"]).value
    assert (rows["a", "accuracy"], rows["b", "accuracy"], rows["a", "base_accuracy"]) == (0.5, 0.7, 0.1)
    assert ("b", "base_accuracy") not in rows.index


# These tests are about order, places and groups.


@pytest.mark.parametrize("weights", [{"lora_r": 8}, {"quantization": "nf4"}])
def test_other_weights_or_another_rank_are_evaluated_apart(weights, study):
    arms = {"a": {"quantization": "bf16"}, "b": {"quantization": "bf16", **weights}}
    plan = read(study(sweep=None, seeds=[0, 1], arms=arms))
    trained = all_runs(plan, Path("out"))
    assert [run.folder for run in runner.take_together(plan, trained, 1)] == ["a/seed-0", "a/seed-1"]
    assert [run.folder for run in runner.take_together(plan, trained, 1)] == ["b/seed-0", "b/seed-1"]
    assert trained == []


@pytest.fixture
def evaluated(tmp_path, calls):
    """Return evaluated(plan, evaluate), which treats all runs of a plan as trained and gives the reasons of failures.

    ``evaluate`` is that of ``calls``.
    """

    def finish_all(plan, evaluate):
        for run in all_runs(plan, tmp_path / "out"):
            (tmp_path / "out" / run.folder / "adapter").mkdir(parents=True)
        calls(evaluate=evaluate)
        return runner.finish_all(plan, tmp_path / "out", 1, runner.Machine("CPU"))

    return finish_all


def test_an_evaluation_that_fails_takes_no_other_with_it(study, evaluated):
    groups = []

    def evaluate(name, log, options):
        groups.append(["/".join(Path(one["output_dir"]).parts[-4:-2]) for one in options])
        for one in options:
            if "b/seed-1" in one["output_dir"]:
                log.write_text("$ qerl evaluate-each\nqerl: it holds NaN\n")
                return 2
            written(one)
        return 0

    (failed,) = evaluated(read(study(sweep=None, arms={"a": {}, "b": {}})), evaluate)
    assert failed.startswith("b/seed-1 ended with 2: qerl: it holds NaN")
    runs = [f"{arm}/seed-{seed}" for seed in (0, 1, 2) for arm in "ab"]
    assert groups == [runs, ["b/seed-1"], ["a/seed-2"], ["b/seed-2"]], "what is there is not asked again"


def test_jobs_are_dealt_out_to_the_gpus_and_the_base_is_judged_once(study, tmp_path, monkeypatch):
    plan, out = read(study(evaluations=BOTH)), tmp_path / "out"
    calls, at_work, most, four = [], Counter(), Counter(), threading.Barrier(4)

    def call(self, arguments, log, gpu, *, beside=()):
        with self.lock:
            calls.append((arguments, self.share))
            at_work[gpu] += 1
            most[gpu] = max(most[gpu], at_work[gpu])
            is_early = len(calls) <= 4
        if is_early:
            four.wait(PATIENCE)
        time.sleep(0.02)  # beside others
        if arguments[0] == "evaluate-each":
            written(*json.loads(arguments[1]))
        with self.lock:
            at_work[gpu] -= 1
        return 0

    monkeypatch.setattr(runner.Machine, "call", call)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert runner.run(plan, out, jobs=4)
    assert most == {"2": 2, "5": 2}, "two of four on each"
    assert {share for _, share in calls} == {0.5}
    trained = [arguments for arguments, _ in calls if arguments[0] == "train"]
    assert len(trained) == 8 + 12 and all(arguments[1:3] == ["--config", "recipe.yaml"] for arguments in trained)
    evaluated = [one for arguments, _ in calls if arguments[0] != "train" for one in json.loads(arguments[1])]
    of_sweep = [one for one in evaluated if "seed-10" in one["output_dir"]]
    assert len(of_sweep) == 8 and {Path(one["output_dir"]).name for one in of_sweep} == {"greedy"}
    assert len(evaluated) == 8 + 2 * 12 == len({one["output_dir"] for one in evaluated})
    with_base = {one["output_dir"] for one in evaluated if not one["adapter_only"]}
    labels = [f"{arm}@{value}" for arm in "ab" for value in (0.0001, 0.001)]
    assert with_base == {str(out / f"{label}/seed-0/evaluation/{name}") for label in labels for name in BOTH}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert runner.visible_gpus() == []


def test_an_arm_goes_on_at_its_best_value_while_another_has_failed(study, calls, tmp_path):
    plan, out = read(study()), tmp_path / "out"

    def train(name, log, machine):
        if name == "b@0.001/seed-101":
            log.write_text("qerl: not this one")
            return 3

    made = calls(train)
    with pytest.raises(StudyError, match=r"b@0\.001/seed-101 ended with 3"):
        runner.run(plan, out)
    order = [name for command, name in made if command == "train"]
    assert order[:8] == [one.folder for one in first_runs(plan)]
    # Both values are equally good for a: it runs at the smaller one and at the common one. b has no best value.
    assert order[8:] == [f"a@{value}/seed-{seed}" for value in ("0.0001", "0.001") for seed in (0, 1, 2)]
    made = calls(train)
    with pytest.raises(StudyError, match="ended with 3: qerl: not this one"):
        runner.run(plan, out)
    assert made == [("train", "b@0.001/seed-101")]  # finished runs are not repeated


# These tests are about failures and ends.


def test_what_failed_to_start_is_begun_once_more(study, calls, tmp_path):
    """Start a run again only if it failed to start, not if it was refused, had begun or was ended."""
    plan, out = read(study(sweep=None, seeds=[0, 1, 2, 3])), tmp_path / "out"
    ends = {"a/seed-1": "OSError: address already in use", "a/seed-2": "qerl: no such model", "a/seed-3": "died"}
    ends["b/seed-3"] = "qerl: another process gave memory back while vLLM measured this GPU"
    called = Counter()

    def train(name, log, machine):
        called[name, "train"] += 1
        log.write_text(f"$ qerl train\n{ends.get(name, '')}\n")
        if name == "a/seed-3":
            (log.parent / "metrics.jsonl").write_text("{}\n")
        return name in ends and (name not in ("a/seed-1", "b/seed-3") or called[name, "train"] == 1)

    def evaluate(name, log, options):
        called[name, "evaluate"] += 1
        if any("b/seed-0" in one["output_dir"] for one in options) and called["b/seed-0", "evaluate"] == 1:
            return -9  # another process killed it
        written(*options)

    calls(train, evaluate)
    with pytest.raises(StudyError) as error:
        runner.run(plan, out)
    failed = re.findall(r"(\w/seed-\d) ended with", str(error.value))
    assert sorted(failed) == ["a/seed-2", "a/seed-3", "b/seed-0"]
    assert {key for key, times in called.items() if times == 2} == {("a/seed-1", "train"), ("b/seed-3", "train")}


def test_runs_that_find_the_gpu_full_are_begun_again_fewer_at_a_time(study, calls, tmp_path, capsys):
    """Let two of four runs have room at a time, and one never."""
    plan, out = read(study(sweep=None, seeds=[0, 1])), tmp_path / "out"
    lock, begun = threading.Barrier(4, timeout=30), Counter()

    def train(name, log, machine):
        begun[name] += 1
        log.write_text("$ qerl train\n")
        if begun.total() <= 4:
            lock.wait()
        if name == "b/seed-1" or (name == "a/seed-1" and begun[name] == 1):
            log.write_text("$ qerl train\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\nwarning\n")
            return 1

    calls(train)
    with pytest.raises(StudyError, match=r"^b/seed-1 ended with 1: torch\.OutOfMemoryError: CUDA out of memory"):
        runner.run(plan, out, jobs=4)
    assert begun == {"a/seed-0": 1, "a/seed-1": 2, "b/seed-0": 1, "b/seed-1": 3}
    assert "1 at a time from here on: more do not fit into the memory of the GPU" in capsys.readouterr().err


def test_minutes_stop_a_study(study, calls, tmp_path, capsys):
    calls(lambda name, log, machine: machine.stopping.wait(30) and -15)
    conduct_it = ["study", str(study(sweep=None)), "--output", str(tmp_path / "out"), "--minutes", "0.005"]
    assert "greater than or equal to 0" in CliRunner().invoke(app, [*conduct_it[:-1], "-1"]).output
    said = CliRunner().invoke(app, conduct_it)
    assert said.exit_code == 0 and "stopped before the end; the same command goes on" in said.output


def test_a_stopped_study_says_so_beside_a_failed_run(study, calls, tmp_path):
    def train(name, log, machine):
        log.write_text("$ qerl train\nqerl: it holds NaN\n")
        return 2 if name == "a/seed-0" else machine.stopping.wait(30) and -15

    calls(train)
    conduct_it = ["study", str(study(sweep=None)), "--output", str(tmp_path / "out"), "--minutes", "0.05"]
    said = CliRunner().invoke(app, conduct_it)
    assert said.exit_code != 0 and "stopped before the end; the same command goes on" in said.output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.integration
def test_a_killed_study_ends_as_one_that_was_not(tmp_path):
    """Run two arms of the demo with one seed, killed once, and compare its first steps with those of an
    undisturbed run.
    """
    root = Path(__file__).parents[3]
    keys = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    keys["model_name_or_path"] = str(root / "recipes/demo/starting_model")
    content = {
        "recipe": str(root / "recipes/demo/grpo/nvfp4_lora.yaml"),
        "arms": {"bf16_lora": {"quantization": "bf16", **keys}, "nvfp4_lora": {"quantization": "qerl_nvfp4", **keys}},
        "seeds": [0],
        "evaluations": {"greedy": {"tasks": "running_sum", "max_samples": 8, "gpu_memory_utilization": 0.2}},
        "primary": "greedy",
    }
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(content))

    def call(folder, *options):
        line = [sys.executable, "-m", "qerl_recipes.cli", "study", str(file), "--output", str(folder), *options]
        assert subprocess.run(line, timeout=280).returncode == 0
        return read_table(folder / inventory.TABLE)

    broken, whole = tmp_path / "broken", tmp_path / "whole"
    assert "accuracy" not in set(call(broken, "--minutes", "0.25").metric)
    found = defaultdict(list)
    for rows in (call(broken), call(whole)):
        assert "hours/CPU" in set(rows.metric) and all(map(math.isfinite, rows.value))
        kept = rows[~rows.metric.str.contains("seconds|per_s|hours/|adapter_version")]
        found["rows"].append(kept.values.tolist())
        assert (kept.metric == "accuracy").sum() == 2
    assert found["rows"][0] == found["rows"][1]


def test_a_refusal_beside_a_progress_bar_is_the_reason(monkeypatch, capsys, tmp_path):
    bars = []

    def train():
        bars.extend([tqdm(total=2), tqdm(total=3)])  # the second below the first, which moves the cursor
        bars[1].update()
        raise ValueError("the learning rate is too high")

    monkeypatch.setattr(cli, "app", train)
    monkeypatch.setattr(cli, "prepare", lambda: None)
    with pytest.raises(SystemExit):
        cli.main()
    for bar in bars:
        bar.close()
    (tmp_path / "log.txt").write_text(f"$ qerl train\n{capsys.readouterr().err}")
    assert runner._reason(tmp_path / "log.txt") == "qerl: the learning rate is too high"
