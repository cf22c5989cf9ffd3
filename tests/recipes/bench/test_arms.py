"""Test arms with stand-in work, which need no engine: they answer in turn, report failures, and end with their
caller.
"""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import PATIENCE, runs, until

from qerl_recipes.bench.arms import ArmFailedError, ask_once, ended_cleanly
from qerl_recipes.bench.rollout import take_turns
from qerl_recipes.bench.rollout_arm import Case
from qerl_recipes.machine import processes

CASE = ("batch", "input", "output")
ARM = """
import json, os, subprocess, time
from pathlib import Path
from qerl_recipes.bench.arms import answer
def log(*words):
    with Path(__file__).with_name("log").open("a") as stream:
        stream.write(json.dumps(words) + "\\n")
def begin(request, figures):
    name = request["name"]
    figures["weights_gib"] = 2.0
    if name == "slow":
        time.sleep(0.5)
    if name == "small":
        raise MemoryError("too little")
    if name == "starting":
        worker = subprocess.Popen(["sleep", "600"])
        log(name, os.getpid(), worker.pid)
        time.sleep(600)
    def carry_out(order, figures):
        log(name, *order.values())
        if order["number"] == 1 and order["repeat"] == 1:
            if name == "dies":
                os._exit(3)
            if name == "fails":
                raise ValueError("no more")
        figures["seconds"] = 1.0
    print("a library's message")
    log(name, os.getpid())
    return None if name == "once" else carry_out
answer(begin)
"""
CASES = [Case(2, 8, 40), Case(3, 8, 20)]
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with a line for each step of an arm: its name, and an order or, at first, process ids."""
    (tmp_path / "made_up_arm.py").write_text(ARM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path / "log"


def lines(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def turns(*names: str, repeats: int = 2) -> dict[str, list[dict[str, Any]]]:
    noted: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    requests = {name: {"name": name} for name in names}

    def note(name: str, figures: dict[str, Any]) -> None:
        noted[name].append(figures)

    take_turns("made_up_arm", requests, CASES, repeats, note)
    return noted


def test_arms_repeat_each_case_in_turn_once_all_are_ready(log: Path) -> None:
    noted = turns("a", "slow")
    written = lines(log)
    assert {line[0] for line in written[:2]} == {"a", "slow"} and all(len(line) == 2 for line in written[:2])
    orders = [line[1:] for line in written[2:]]
    assert orders[::2] == orders[1::2], "each arm the same, one after the other"
    assert [line[0] for line in written[2:]] == ["a", "slow"] * 15
    assert [[number, repeat, *case[:3]] for number, repeat, case in orders[::2]] == [
        *([0, 0, 2, 8, 1], [0, 1, 2, 8, 1], [0, 2, 2, 8, 1]),
        *([0, 0, 2, 8, 16], [0, 1, 2, 8, 40], [0, 2, 2, 8, 40]),
        *([1, 0, 3, 8, 1], [1, 1, 3, 8, 1], [1, 2, 3, 8, 1]),
        *([1, 0, 3, 8, 16], [1, 1, 3, 8, 20], [1, 2, 3, 8, 20]),
        *([2, 0, 64, 47, 1], [2, 1, 64, 47, 1], [2, 2, 64, 47, 1]),
    ]
    pieces = [
        {"weights_gib": 2.0},
        *(
            {"case": dict(zip(CASE, case, strict=False), seconds=[1.0, 1.0], prefill_seconds=[1.0, 1.0])}
            for case in CASES
        ),
        {"prefill": {"tokens": 64 * 47, "seconds": [1.0, 1.0]}},
    ]
    assert noted == {"a": pieces, "slow": pieces}
    assert not any(runs(line[1]) for line in written[:2])


def test_an_arm_that_ends_says_why_and_the_others_go_on(log: Path) -> None:
    noted = turns("small", "dies", "fails", "a")
    assert noted["small"] == [{"weights_gib": 2.0, "failed": "MemoryError: too little"}], "with what it had measured"
    assert [list(piece) for piece in noted["dies"]] == [["weights_gib"], ["case"], ["failed"]]
    assert noted["dies"][-1] == {"failed": "its process ended with code 3; its messages are above"}
    assert noted["dies"][1]["case"]["batch"] == 2
    assert noted["fails"][-1] == {"failed": "ValueError: no more"}
    assert [list(piece) for piece in noted["a"]] == [["weights_gib"], ["case"], ["case"], ["prefill"]]
    assert len([line for line in lines(log) if line[0] == "a"]) == 1 + 15


def test_an_arm_that_is_asked_once_answers_or_says_what_it_had(log: Path) -> None:
    assert ask_once("made_up_arm", {"name": "once"}) == {"weights_gib": 2.0}
    with pytest.raises(ArmFailedError, match="MemoryError: too little") as error:
        ask_once("made_up_arm", {"name": "small"})
    assert error.value.figures == {"weights_gib": 2.0}


def waits(process: psutil.Process) -> bool:
    """Return whether the process sleeps for 0.1 s on end. One that takes turns in sleeping and looking does not."""
    before = process.num_ctx_switches(), process.cpu_times()[:2]
    time.sleep(0.1)
    return process.status() == psutil.STATUS_SLEEPING and before == (
        process.num_ctx_switches(),
        process.cpu_times()[:2],
    )


def start_two_arms() -> None:
    """Run one arm that waits for orders and one that is starting, and end both on SIGTERM, as a benchmark does."""
    processes.PATIENCE = 1  # seconds to wait for a process that ignores the request to end
    with ended_cleanly():
        turns("a", "starting", repeats=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_arms_end_with_the_process_that_started_them(log: Path, number: signal.Signals) -> None:
    """Kill the parent of an arm that waits, without using the CPU, and of one whose engine is starting.

    SIGTERM also leaves time to end the engine's worker.
    """
    parent = FORK.Process(target=start_two_arms)  # a new process would first import trl and peft
    parent.start()
    try:
        assert until(lambda: len(lines(log)) == 2)
        started = {line[0]: line[1:] for line in lines(log)}
        (waiting,), (starting, worker) = started["a"], started["starting"]
        assert until(lambda: waits(psutil.Process(waiting)))
        assert runs(waiting) and runs(starting) and runs(worker)
        assert parent.pid is not None
        os.kill(parent.pid, number)
        parent.join(PATIENCE)
        assert until(lambda: not runs(waiting) and not runs(starting))
        if number == signal.SIGTERM:
            assert parent.exitcode == 128 + number and until(lambda: not runs(worker))
    finally:
        parent.kill()
        for line in lines(log):
            for process in line[1:]:
                if runs(process):
                    os.kill(process, signal.SIGKILL)
