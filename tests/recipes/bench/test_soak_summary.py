"""What a soak says in the end: whatever may be wrong is a failure of its own, and the figures are of what was."""

import contextlib
import os
from dataclasses import replace
from types import SimpleNamespace

import httpx
import psutil
import pytest

from qerl_recipes.bench import soak
from qerl_recipes.bench.soak_judge import Verdict
from qerl_recipes.bench.soak_load import Change, Found
from qerl_recipes.bench.soak_streams import Answer

SOUND = Verdict(one=30, several=5, left_out=2, worst=2e-5, controls=100, told_apart=99)
CHANGES = [Change(1, None, (0.0, 0, 0)), Change(2, 1, (0.0, 0, 0)), Change(2, 1, (0.05, 0, 1))]
MEMORY = {"engine 7": [100 << 20, 150 << 20, (150 << 20) + 270_000]}


def answer(reason="length"):
    return Answer([5, 6], [7], [-1.0], "1", reason, 1)


def found(**changed):
    seconds = {"swap, http, requests=keep": [0.3, 0.1], "swap, shared, requests=abort": [0.5], "noise": [9.0]}
    return Found(
        CHANGES, **{"answers": [answer(), answer("abort"), answer()], "cancelled": 3, "seconds": seconds} | changed
    )


def summary(verdict=SOUND, memory=MEMORY, **changed):
    return soak.summary(found(**changed), {"without swaps": 10.04, "with swaps": 8.0}, memory, verdict)


def test_a_soak_that_is_sound_has_no_failure_and_its_figures_are_those_of_its_parts():
    result = summary()
    assert result["failed"] == result["wrong"] == result["lost"] == []
    assert (result["answers"], result["aborted"], result["cancelled"], result["changes"]) == (3, 1, 3, 2)
    assert result["judged"] == {"one policy": 30, "several policies": 5, "left out": 2, "not yet": 0}
    assert (result["worst_difference"], result["tolerance"]) == (2e-5, 3e-4)
    assert result["controls"] == {"judged": 100, "told apart": 99}
    assert result["tokens_per_s"] == {"without swaps": 10.0, "with swaps": 8.0}
    assert result["resident_mib"] == {"engine 7": [100.0, 150.0, 150.3]}
    assert result["change_seconds"]["all"] == {"p50": 0.3, "p99": 0.496, "number": 3}, "of swaps, not of noise"
    assert result["change_seconds"]["noise"] == {"p50": 9.0, "p99": 9.0, "number": 1}
    said = "\n".join(soak.lines(result))
    assert "3 answers (1 aborted by a swap), 3 given up, 0 lost; 2 changes" in said
    assert "all: p50 300 ms, p99 496 ms (3)" in said and "FAILED" not in said
    assert "resident MiB of engine 7: 100 -> 150 -> 150" in said and "tokens/s: 10 without swaps, 8 with swaps" in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lost": ["APIError: gone", "other"]}, "2 requests lost, such as: APIError: gone"),
        ({"verdict": replace(SOUND, wrong={9: "later", 4: "0.7 off"})}, "2 wrong answers, such as: 0.7 off"),
        ({"verdict": replace(SOUND, waiting=4)}, "4 answers have not been judged"),
        ({"verdict": replace(SOUND, one=0)}, "no answer has one policy alone; none was judged sharply"),
        ({"verdict": replace(SOUND, told_apart=98)}, "only 98.0% of answers are told from those of another policy"),
        ({"verdict": replace(SOUND, controls=0, told_apart=0)}, "only 0.0% of answers are told from"),
        ({"memory": {**MEMORY, "server 8": [100 << 20, 100 << 20, 165 << 20]}}, "server 8 has grown by 65 MiB"),
        ({"memory": {"engine 7": [100 << 20, 165 << 20]}}, "engine 7 has grown by 65 MiB"),
    ],
)
def test_each_fault_is_a_failure_and_is_printed(changed, said):
    result = summary(**changed)
    assert len(result["failed"]) == 1 and result["failed"][0].startswith(said)
    assert any(line.startswith(f"FAILED: {said}") for line in soak.lines(result))


def test_memory_up_to_the_limit_is_no_growth():
    assert summary(memory={"engine 7": [1 << 20, 100 << 20, 164 << 20]})["failed"] == []


@pytest.fixture
def metrics(monkeypatch):
    """Pages of a server's /metrics, one a look; the last stays."""
    pages, clock = [], [0.0]
    monkeypatch.setattr(soak.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(soak.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))

    def get(url):
        assert url == "http://server/metrics"
        running, waiting = pages.pop(0) if len(pages) > 1 else pages[0]
        text = f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_running{{engine="1"}} 0.0\n'
        text += f'vllm:num_requests_waiting{{engine="0"}} {waiting}\nvllm:num_requests_running_other 9.0\n'
        return SimpleNamespace(text=text)

    monkeypatch.setattr(httpx, "get", get)
    return pages


