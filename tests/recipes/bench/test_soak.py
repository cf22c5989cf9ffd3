"""Test the soak: its judge and its load on answers made up here, and all of it on a sound and on a broken real
server.
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest
import torch
from waiting import PATIENCE

from qerl_recipes.bench import soak, soak_load, soak_replay
from qerl_recipes.bench.arms import serving
from qerl_recipes.bench.soak_load import SILENT, Answer, Change, Observed, Received, Streams, ask, shares, speed
from qerl_recipes.bench.soak_replay import Verdict, difference, judge, named, portions
from qerl_recipes.machine.serve import command
from qerl_recipes.recipe.shapes import config_json
from qerl_vllm_plugin.wire import shared_file

STILL = (0.0, 0, 0)  # no noise
CHANGES = [Change(1, None, STILL), Change(2, 1, STILL), Change(2, 1, (0.1, 0, 1)), Change(3, 2, (0.1, 0, 1))]


def value(change, token):
    """Return the log-probability that the policy of a change gives to a token, in this file."""
    return -(token + CHANGES.index(change) * 10.0)


def replay(change, answers):
    return [[value(change, token) for token in answer.tokens] for answer in answers]


def answer(policy, *places):
    """Return an answer whose tokens were computed under the changes at ``places``."""
    tokens = list(range(1, len(places) + 1))
    logprobs = [value(CHANGES[place], token) for place, token in zip(places, tokens, strict=True)]
    return Answer([5, 6], tokens, logprobs, policy, "length", len(tokens))


@pytest.mark.parametrize(
    ("policy", "places", "is_right"),
    [
        ("1", (0, 0, 0), True),
        ("1", (0, 1, 0), False),
        ("2", (1, 1, 1), True),
        ("2", (2, 2), True),
        ("2", (1, 2), False),  # the noise changed but the answer names one version
        ("2-2", (1, 2), True),
        ("2-2", (2, 1), False),
        ("1-3", (0, 0, 1, 2, 3), True),
        ("1-3", (0, 3), True),
        ("1-3", (0, 1, 0, 3), False),  # earlier keys and values were read again
        ("1-2", (0, 3), False),
        ("4", (3,), False),
        ("1-4", (0, 3), False),
    ],
)
def test_an_answer_is_right_under_the_policies_that_it_names(policy, places, is_right):
    verdict = judge([answer(policy, *places)], CHANGES, [replay], 1e-3)
    assert (not verdict.wrong) == is_right and verdict.left_out == 0


def test_a_logprob_that_is_no_number_is_wrong():
    broken = answer("1", 0, 0)
    broken.logprobs[1] = math.nan
    assert judge([broken], CHANGES, [replay], 1e-3).wrong
    assert difference(answer("1", 0), [[math.nan]], 1e-3) != 0


def test_the_worst_difference_is_of_right_answers_of_one_policy():
    def off(by, policy="1", place=0):
        moved = answer(policy, place, place, place)
        moved.logprobs[:2] = [moved.logprobs[0] + by, moved.logprobs[1] - by / 2]
        return moved

    answers = [off(0.25), off(-0.5), off(0.125), off(3.0), off(0.75, "1-2", 1)]
    verdict = judge(answers, CHANGES, [replay], 1.0)
    assert (verdict.worst, verdict.one, verdict.several) == (0.5, 4, 1)
    assert list(verdict.wrong) == [3] and verdict.wrong[3].endswith("a log-probability is 3 off")


def test_a_reference_that_leaves_an_answer_out_is_no_judge():
    with pytest.raises(ValueError, match="shorter"):
        judge([answer("1", 0), answer("1", 0)], CHANGES, [lambda *asked: replay(*asked)[:1]], 1e-3)


def test_answers_of_many_policies_are_left_out_and_controls_told_apart():
    many = [Change(i, i, STILL) for i in range(9)]
    assert named("2-7", many) == [2, 3, 4, 5, 6, 7]
    verdict = judge([answer("1-6", 0), answer("2", 1, 1)], many, [lambda change, answers: [[0.0] * 2]], 1e-3)
    assert (verdict.left_out, verdict.one, verdict.several) == (1, 1, 0)
    verdict = judge([answer("2", 1, 1)] * 20, CHANGES, [replay], 1e-3)
    assert (verdict.controls, verdict.told_apart, verdict.one) == (2, 2, 20)
    # A replay that ignores the policy cannot tell policies apart.
    verdict = judge([answer("2", 0, 0)], CHANGES, [lambda change, answers: replay(CHANGES[0], answers)], 1e-3)
    assert (verdict.controls, verdict.told_apart) == (1, 0)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_engines_share_the_policies_in_order(count):
    parts = portions({3: 10, 1: 10, 2: 10, 8: 30}, count)
    assert [place for part in parts for place in part] == [1, 2, 3, 8] and len(parts) == count
    assert [portions({1: 10, 2: 10, 3: 10, 8: 30}, 2), portions({}, 2)] == [[[1, 2, 3], [8]], [[], []]]
    answers = [answer("1-3", 0, 1, 3), answer("2", 2, 2), answer("2", 1, 2), answer("3", 3)] * 6
    verdict = judge(answers, CHANGES, [replay] * count, 1e-3)
    assert verdict == judge(answers, CHANGES, [replay], 1e-3) and len(verdict.wrong) == 6


def test_an_answer_is_judged_as_soon_as_all_its_policies_are_replayed():
    answers = [answer("1", 0), answer("1-2", 0, 1), answer("3", 3, 3), answer("1", 0, 3)]
    reported = []
    verdict = judge(answers, CHANGES, [replay], 1e-3, lambda so_far: reported.append((so_far.one, so_far.waiting)))
    assert reported == [(2, 2), (2, 2), (2, 1), (3, 0)], "after policy 1, 2 without noise, 2 with it, and 3"
    assert list(verdict.wrong) == [3] and (verdict.several, verdict.waiting) == (1, 0)


def test_an_engine_that_dies_ends_the_judging_of_the_others(monkeypatch):
    many, judged = [Change(i, i, STILL) for i in range(80)], []
    has_begun, has_ended = Event(), Event()
    monkeypatch.setattr(soak_replay, "Event", lambda: has_ended)

    def dies(change, answers):
        assert has_begun.wait(PATIENCE)
        raise RuntimeError("a reference engine has died")

    def works(change, answers):
        judged.append(change)
        has_begun.set()
        assert has_ended.wait(PATIENCE)
        return [[0.0] for _ in answers]

    with pytest.raises(RuntimeError, match="has died"):
        judge([Answer([5], [1], [0.0], str(i), "length", 1) for i in range(80)], many, [works, dies], 1e-3)
    assert len(judged) == 1, "the engine that works has half of the policies"


def test_an_adapter_is_drawn_again_by_its_number():
    config, drawn = config_json("tiny"), ((0, 1), (0, 1), (0, 2), (1, 1))
    first, again, *others = (soak_replay.make_adapter(config, seed, number)[0] for seed, number in drawn)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]) and not any(torch.equal(tensor, other[name]) for other in others)


@pytest.mark.parametrize(("free", "count"), [(139, 4), (59.9, 3), (29.9, 1), (8, 1)])
def test_as_many_reference_engines_run_as_fit(free, count, monkeypatch, tmp_path):
    """Count the engines for a model of 5 GiB, when each has a cache of 4 GiB and needs 6 GiB at work."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(5 << 30)  # a sparse file takes no disk space
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * 2**30), 140 << 30))
    for gpu, expected, dtype in ((None, 1, "float32"), ("a GPU", count, "bfloat16")):
        monkeypatch.setattr(soak_replay, "installed_gpu", lambda gpu=gpu: gpu)
        assert (soak_replay.engines(str(tmp_path)), soak_replay.dtype()) == (expected, dtype)


