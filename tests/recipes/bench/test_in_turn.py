"""Arms that take turns: made-up ones, which need no engine, and the plan of what engines beside each other hold."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner
from waiting import PATIENCE, runs, until

from qerl_recipes import cli
from qerl_recipes.bench import in_turn, rollout_memory
from qerl_recipes.bench import rollout as bench_rollout
from qerl_recipes.bench.in_turn import take_turns
from qerl_recipes.bench.rollout_arm import ARMS, prompts
from qerl_recipes.bench.rollout_cases import Case, Order
from qerl_recipes.machine.gpu import GB, Gpu

ARM = """
import json, os, subprocess, time
from pathlib import Path
from qerl_recipes.bench.process import obey
def log(*words):
    with Path(__file__).with_name("log").open("a") as stream:
        stream.write(json.dumps(words) + "\\n")
def begin(request):
    name = request["name"]
    if name == "slow":
        time.sleep(0.5)
    if name == "small":
        raise MemoryError("too little")
    if name == "starting":
        worker = subprocess.Popen(["sleep", "600"])
        log(name, os.getpid(), worker.pid)
        time.sleep(600)
    def work(order):
        log(name, *order.values())
        if order["number"] == 1 and order["repeat"] == 1:
            if name == "dies":
                os._exit(3)
            if name == "fails":
                raise ValueError("no more")
        return {"seconds": 1.0}
    print("a library's message")
    log(name, os.getpid())
    return {"weights_gib": 2.0}, work