def test_requests_that_end_a_moment_later_do_not_run_on_and_those_that_stay_do(metrics):
    metrics[:] = [(2.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    assert soak.running("http://server") == 0
    assert len(metrics) == 1
    metrics[:] = [(2.0, 1.0)]
    assert soak.running("http://server") == 3


@pytest.mark.parametrize("left", [0, 3])
def test_a_request_that_still_runs_is_lost_and_memory_is_that_of_every_process_of_the_server(left, monkeypatch):
    asked = {}

    def load(url, token, name, *, adapter, between, **options):
        asked.update(options, given=(url, token, name, adapter(4)))
        between()
        between()
        return Found(CHANGES[:1]), {"with swaps": 1.0}

    monkeypatch.setattr(soak, "load", load)
    monkeypatch.setattr(soak, "config_of", lambda folder: {"vocab_size": 64, "folder": folder})
    monkeypatch.setattr(soak, "make_adapter", lambda config, seed, number: (config["folder"], seed, number))
    monkeypatch.setattr(soak, "running", lambda url: left)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [psutil.Process(1)] if recursive else [])
    server = SimpleNamespace(url="http://server", process=SimpleNamespace(pid=os.getpid()))
    seen, speed, memory = soak.measure(server, "secret", "model", 16, 30.0, 5)
    assert asked.pop("given") == ("http://server", "secret", soak.NAME, ("model", 5, 4))
    assert asked == {"vocabulary": 64, "streams": 16, "seed": 5, "quiet": 6.0, "busy": 24.0}
    assert seen.lost == ([f"{left} requests still run though none waits for them"] if left else [])
    assert speed == {"with swaps": 1.0}
    assert [name.split()[-1] for name in memory] == [str(os.getpid()), "1"]
    assert all(len(values) == 2 for values in memory.values())


@pytest.fixture
def played(monkeypatch):
    """A soak whose server, load and reference are played: what each part was given, and what was written."""
    calls, written = {}, []

    @contextlib.contextmanager
    def serving(folder, streams, log, api_servers):
        calls["serving"] = (folder, streams, api_servers)
        yield "server", "token"

    def measure(*given):
        calls["measure"] = given
        return found(answers=[answer(), answer()]), {}, {}

    @contextlib.contextmanager
    def references(folder, seed):
        calls["references"] = (folder, seed)
        yield [lambda change, answers: [[-1.0 - change.version / 2 + 0.5] for _ in answers]]

    monkeypatch.setattr(soak, "serving", serving)
    monkeypatch.setattr(soak, "measure", measure)
    monkeypatch.setattr(soak, "references", references)
    monkeypatch.setattr(soak, "write_model", lambda shape, seed, folder: f"{shape} {seed}")
    monkeypatch.setattr(soak, "conditions", lambda: {"commit": "abc"})
    monkeypatch.setattr(soak, "save", lambda result, output: written.append((dict(result), output)))
    return calls, written


@pytest.mark.parametrize("model", [None, "a checkpoint"])
def test_a_soak_is_its_parts_in_turn_and_what_is_known_is_written_before_the_judging(model, played, tmp_path):
    calls, written = played
    result = soak.run(model=model, shape="tiny", streams=3, minutes=0.5, api_servers=2, seed=4, output=tmp_path / "x")
    folder = model or "tiny 4"
    assert calls["serving"] == (folder, 3, 2)
    assert calls["measure"] == ("server", "token", folder, 3, 30.0, 4)
    assert calls["references"] == (folder, 4)
    assert result["model"] == (model or "random weights, shape tiny")
    assert (result["streams"], result["api_servers"], result["seed"], result["commit"]) == (3, 2, 4, "abc")
    assert (result["rank"], result["dtype"], result["judged"]["one policy"]) == (8, "float32", 2)
    assert result["worst_difference"] == 0 and not result["wrong"]
    assert written[0][0]["judged"]["not yet"] == 2 and written[0][1] == tmp_path / "x"
    assert written[-1] == (result, tmp_path / "x")


@pytest.mark.parametrize("given", [{"streams": 0}, {"minutes": 0}, {"minutes": -1.0}, {"api_servers": 0}])
def test_a_soak_of_nothing_is_refused_before_a_server_starts(given, played):
    with pytest.raises(ValueError, match="all must be above 0"):
        soak.run(model=None, shape="tiny", **given)
    with pytest.raises(ValueError, match="unknown shape"):
        soak.run(model=None, shape="huge")
    assert played == ({}, [])
    soak.run(model="a checkpoint", shape="huge", streams=1, minutes=0.1, api_servers=1)