@pytest.mark.parametrize("cached", [0, 2, 3])
def test_log_probabilities_are_counted_from_the_end(cached):
    prompt, tokens = [5, 6, 7], [8, 9]
    known = [{token: SimpleNamespace(logprob=-float(token))} for token in (*prompt, *tokens)]
    assert soak_replay.of_tokens(tokens, [None, *known[1:]][cached:]) == [-8.0, -9.0]
    with pytest.raises(KeyError):  # the answer's own token is missing, and another token's figure must not be taken
        soak_replay.of_tokens(tokens, known[4:])


def test_a_cached_beginning_is_replayed_afresh_under_each_policy(light_engines, tmp_path):
    block = 128  # vLLM's block size on a CPU
    # the second prompt shares a block with its own answers
    prompt, other = list(range(1, block + 1)), list(range(2, block))
    same = [7] * (block - len(other) + 3)
    pairs = [(prompt, [5, 6, 7]), (prompt, [9, 9]), (other, [*same, 1]), (other, [*same, 2])]
    answers = [Answer(ids, tokens, [0.0] * len(tokens), "1", "length", len(tokens)) for ids, tokens in pairs]
    replay = soak_replay.reference(soak.write_model("tiny", 0, tmp_path / "model"), 0)
    together = replay(CHANGES[0], answers)
    alone = [replay(CHANGES[0], [one])[0] for one in answers]  # the cache is empty each time
    assert [len(values) for values in together] == [len(one.tokens) for one in answers]
    for found, expected in zip(together, alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    # The adapter, its noise, the next adapter with the same noise, and the base are four different policies.
    under = [torch.tensor(replay(change, answers[:1])[0]) for change in (*CHANGES[1:], CHANGES[0])]
    apart = [float((one - other).abs().max()) for one, other in itertools.combinations(under, 2)]
    assert min(apart) > soak.TOLERANCE["float32"]
    assert under[-1].tolist() == pytest.approx(alone[0], abs=1e-5)


def heard(tokens, length, reason="length", *, logprobs=None, asked=0.0, ended=1.0):
    scores = [0.0] * (tokens if logprobs is None else logprobs)
    return Answer([5], [7] * tokens, scores, "1", reason, length, asked, ended)


@pytest.mark.parametrize(
    ("one", "is_lost"),
    [
        (heard(3, 3), False),
        (heard(2, 3), True),
        (heard(3, 3, "stop"), True),
        (heard(3, 3, logprobs=2), True),
        (heard(1, 3, "abort"), False),
        (heard(0, 3, SILENT, asked=3, ended=4), False),  # requests were aborted meanwhile
        (heard(0, 3, SILENT, asked=9, ended=11), False),
        (heard(0, 3, SILENT, asked=1, ended=2), True),
        (heard(0, 3, SILENT, asked=6, ended=7), True),
        (heard(0, 3, SILENT, asked=5, ended=8), True),
    ],
)
def test_an_answer_that_is_not_whole_is_lost_unless_aborted(one, is_lost):
    observed = Observed(changes=CHANGES[:1], aborts=[(3.5, 5.0), (10.0, 12.0)])
    observed.add(Received([one], ["no route"], 2))
    assert len(observed.lost) - 1 == is_lost and observed.cancelled == 2
    assert observed.answers[0].reason == ("abort" if one.reason == SILENT and not is_lost else one.reason)


def test_tokens_count_where_their_answer_ended():
    answers = [heard(9, 9, ended=0.9), heard(4, 4, ended=1.0), heard(8, 8, ended=2.0), heard(16, 16, ended=3.0)]
    assert speed(answers, 1.0, 3.0) == 6.0


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (64, [64]), (65, [64, 1]), (256, [64] * 4)])
def test_every_stream_is_of_one_process(count, sizes):
    assert [len(numbers) for numbers in shares(count)] == sizes
    assert [number for numbers in shares(count) for number in numbers] == list(range(count))


