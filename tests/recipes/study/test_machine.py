"""What one process of a study gets, and what of it is written down."""

import json
import os
import signal
import threading

import pytest
from rich.console import Console
from waiting import PATIENCE, until

from qerl_recipes.study import processes

SHOWS = """
import os, sys
print("it sees", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
print("it fails", file=sys.stderr)
raise SystemExit(3)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose commands say which GPU they see, complain, and end with 3."""
    (tmp_path / "shows.py").write_text(SHOWS)
    monkeypatch.setattr(processes, "CLI", "shows")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1,2"}
    return processes.Machine(None, Console(), "H200", environment)


def test_a_log_has_every_command_of_a_run_with_what_it_said_and_no_login(machine, tmp_path):
    log = tmp_path / "log.txt"
    assert machine.call(["train", "--vllm_server_base_url", "http://me:secret@host"], log, "5") == 3
    assert machine.call(["evaluate-each"], log, None) == 3
    first = ["$ qerl train --vllm_server_base_url http://***@host", "it sees 5", "it fails"]
    assert log.read_text().splitlines() == [*first, "$ qerl evaluate-each", "it sees 0,1,2", "it fails"]
    records = [json.loads(line) for line in (tmp_path / processes.HOURS).read_text().splitlines()]
    assert [(one["command"], one["device"]) for one in records] == [("train", "H200"), ("evaluate-each", "H200")]
    seconds = [one["seconds"] for one in records]
    assert min(seconds) > 0 and processes.seconds_of(tmp_path) == {"H200": sum(seconds)}
    assert not machine.processes and not any(machine.shares.used.values()), "what has ended is asked for nothing more"


def test_nothing_is_started_after_a_stop_and_what_runs_may_save_its_state(machine, tmp_path):
    told = []

    class Process:
        send_signal = told.append

    machine.processes.add(Process())
    machine.stop()
    assert told == [signal.SIGTERM]
    assert machine.call(["train"], tmp_path / "log.txt", None) is None
    assert not (tmp_path / "log.txt").exists() and processes.seconds_of(tmp_path) == {}


def test_a_stop_reaches_a_process_that_runs(machine, tmp_path):
    (tmp_path / "shows.py").write_text("import time; time.sleep(60)")
    ended = []
    running = threading.Thread(target=lambda: ended.append(machine.call(["train"], tmp_path / "log.txt", None)))
    running.start()
    until(lambda: machine.shares.used)
    machine.stop()
    running.join(PATIENCE)
    assert ended == [-signal.SIGTERM]


def test_what_a_process_takes_for_several_runs_is_divided_among_them_and_each_log_says_where_it_is(machine, tmp_path):
    logs = [tmp_path / name / "log.txt" for name in ("one", "two", "three")]
    for log in logs:
        log.parent.mkdir()
    machine.shares.end = lambda *_: 9.0
    assert machine.call(["evaluate-each", "[]"], logs[0], None, beside=logs[1:]) == 3
    assert logs[0].read_text().splitlines()[0] == "$ qerl evaluate-each '[]'"
    line = f"$ qerl evaluate-each for this run and others: see {logs[0]}\n"
    assert [log.read_text() for log in logs[1:]] == [line] * 2
    assert [processes.seconds_of(log.parent) for log in logs] == [{"H200": 3.0}] * 3
