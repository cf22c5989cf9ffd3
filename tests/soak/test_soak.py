"""Test the soak: its judge and its load on answers made up here, and all of it on a sound and on a broken real
server.
"""

import asyncio
import itertools
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import soak
import soak_replay
import torch
from soak_load import SILENT, Answer, Change, Observed, Received, ask
from soak_replay import Verdict, difference, judge, named

from qerl_recipes.bench.arms import serving
from qerl_recipes.machine import serve
from qerl_recipes.machine.serve import command
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
    verdict = judge([answer(policy, *places)], CHANGES, partial(map, replay), 1e-3)
    assert (not verdict.wrong) == is_right and verdict.left_out == 0


def test_a_logprob_that_is_no_number_is_wrong():
    broken = answer("1", 0, 0)
    broken.logprobs[1] = math.nan
    assert judge([broken], CHANGES, partial(map, replay), 1e-3).wrong
    assert difference(answer("1", 0), [[math.nan]], 1e-3) != 0


def test_answers_of_many_policies_are_left_out_and_controls_told_apart():
    many = [Change(i, i, STILL) for i in range(9)]
    assert named("2-7", many) == [2, 3, 4, 5, 6, 7]
    verdict = judge([answer("1-6", 0), answer("2", 1, 1)], many, partial(map, lambda *_: [[0.0] * 2]), 1e-3)
    assert (verdict.left_out, verdict.one, verdict.several) == (1, 1, 0)
    verdict = judge([answer("2", 1, 1)] * 20, CHANGES, partial(map, replay), 1e-3)
    assert (verdict.controls, verdict.told_apart, verdict.one) == (2, 2, 20)
    # A replay that ignores the policy cannot tell policies apart.
    deaf = partial(map, lambda change, answers: replay(CHANGES[0], answers))
    verdict = judge([answer("2", 0, 0)], CHANGES, deaf, 1e-3)
    assert (verdict.controls, verdict.told_apart) == (1, 0)


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


@pytest.mark.parametrize("content", [stream(*PIECES[:3]), stream(*PIECES, end="data: [DONE]\n\n")])
def test_a_sequence_without_its_end_or_a_policy_is_lost(content):
    with pytest.raises(RuntimeError, match="without its end"):
        asked(content, 2)


SOUND = Verdict(one=30, several=5, left_out=2, worst=2e-5, controls=100, told_apart=99)
MEMORY = {"engine 7": [100 << 20, 150 << 20, (150 << 20) + 270_000]}
SECONDS = {"swap, http, requests=keep": [0.3, 0.1], "swap, shared, requests=abort": [0.5], "noise": [9.0]}


def summary(verdict=SOUND, memory=MEMORY, **changed):
    answers = [heard(1, 1), heard(1, 1, "abort"), heard(1, 1)]
    observed = Observed(**{"answers": answers, "cancelled": 3, "changes": CHANGES[:3], "seconds": SECONDS} | changed)
    return soak.summary(observed, {"without swaps": 10.04, "with swaps": 8.0}, memory, verdict)


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
def test_a_short_soak_finds_the_stale_answers_of_a_broken_server(is_sound, tmp_path, monkeypatch):
    script = tmp_path / "server.py"
    script.write_text(WITHOUT_RESET)
    if not is_sound:
        monkeypatch.setattr(serve, "command", lambda *given: [sys.executable, str(script), *command(*given)[3:]])
    folder = soak.write_model("tiny", 0, tmp_path / "model")
    options = soak.server_options(16)
    with serving(folder, options, soak.RANK, Path(tmp_path, "log")) as (server, token):
        observed, rates, memory = soak.measure(server, token, folder, 16, 12, 0)
    assert len(observed.changes) > 5 and observed.cancelled > 0
    assert rates["with swaps"] > 0  # on a busy machine no answer may end in the 2 s before the swaps
    with soak_replay.references(folder, 0) as replays:
        verdict = judge(observed.answers, observed.changes, replays, soak.TOLERANCE["float32"])
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


def test_a_servers_share_of_a_gpu_is_what_was_asked_for(monkeypatch):
    def serving(folder, options, *_):
        raise RuntimeError(" ".join(options))

    monkeypatch.setattr(soak, "serving", serving)
    asked = partial(soak.main, model="unused", shape="tiny")
    with pytest.raises(RuntimeError, match=r"--gpu-memory-utilization 0\.25"):
        asked(gpu_memory_utilization=0.25)
    with pytest.raises(RuntimeError, match=r"^(?!.*gpu-memory)"):
        asked()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "huge"}, "unknown shape"),
        ({"streams": 0}, "streams is 0, minutes 10 and api-server-count 1; all must be above 0"),
        ({"minutes": 0}, "all must be above 0"),
        ({"minutes": -1}, "all must be above 0"),
        ({"api_server_count": 0}, "all must be above 0"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, and this machine has"),
    ],
)
def test_what_makes_no_soak_is_refused(options, message, monkeypatch):
    monkeypatch.setattr(soak, "serving", lambda *_: pytest.fail("a server was started"))
    with pytest.raises(ValueError, match=message):
        soak.main(**options)