def test_a_process_of_streams_that_dies_is_not_waited_for():
    with Streams("http://127.0.0.1:1", "policy", [[1]], 1, 0) as asking:
        process, _ = asking._children[0]
        process.kill()
        process.join()
        with pytest.raises(RuntimeError, match="has died"):
            asking.end()


NAMED = "X-QeRL-Policy-Version"


def choice(index, tokens, reason=None):
    logprobs = {"token_logprobs": [-float(token) for token in tokens]}
    return {"index": index, "text": "", "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}


def stream(*pieces, end=f"data: [DONE]\n\n: {NAMED}: 4-5\n\n"):
    lines = [f"data: {json.dumps({'choices': [piece]})}\n\n" for piece in pieces]
    return ("".join(lines) + end).encode()


def asked(content, n, headers=None, stop_after=None):
    """Return what ``ask`` makes of a server's response."""
    is_stream = content.startswith(b"data")

    def respond(request):
        body = json.loads(request.content)
        assert (body["n"], body["max_tokens"], body["prompt"], body["model"]) == (n, 3, [5, 6], "policy")
        assert body.get("stream", False) == is_stream
        assert body["ignore_eos"] and body["return_token_ids"] and body["logprobs"] is not None
        return httpx.Response(200, content=content, headers=headers or {"content-type": "text/event-stream"})

    async def run():
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as http:
            client = openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", max_retries=0, http_client=http)
            return await ask(client, "policy", [5, 6], 3, n, stream=is_stream, stop_after=stop_after)

    return asyncio.run(run())


PIECES = (choice(1, [7]), choice(0, [8]), choice(1, [9], "length"), choice(0, [3, 2], "length"))


def test_tokens_of_a_stream_go_to_their_sequences():
    first, second, third = asked(stream(*PIECES), 3)
    assert (first.tokens, first.logprobs) == ([8, 3, 2], [-8.0, -3.0, -2.0])
    assert (second.tokens, second.reason, second.policy) == ([7, 9], "length", "4-5")
    assert (third.tokens, third.reason) == ([], SILENT)


@pytest.mark.parametrize(
    "content",
    [
        stream(*PIECES[:3]),
        stream(*PIECES, end="data: [DONE]\n\n"),
        stream(*PIECES, end=""),
        stream(choice(0, [], "abort"), choice(1, [], "abort"), end="data: [DONE]\n\n"),
    ],
)
def test_a_sequence_without_its_end_or_a_policy_is_lost(content):
    with pytest.raises(RuntimeError, match="without its end"):
        asked(content, 2)


@pytest.mark.parametrize(("stop_after", "is_given_up"), [(1, True), (4, True), (5, False), (None, False)])
def test_a_stream_is_given_up_after_so_many_pieces(stop_after, is_given_up):
    assert (asked(stream(*PIECES), 2, None, stop_after) is None) == is_given_up


def test_an_answer_without_a_stream_has_all_sequences_or_is_lost():
    content = json.dumps({"choices": [choice(0, [8], "length"), choice(1, [9], "length")]}).encode()
    headers = {"content-type": "application/json", NAMED: "4-5"}
    assert [(one.tokens, one.policy) for one in asked(content, 2, headers)] == [([8], "4-5"), ([9], "4-5")]
    with pytest.raises(RuntimeError, match="2 of 3 sequences were answered"):
        asked(content, 3, headers)


def test_a_question_is_answered_or_lost_or_given_up(monkeypatch):
    questions, ends = [], [ConnectionError("gone"), None, ["one", "other"], RuntimeError("not whole"), ["third"]]
    received, pool = Received(), soak_load.prompts(64, 0)

    async def ask(client, model, prompt, length, n, *, stream, stop_after):
        end = ends[len(questions) % len(ends)]
        questions.append((length, n, stream, stop_after))
        assert prompt in pool and 8 <= length <= soak_load.LONGEST_ANSWER
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(soak_load, "ask", ask)
    asyncio.run(soak_load.run_stream(3, None, "policy", pool, 0, lambda: len(questions) == 500, received))
    assert received.answers == ["one", "other", "third"] * 100 and received.cancelled == 100
    assert received.lost == ["ConnectionError: gone", "RuntimeError: not whole"] * 100
    assert {n for _, n, *_ in questions} == {1, 5} and {stream for *_, stream, _ in questions} == {True, False}
    stopped = [(length, stream, after) for length, _, stream, after in questions if after is not None]
    assert 10 < len(stopped) < 50 and all(stream and 1 <= after <= length // 2 for length, stream, after in stopped)
    assert sum(length > 48 for length, *_ in questions) == pytest.approx(500 / 8, rel=0.3)


def test_prompts_reach_over_a_block_of_any_cache_and_fill_none():
    drawn = soak_load.prompts(64, 0)
    assert drawn == soak_load.prompts(64, 0) != soak_load.prompts(64, 1)
    assert len(drawn) == 24 and len({tuple(prompt) for prompt in drawn}) == 24
    assert all(128 < len(prompt) < 262 and len(prompt) % 16 for prompt in drawn)
    assert {min(map(min, drawn)), max(map(max, drawn))} == {2, 63}


@pytest.fixture
def clock(monkeypatch):
    """Return the current time in a list; only sleeping advances it."""
    now = [100.0]
    sleep = lambda seconds: now.append(now.pop() + seconds)  # noqa: E731
    monkeypatch.setattr(soak_load, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


@pytest.fixture
def clients(clock):
    """Return clients of a server whose swaps take 0.25 s and noise 0.5 s, and the calls that it received."""
    calls = []

    class Client:
        def __init__(self, transport):
            self.transport = transport

        def swap(self, tensors, config, *, version, requests):
            calls.append(("swap", self.transport, requests, tensors, config, version, clock[0]))
            clock[0] += 0.25
            return version

        def set_noise(self, sigma, *, seed, rollout):
            calls.append(("noise", self.transport, (sigma, seed, rollout)))
            clock[0] += 0.5

    return {transport: Client(transport) for transport in soak_load.TRANSPORTS}, calls


def test_changes_are_recorded_as_the_server_was_told(clients):
    observed, (policies, calls) = Observed(changes=[Change(7, None, STILL)]), clients
    soak_load.push(policies, lambda number: (f"tensors {number}", f"config {number}"), 3, 11.5, observed, lambda: None)
    swaps = [call for call in calls if call[0] == "swap"]
    assert [call[3:] for call in swaps] == [
        (f"tensors {number}", f"config {number}", 7 + number, 99.0 + number) for number in range(1, 13)
    ], "one a second, each of the next version"
    assert [call[1] for call in swaps] == ["shared", "http", "shared"] * 4
    modes = ["keep", "wait", "keep", "keep", "wait", "keep", "keep", "wait", "keep", "abort", "keep", "wait"]
    assert [call[2] for call in swaps] == modes
    noises = [(index, call[2]) for index, call in enumerate(calls) if call[0] == "noise"]
    assert noises == [(5, (0.05, 3, 5)), (11, (0.0, 0, 0))], "after every fifth swap, on and off in turn"
    noise = (0.05, 3, 5)
    expected = [Change(7, None, STILL), *(Change(7 + number, number, STILL) for number in range(1, 6))]
    expected += [Change(12, 5, noise), *(Change(7 + number, number, noise) for number in range(6, 11))]
    expected += [Change(17, 10, STILL), Change(18, 11, STILL), Change(19, 12, STILL)]
    assert observed.changes == expected and observed.aborts == [(109.0, 109.25)]
    assert observed.seconds["noise"] == [0.5, 0.5] and sum(map(len, observed.seconds.values())) == 14
    assert observed.seconds["swap, http, requests=wait"] == [0.25, 0.25, 0.25]
    assert observed.seconds["swap, shared, requests=abort"] == [0.25]


def test_an_adapter_that_goes_from_gpu_to_gpu_lies_on_one_before_the_clock_starts(clients, monkeypatch):
    observed, (policies, calls) = Observed(changes=CHANGES[:1]), clients
    monkeypatch.setattr(soak_load, "TRANSPORTS", ("ipc", "http"))
    policies["ipc"] = policies["shared"]
    tensor = SimpleNamespace(cuda=lambda: "on a GPU")
    soak_load.push(policies, lambda number: ({"a": tensor}, {}), 0, 3.5, observed, lambda: None)
    assert [call[3]["a"] for call in calls] == [tensor, "on a GPU", tensor, "on a GPU"]
    expected = {"swap, http, requests=keep", "swap, ipc, requests=wait", "swap, ipc, requests=keep"}
    assert set(observed.seconds) == expected


def test_memory_is_looked_at_once_every_kind_of_swap_has_come(clients):
    observed, (policies, calls), looks = Observed(changes=CHANGES[:1]), clients, []
    look = lambda: looks.append((observed.changes[-1].adapter, {call[1:3] for call in calls if call[0] == "swap"}))  # noqa: E731
    soak_load.push(policies, lambda number: ({}, {}), 0, 70.0, observed, look)
    assert [number for number, _ in looks] == [30, 60]
    assert looks[0][1] == looks[1][1] == {(way, mode) for way in policies for mode in soak_load.MODES}


def test_an_abort_that_is_never_answered_has_no_end(clients):
    observed, (policies, _) = Observed(changes=[Change(1, None, STILL)]), clients
    inner = policies["shared"].swap

    def swap(tensors, config, *, version, requests):
        if requests == "abort":
            raise ConnectionError("the server has died")
        return inner(tensors, config, version=version, requests=requests)

    policies["shared"].swap = swap
    with pytest.raises(ConnectionError):
        soak_load.push(policies, lambda number: ({}, {}), 0, 60.0, observed, lambda: None)
    assert observed.aborts == [(109.0, math.inf)] and observed.changes[-1].version == 10


SOUND = Verdict(one=30, several=5, left_out=2, worst=2e-5, controls=100, told_apart=99)
MEMORY = {"engine 7": [100 << 20, 150 << 20, (150 << 20) + 270_000]}
SECONDS = {"swap, http, requests=keep": [0.3, 0.1], "swap, shared, requests=abort": [0.5], "noise": [9.0]}


def summary(verdict=SOUND, memory=MEMORY, **changed):
    answers = [heard(1, 1), heard(1, 1, "abort"), heard(1, 1)]
    observed = Observed(**{"answers": answers, "cancelled": 3, "changes": CHANGES[:3], "seconds": SECONDS} | changed)
    return soak.summary(observed, {"without swaps": 10.04, "with swaps": 8.0}, memory, verdict)


def test_a_sound_soak_has_no_failure_and_the_figures_of_its_parts():
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
    printed = "\n".join(soak.lines(result))
    assert "3 answers (1 aborted by a swap), 3 given up, 0 lost; 2 changes" in printed and "FAILED" not in printed
    assert "all: p50 300 ms, p99 496 ms (3)" in printed
    assert "resident MiB of engine 7: 100 -> 150 -> 150" in printed
    assert "tokens/s: 10 without swaps, 8 with swaps" in printed


@pytest.mark.parametrize(
    ("changed", "message"),
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
def test_each_fault_is_a_failure_and_is_printed(changed, message):
    result = summary(**changed)
    assert len(result["failed"]) == 1 and result["failed"][0].startswith(message)
    assert any(line.startswith(f"FAILED: {message}") for line in soak.lines(result))


@pytest.mark.parametrize("mib", [[100], [1, 100, 164], [100, 200, 210]])
def test_memory_that_the_first_round_takes_is_no_growth(mib):
    assert summary(memory={"engine 7": [size << 20 for size in mib]})["failed"] == []


def test_a_judgement_cut_short_says_what_is_left(monkeypatch):
    written, clock = [], SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(soak, "time", clock)
    failed = lambda verdict: soak.summary(Observed(changes=CHANGES), {}, {}, verdict)["failed"]  # noqa: E731
    report = soak.seldom(lambda verdict: written.append(failed(verdict)), 20)
    report(Verdict(waiting=9))
    report(Verdict(one=1, waiting=8))
    clock.monotonic = lambda: 121.0
    report(Verdict(one=5, several=1, waiting=3, controls=4, told_apart=2, wrong={7: "off", 2: "far off"}))
    apart = "only 50.0% of answers are told from those of another policy: this proves nothing"
    assert written == [
        ["9 answers have not been judged"],
        ["2 wrong answers, such as: far off", "3 answers have not been judged", apart],
    ]
    assert len(failed(Verdict())) == 2  # with nothing to judge, nothing is proven


def test_requests_that_end_a_moment_later_do_not_run_on(monkeypatch):
    now, pages = [0.0], [(2.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    monkeypatch.setattr(soak.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(soak.time, "sleep", lambda seconds: now.append(now.pop() + seconds))

    def get(url):
        assert url == "http://server/metrics"
        running, waiting = pages.pop(0) if len(pages) > 1 else pages[0]
        text = f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_running{{engine="1"}} 0.0\n'
        text += f'vllm:num_requests_waiting{{engine="0"}} {waiting}\nvllm:num_requests_running_other 9.0\n'
        return SimpleNamespace(text=text)

    monkeypatch.setattr(httpx, "get", get)
    assert soak.running("http://server") == 0 and len(pages) == 1
    pages[:] = [(2.0, 1.0)]
    assert soak.running("http://server") == 3


@pytest.mark.parametrize("left", [0, 3])
def test_a_request_that_runs_on_is_lost_and_all_processes_are_measured(left, monkeypatch):
    passed = {}

    def load(url, token, name, *, adapter, between, **options):
        passed.update(options, where=(url, token, name, adapter(4)))
        between()
        between()
        return Observed(changes=CHANGES[:1]), {"with swaps": 1.0}

    monkeypatch.setattr(soak, "load", load)
    monkeypatch.setattr(soak, "config_of", lambda folder: {"vocab_size": 64, "folder": folder})
    monkeypatch.setattr(soak, "make_adapter", lambda config, seed, number: (config["folder"], seed, number))
    monkeypatch.setattr(soak, "running", lambda url: left)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [psutil.Process(1)] if recursive else [])
    server = SimpleNamespace(url="http://server", process=SimpleNamespace(pid=os.getpid()))
    observed, rates, memory = soak.measure(server, "secret", "model", 16, 30.0, 5)
    assert passed.pop("where") == ("http://server", "secret", soak.NAME, ("model", 5, 4))
    assert passed == {"vocabulary": 64, "streams": 16, "seed": 5, "quiet": 6.0, "busy": 24.0}
    assert observed.lost == ([f"{left} requests still run though none waits for them"] if left else [])
    assert rates == {"with swaps": 1.0}
    assert [name.split()[-1] for name in memory] == [str(os.getpid()), "1"]
    assert all(len(values) == 2 for values in memory.values())


def test_what_is_mapped_from_shared_memory_is_no_growth():
    here, size = psutil.Process(), 64 << 20
    before = soak.own_bytes(here)
    file, path = shared_file.create()
    with file:
        file.truncate(size)
        mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).fill_(1)
        assert soak.own_bytes(here) - before < size // 2
        kept = mapped.clone()
        assert soak.own_bytes(here) - before > size // 2 and kept[-1] == 1


@pytest.mark.parametrize("model", [None, "a checkpoint"])
def test_a_soak_writes_what_is_known_before_it_judges(model, monkeypatch, tmp_path):
    calls, written = {}, []

    @contextlib.contextmanager
    def serving(folder, options, rank, log):
        calls["serving"] = (folder, options, rank)
        yield "server", "token"

    def measure(*arguments):
        calls["measure"] = arguments
        one = Answer([5, 6], [7], [-1.0], "1", "length", 1)
        return Observed([one, one], changes=CHANGES[:3]), {}, {}

    @contextlib.contextmanager
    def references(folder, seed):
        calls["references"] = (folder, seed)
        yield [lambda change, answers: [[-1.0 - change.version / 2 + 0.5] for _ in answers]]

    for name, stand_in in (("serving", serving), ("measure", measure), ("references", references)):
        monkeypatch.setattr(soak, name, stand_in)
    monkeypatch.setattr(soak, "write_model", lambda shape, seed, folder: f"{shape} {seed}")
    monkeypatch.setattr(soak, "check_gpus", lambda count: None)
    monkeypatch.setattr(soak, "save", lambda result, output: written.append((dict(result), output)))
    result = soak.run(
        model=model,
        shape="tiny",
        streams=3,
        minutes=0.5,
        api_servers=2,
        tensor_parallel_size=2,
        seed=4,
        output=tmp_path / "x",
    )
    folder = model or "tiny 4"
    assert calls["serving"] == (folder, soak.server_options(3, 2, 2), 8) and calls["references"] == (folder, 4)
    assert calls["measure"] == ("server", "token", folder, 3, 30.0, 4)
    assert result["model"] == (model or "random weights, shape tiny")
    assert calls["serving"][1][-3:-1] == ["--tensor-parallel-size", "2"] and result["tensor_parallel_size"] == 2
    assert (result["streams"], result["api_servers"], result["seed"]) == (3, 2, 4) and "commit" in result
    assert (result["rank"], result["dtype"], result["judged"]["one policy"]) == (8, "float32", 2)
    assert result["worst_difference"] == 0 and not result["wrong"]
    assert written[0][0]["judged"]["not yet"] == 2 and written[0][1] == tmp_path / "x"
    assert written[-1] == (result, tmp_path / "x")


# This server forgets to empty its caches when the policy changes.
WITHOUT_RESET = """
from qerl_recipes.machine.environment import prepare

if __name__ in ("__main__", "__mp_main__"):
    prepare()
if __name__ == "__main__":
    from qerl_recipes.machine.serve import run
    from qerl_vllm_plugin.server.changes import PolicyServer

    async def forget(self, mode):
        pass

    PolicyServer._empty_caches = forget
    run()
"""


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("is_sound", [True, False])
def test_a_short_soak_finds_the_stale_answers_of_a_broken_server(is_sound, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(WITHOUT_RESET)
    line = command if is_sound else lambda *given: [sys.executable, str(script), *command(*given)[3:]]
    folder = soak.write_model("tiny", 0, tmp_path / "model")
    options = soak.server_options(16)
    with serving(folder, options, soak.RANK, Path(tmp_path, "log"), line=line) as (server, token):
        observed, rates, memory = soak.measure(server, token, folder, 16, 12, 0)
    assert len(observed.changes) > 5 and observed.cancelled > 0
    assert rates["with swaps"] > 0  # on a busy machine no answer may end in the 2 s before the swaps
    reference = soak_replay.reference(folder, 0)
    verdict = judge(observed.answers, observed.changes, [reference], soak.TOLERANCE["float32"])
    result = soak.summary(observed, rates, memory, verdict)
    assert result["lost"] == []
    if is_sound:
        assert result["failed"] == []
        assert verdict.one > 20 and verdict.several > 5
        assert result["change_seconds"]["all"]["p50"] > 0
        kinds = {kind.split(", ")[1] for kind in result["change_seconds"] if kind.startswith("swap")}
        assert kinds == {"shared", "http"}
    else:
        assert len(verdict.wrong) > 10
        assert "wrong answers" in result["failed"][0]


@pytest.mark.slow
@pytest.mark.integration
def test_several_engines_replay_as_one_does(monkeypatch, tmp_path):
    """Compare two engines with one, as on a GPU where several fit, and check that one that dies is reported."""
    folder = soak.write_model("tiny", 0, tmp_path / "model")
    answers = [Answer([5, 6, 7, i], [9, i], [0.0, 0.0], "1", "length", 2) for i in range(8, 16)]
    one = soak_replay.reference(folder, 0)
    expected = [one(change, answers) for change in CHANGES]
    monkeypatch.setattr(soak_replay, "engines", lambda _folder: 2)
    with soak_replay.references(folder, 0) as replays:
        assert len(replays) == 2
        for place, change in enumerate(CHANGES):
            for found, values in zip(replays[place % 2](change, answers), expected[place], strict=True):
                assert found == pytest.approx(values, abs=1e-5)
        with pytest.raises(RuntimeError, match="has died"):
            replays[0](CHANGES[1], [Answer([], [], [], "1", "length", 0)])