obey(begin)
"""
CASES = [Case(2, 8, 40), Case(3, 8, 20)]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the made-up arms do, a line each: their name, and an order or, when they are there, process ids."""
    (tmp_path / "made_up_arm.py").write_text(ARM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path / "log"


def lines(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def turns(*names: str, repeats: int = 2) -> dict[str, list[dict[str, Any]]]:
    noted: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    requests = {name: {"name": name} for name in names}
    take_turns("made_up_arm", requests, CASES, repeats, lambda name, found: noted[name].append(found))
    return noted


def test_all_arms_are_there_before_the_first_works_and_repeat_each_case_in_turn(log: Path) -> None:
    noted = turns("a", "slow")
    written = lines(log)
    assert {line[0] for line in written[:2]} == {"a", "slow"} and all(len(line) == 2 for line in written[:2])
    warm, one, two = [0, 0, 2, 8, 1], [0, 1, 2, 8, 1], [0, 2, 2, 8, 1]
    of_first = [[name, *order] for order in (warm, one, two) for name in ("a", "slow")]
    assert written[2:8] == of_first
    orders = [line[1:] for line in written[2:]]
    assert orders[::2] == orders[1::2], "each arm the same, one after the other"
    assert [line[0] for line in written[2:]] == ["a", "slow"] * 15
    assert orders[6::2] == [
        *([0, 0, 2, 8, 16], [0, 1, 2, 8, 40], [0, 2, 2, 8, 40]),
        *([1, 0, 3, 8, 1], [1, 1, 3, 8, 1], [1, 2, 3, 8, 1]),
        *([1, 0, 3, 8, 16], [1, 1, 3, 8, 20], [1, 2, 3, 8, 20]),
        *([2, 0, 64, 47, 1], [2, 1, 64, 47, 1], [2, 2, 64, 47, 1]),
    ]
    found = [
        {"weights_gib": 2.0},
        *({"cases": [{**case._asdict(), "seconds": [1.0, 1.0], "prefill_seconds": [1.0, 1.0]}]} for case in CASES),
        {"prefill": {"tokens": 64 * 47, "seconds": [1.0, 1.0]}},
    ]
    assert noted == {"a": found, "slow": found}
    assert not any(runs(line[1]) for line in written[:2])


def test_an_arm_that_ends_says_why_keeps_what_it_had_and_the_others_go_on(log: Path) -> None:
    noted = turns("small", "dies", "fails", "a")
    assert noted["small"] == [{"failed": "MemoryError: too little"}]
    assert [list(found) for found in noted["dies"]] == [["weights_gib"], ["cases"], ["failed"]]
    assert noted["dies"][-1] == {"failed": "its process ended with code 3; its messages are above"}
    assert noted["dies"][1]["cases"][0]["batch"] == 2
    assert noted["fails"][-1] == {"failed": "ValueError: no more"}
    assert [list(found) for found in noted["a"]] == [["weights_gib"], ["cases"], ["cases"], ["prefill"]]
    assert len([line for line in lines(log) if line[0] == "a"]) == 1 + 15


PARENT = """
from qerl_recipes.machine import processes
processes.PATIENCE = 1  # seconds, for what does not end when it is asked to
from qerl_recipes.bench import in_turn
from qerl_recipes.bench.in_turn import take_turns
from qerl_recipes.bench.process import ended_cleanly
from qerl_recipes.bench.rollout_cases import Case
with ended_cleanly():
    take_turns("made_up_arm", {name: {"name": name} for name in ("a", "starting")}, [Case(1, 2, 3)], 1, print)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_arms_end_with_the_process_that_started_them(log: Path, number: signal.Signals) -> None:
    """One that waits for orders, without a processor, and one whose engine is starting; after SIGTERM, which leaves
    time for it, with what that one has started."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT])
    try:
        assert until(lambda: len(lines(log)) == 2)
        there = {line[0]: line[1:] for line in lines(log)}
        (waiting,), (starting, worker) = there["a"], there["starting"]
        before = psutil.Process(waiting).cpu_times().user
        time.sleep(0.3)
        assert psutil.Process(waiting).cpu_times().user - before < 0.1
        assert runs(waiting) and runs(starting) and runs(worker)
        parent.send_signal(number)
        parent.wait(PATIENCE)
        assert until(lambda: not runs(waiting) and not runs(starting))
        if number == signal.SIGTERM:
            assert parent.returncode == 128 + number and until(lambda: not runs(worker))
    finally:
        parent.kill()
        for line in lines(log):
            for process in line[1:]:
                if runs(process):
                    os.kill(process, signal.SIGKILL)


def test_before_each_turn_there_is_a_rest(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(in_turn.time, "sleep", slept.append)
    take_turns("made_up_arm", {"a": {"name": "a"}}, CASES, 1, lambda name, found: None, 0.0123)
    assert slept.count(0.0123) == len([line for line in lines(log) if len(line) > 2]) == 10


def test_prompts_follow_from_case_and_repeat_alone() -> None:
    first = Order(1, 2, 3, 8, 20)
    ids = prompts(first, 512)
    torch.manual_seed(7)
    assert prompts(first._replace(output=1), 512) == ids
    assert prompts(first._replace(repeat=1), 512) != ids and prompts(first._replace(number=0), 512) != ids
    assert len(ids) == 3 and {len(row) for row in ids} == {8} and {type(i) for row in ids for i in row} == {int}


def test_turns_rest_where_workers_that_still_spin_would_take_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert in_turn.pause(3, 2) > in_turn.BUSY, "9 processes on 8 processors"
    assert in_turn.pause(2, 2) == 0 and in_turn.pause(1, 8) == 0, "a processor for each; nobody before"
    assert in_turn.pause(20, 1) == 0, "arms without workers sleep at once"


H200 = Gpu(143771 * 2**20, True, "NVIDIA H200")
WORK = [Case(8, 256, 512), Case(64, 256, 1024), Case(256, 256, 512)]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_memory, "installed_gpu", lambda: H200)
    monkeypatch.setattr(rollout_memory, "used_bytes", lambda: GB)


def plan(shape: str, arms: Any, cases: list[Case], cache: str = "auto", parallel: int = 1) -> dict[str, int]:
    request = {"shape": shape, "rank": 32, "tensor_parallel": parallel, "kv_cache_dtype": cache, "engine": {}}
    requests = {arm: {**request, "arm": arm} for arm in arms}
    return {name: given["kv_cache_memory_bytes"] for name, given in rollout_memory.plan(shape, requests, cases).items()}


def test_a_cache_holds_the_largest_case_and_the_prefill(h200: None) -> None:
    token = 2 * 28 * 4 * 128 * 2
    assert plan("7B", ["bf16"], WORK) == {"bf16": int(1.1 * 256 * (768 + 16) * token)}
    assert plan("7B", ["bf16"], WORK, "fp8") == {"bf16": int(1.1 * 256 * (768 + 16) * token / 2)}
    assert plan("7B", ["bf16"], WORK[:1]) == {"bf16": int(1.1 * 64 * (768 + 16) * token)}, "64 prompts, not 8"
    assert plan("7B", ["bf16"], WORK, parallel=2) == {"bf16": int(1.1 * 256 * (768 + 16) * token / 2)}


def test_engines_that_do_not_fit_together_are_refused_with_their_bytes(h200: None) -> None:
    assert len(plan("7B", ["bf16_merged", "bf16", "qerl_nvfp4", "qerl_nvfp4_float16"], WORK)) == 4
    assert len(plan("32B", ["bf16_merged", "bf16", "qerl_nvfp4"], [Case(256, 128, 128)], parallel=2)) == 3
    with pytest.raises(ValueError, match="--interleave has 3 engines at once, which take") as error:
        plan("32B", ["bf16_merged", "bf16", "qerl_nvfp4"], [Case(256, 128, 128)])
    said = str(error.value)
    assert "149.8 GB of its 150.8 GB are free" in said and "or leave --interleave out" in said
    # 65.5 GB of weights, 32B's by hand, and 1.1 x 256 x (256 + 16) tokens of 256 KiB
    assert "bf16_merged" in said and "(cache 20.1 GB, weights 65.5 GB, at work" in said
    with pytest.raises(ValueError, match="9 engines at once"):
        plan("7B", ARMS, WORK)


def test_on_a_cpu_nothing_is_planned() -> None:
    request = {"shape": "tiny", "arm": "bf16", "rank": 4, "tensor_parallel": 1, "kv_cache_dtype": "auto", "engine": {}}
    assert rollout_memory.plan("tiny", {"bf16": request}, CASES) == {"bf16": {}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--interleave", "--rounds", "2"], "rounds is 2, and with --interleave every repeat is a round"),
        (["--interleave", "--profile"], "--interleave has several engines at once, and --profile looks at one"),
        (
            ["--interleave", "--engine", '{"kv_cache_memory_bytes": 1}'],
            "engine names 'kv_cache_memory_bytes', which",
        ),
        (["--interleave", "--variant", 'a={"gpu_memory_utilization": 1}'], "variant a names 'gpu_memory_utilization'"),
        (["--variant", 'a={"dtype": "half"}'], "variant a names 'dtype', which this benchmark sets itself"),
        (["--variant", "sync"], "it is NAME=JSON, such as 'sync={"),
        (["--variant", "a=0"], "--variant a is '0'; it is a JSON object"),
        (["--variant", "a={}", "--variant", "a={}"], "--variant a is given twice"),
        (["--variant", "a b={}"], "variant 'a b': a name is of letters"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(options: list[str], message: str) -> None:
    done = CliRunner().invoke(cli.app, ["bench", "rollout", "--shape", "tiny", *options])
    assert done.exit_code != 0
    assert message in " ".join((done.output + str(done.exception)).replace("│", " ").split())


def asked(
    monkeypatch: pytest.MonkeyPatch, rests: float | None = 0.0, **options: Any
) -> list[dict[str, dict[str, Any]]]:
    """The requests of each group of arms that are there at the same time, which have to rest so long."""
    groups: list[dict[str, dict[str, Any]]] = []

    def take(module: str, requests: Any, cases: Any, repeats: int, note: Any, rest: float) -> None:
        groups.append(requests)
        assert rest == rests

    monkeypatch.setattr(bench_rollout, "take_turns", take)
    monkeypatch.setattr(bench_rollout, "pause", lambda arms, parallel: 4.5 if (arms, parallel) == (2, 1) else None)
    bench_rollout.run("tiny", [Case(1, 2, 3)], arms=["bf16", "qerl_nvfp4"], **options)
    return groups


def test_arms_are_there_one_by_one_or_at_once(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = asked(monkeypatch, rounds=2)
    assert [list(group) for group in one_by_one] == [["bf16"], ["qerl_nvfp4"]] * 2
    assert one_by_one[0]["bf16"]["memory"] == {}, "vLLM measures"
    (at_once,) = asked(monkeypatch, 4.5, interleave=True)
    assert list(at_once) == ["bf16", "qerl_nvfp4"]
    assert all(request["memory"]["kv_cache_memory_bytes"] > 0 for request in at_once.values())


def test_a_variant_stands_beside_each_arm_and_above_what_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"seed": 1, "compilation_config": {"mode": 0, "inductor_compile_config": {"combo_kernels": True}}}
    variants = {
        "pdl": {"compilation_config": {"inductor_compile_config": {"triton.enable_pdl": True}}},
        "s": {"seed": 2},
    }
    (group,) = asked(
        monkeypatch, None, interleave=True, engine=engine, variants=variants, kv_cache_dtype=["auto", "fp8"]
    )
    names = ["bf16", "bf16, fp8 cache", "bf16, pdl", "bf16, pdl, fp8 cache", "bf16, s", "bf16, s, fp8 cache"]
    assert list(group)[:6] == names and len(group) == 12
    assert group["bf16"]["engine"] == engine
    assert group["bf16, s"]["engine"] == {**engine, "seed": 2}
    joined = {"mode": 0, "inductor_compile_config": {"combo_kernels": True, "triton.enable_pdl": True}}
    assert group["qerl_nvfp4, pdl, fp8 cache"]["engine"] == {"seed": 1, "compilation_config": joined}
    assert group["qerl_nvfp4, pdl, fp8 cache"]["kv_cache_dtype"] == "fp8"
