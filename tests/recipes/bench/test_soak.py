"""The soak: its judge on answers made up here, and the whole of it on a real server, sound and broken on purpose."""

import itertools
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from qerl_recipes.bench import soak, soak_load, soak_replay
from qerl_recipes.bench.soak_judge import Verdict, difference, judge, named, portions
from qerl_recipes.bench.soak_load import Change, Found, speed
from qerl_recipes.bench.soak_streams import SILENT, Answer, Heard, Streams, shares
from qerl_recipes.machine.serve import command
from qerl_recipes.recipe.shapes import config_json
from qerl_vllm_plugin.wire import shared_file

STILL = (0.0, 0, 0)  # no noise
CHANGES = [Change(1, None, STILL), Change(2, 1, STILL), Change(2, 1, (0.1, 0, 1)), Change(3, 2, (0.1, 0, 1))]


def value(change, token):
    """The log-probability that the policy of a change gives to a token, in this file."""
    return -(token + CHANGES.index(change) * 10.0)


def replay(change, answers):
    return [[value(change, token) for token in answer.tokens] for answer in answers]


def answer(policy, *places, reason="length"):
    """An answer whose tokens were computed under the changes at ``places``."""
    tokens = list(range(1, len(places) + 1))
    logprobs = [value(CHANGES[place], token) for place, token in zip(places, tokens, strict=True)]
    return Answer([5, 6], tokens, logprobs, policy, reason, len(tokens))


@pytest.mark.parametrize(
    ("policy", "places", "is_right"),
    [
        ("1", (0, 0, 0), True),
        ("1", (0, 1, 0), False),
        ("2", (1, 1, 1), True),
        ("2", (2, 2), True),
        ("2", (1, 2), False),  # the noise changed and nothing says so
        ("2-2", (1, 2), True),
        ("2-2", (2, 1), False),
        ("1-3", (0, 0, 1, 2, 3), True),
        ("1-3", (0, 3), True),
        ("1-3", (0, 1, 0, 3), False),  # an earlier policy's keys and values were read again
        ("1-2", (0, 3), False),
        ("4", (3,), False),
        ("1-4", (0, 3), False),
    ],
)
def test_an_answer_is_right_if_the_policies_that_it_names_compute_it_in_their_order(policy, places, is_right):
    verdict = judge([answer(policy, *places)], CHANGES, [replay], 1e-3)
    assert (not verdict.wrong) == is_right
    assert verdict.left_out == 0


def test_a_logprob_that_is_no_number_is_wrong():
    broken = answer("1", 0, 0)
    broken.logprobs[1] = math.nan
    assert judge([broken], CHANGES, [replay], 1e-3).wrong
    assert difference(answer("1", 0), [[math.nan]], 1e-3) != 0


def test_the_worst_difference_is_that_of_the_answers_that_are_right_under_one_policy():
    def off(by, policy="1", place=0):
        found = answer(policy, place, place, place)
        found.logprobs[:2] = [found.logprobs[0] + by, found.logprobs[1] - by / 2]
        return found

    answers = [off(0.25), off(-0.5), off(0.125), off(3.0), off(0.75, "1-2", 1)]
    verdict = judge(answers, CHANGES, [replay], 1.0)
    assert (verdict.worst, verdict.one, verdict.several) == (0.5, 4, 1)
    assert list(verdict.wrong) == [3] and verdict.wrong[3].endswith("a log-probability is 3 off")


def test_a_reference_that_leaves_an_answer_out_is_no_judge():
    with pytest.raises(ValueError, match="shorter"):
        judge([answer("1", 0), answer("1", 0)], CHANGES, [lambda *asked: replay(*asked)[:1]], 1e-3)


def test_the_adapter_of_a_number_is_drawn_again_for_the_reference_and_no_other_is_like_it():
    config = config_json("tiny")
    first, again, second, of_another_seed = (
        soak_replay.make_adapter(config, seed, number)[0] for seed, number in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert first.keys() == again.keys() == second.keys() == of_another_seed.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, second[name]) and not torch.equal(tensor, of_another_seed[name])


@pytest.mark.parametrize(("free", "count"), [(139, 4), (59.9, 3), (29.9, 1), (8, 1)])
def test_as_many_reference_engines_as_fit_beside_each_other(free, count, monkeypatch, tmp_path):
    """Of a model of 5 GiB, each with a cache of 4 and 6 at work."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(5 << 30)  # with no block of the disk
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * 2**30), 140 << 30))
    for gpu, expected, dtype in ((None, 1, "float32"), ("a GPU", count, "bfloat16")):
        monkeypatch.setattr(soak_replay, "installed_gpu", lambda there=gpu: there)
        assert soak_replay.engines(str(tmp_path)) == expected
        assert soak_replay.dtype() == dtype


@pytest.mark.parametrize("cached", [0, 2, 3])
def test_an_answers_log_probabilities_are_found_whether_or_not_those_of_cached_tokens_are_there(cached):
    prompt, tokens = [5, 6, 7], [8, 9]
    known = [{token: SimpleNamespace(logprob=-float(token))} for token in (*prompt, *tokens)]
    assert soak_replay.of_tokens(tokens, [None, *known[1:]][cached:]) == [-8.0, -9.0]
    with pytest.raises(KeyError):  # an answer's own token is missing: never a figure of another token
        soak_replay.of_tokens(tokens, known[4:])


def test_answers_whose_beginning_is_in_the_prefix_cache_are_replayed_without_it(classes_looked_at_here, tmp_path):
    block = 128  # vLLM's on a CPU
    prompt, other = list(range(1, block + 1)), list(range(2, block))  # the second shares a block with its own answers
    same = [7] * (block - len(other) + 3)
    asked = [(prompt, [5, 6, 7]), (prompt, [9, 9]), (other, [*same, 1]), (other, [*same, 2])]
    answers = [Answer(given, tokens, [0.0] * len(tokens), "1", "length", len(tokens)) for given, tokens in asked]
    replay = soak_replay.reference(soak.write_model("tiny", 0, tmp_path / "model"), 0)
    together = replay(CHANGES[0], answers)
    alone = [replay(CHANGES[0], [answer])[0] for answer in answers]  # each time with an empty cache
    assert [len(values) for values in together] == [len(answer.tokens) for answer in answers]
    for found, expected in zip(together, alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    # an adapter, its noise, the next adapter under the same noise, and the base again: each is another policy
    under = [torch.tensor(replay(change, answers[:1])[0]) for change in (*CHANGES[1:], CHANGES[0])]
    apart = [float((one - other).abs().max()) for one, other in itertools.combinations(under, 2)]
    assert min(apart) > soak.TOLERANCE["float32"]
    assert under[-1].tolist() == pytest.approx(alone[0], abs=1e-5)


def test_answers_of_many_policies_are_left_out_and_counted_and_controls_are_told_apart():
    many = [Change(i, i, STILL) for i in range(9)]
    assert named("2-7", many) == [2, 3, 4, 5, 6, 7]
    verdict = judge([answer("1-6", 0), answer("2", 1, 1)], many, [lambda change, answers: [[0.0] * 2]], 1e-3)
    assert (verdict.left_out, verdict.one, verdict.several) == (1, 1, 0)
    verdict = judge([answer("2", 1, 1)] * 20, CHANGES, [replay], 1e-3)
    assert (verdict.controls, verdict.told_apart, verdict.one) == (2, 2, 20)
    # a replay that takes no notice of the policy tells nothing apart
    verdict = judge([answer("2", 0, 0)], CHANGES, [lambda change, answers: replay(CHANGES[0], answers)], 1e-3)
    assert (verdict.controls, verdict.told_apart) == (1, 0)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_policies_are_shared_out_in_their_order_and_what_is_found_is_the_same(count):
    parts = portions({3: 10, 1: 10, 2: 10, 8: 30}, count)
    assert [place for part in parts for place in part] == [1, 2, 3, 8] and len(parts) == count
    assert [portions({1: 10, 2: 10, 3: 10, 8: 30}, 2), portions({}, 2)] == [[[1, 2, 3], [8]], [[], []]]
    answers = [answer("1-3", 0, 1, 3), answer("2", 2, 2), answer("2", 1, 2), answer("3", 3)] * 6
    verdict = judge(answers, CHANGES, [replay] * count, 1e-3)
    assert verdict == judge(answers, CHANGES, [replay], 1e-3) and len(verdict.wrong) == 6


def test_an_answer_is_judged_as_soon_as_the_last_policy_that_it_names_has_replayed_it():
    answers = [answer("1", 0), answer("1-2", 0, 1), answer("3", 3, 3), answer("1", 0, 3)]
    told = []
    verdict = judge(answers, CHANGES, [replay], 1e-3, lambda so_far: told.append((so_far.one, so_far.waiting)))
    # after policy 1, 2 without noise, 2 with it, and 3
    assert told == [(2, 2), (2, 2), (2, 1), (3, 0)]
    assert list(verdict.wrong) == [3] and (verdict.several, verdict.waiting) == (1, 0)


def test_an_engine_that_dies_ends_the_judging_of_the_others():
    many, asked = [Change(i, i, STILL) for i in range(80)], []

    def dies(change, answers):
        raise RuntimeError("a reference engine has died")

    def works(change, answers):
        asked.append(change)
        time.sleep(0.1)
        return [[0.0] for _ in answers]

    with pytest.raises(RuntimeError, match="has died"):
        judge([Answer([5], [1], [0.0], str(i), "length", 1) for i in range(80)], many, [works, dies], 1e-3)
    assert len(asked) < 40  # its half of the policies, which take 4 s


def test_a_judgement_that_is_cut_short_says_what_has_not_been_judged(monkeypatch):
    written, clock = [], SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(soak, "time", clock)
    tell = soak.in_turns(lambda verdict: written.append(soak.summary(Found(CHANGES), {}, {}, verdict)["failed"]), 20)
    tell(Verdict(waiting=9))
    tell(Verdict(one=1, waiting=8))
    clock.monotonic = lambda: 121.0
    tell(Verdict(one=5, several=1, waiting=3, controls=4, told_apart=2, wrong={7: "off", 2: "far off"}))
    apart = "only 50.0% of answers are told from those of another policy: this proves nothing"
    assert written == [
        ["9 answers have not been judged"],
        ["2 wrong answers, such as: far off", "3 answers have not been judged", apart],
    ]
    assert len(soak.summary(Found(CHANGES), {}, {}, Verdict())["failed"]) == 2  # nothing to judge proves nothing


def heard(tokens, length, reason="length", *, logprobs=None, asked=0.0, ended=1.0):
    scores = [0.0] * (tokens if logprobs is None else logprobs)
    return Answer([5], [7] * tokens, scores, "1", reason, length, asked, ended)


@pytest.mark.parametrize(
    ("given", "is_lost"),
    [
        (heard(3, 3), False),
        (heard(2, 3), True),
        (heard(3, 3, "stop"), True),
        (heard(3, 3, logprobs=2), True),
        (heard(1, 3, "abort"), False),
        (heard(0, 3, SILENT, asked=3, ended=4), False),  # while requests were aborted
        (heard(0, 3, SILENT, asked=1, ended=2), True),
        (heard(0, 3, SILENT, asked=6, ended=7), True),
    ],
)
def test_an_answer_that_is_not_whole_is_lost_unless_a_swap_has_aborted_it(given, is_lost):
    found = Found(CHANGES[:1], aborts=[(3.5, 5.0)])
    found.take(Heard([given], ["no route"], 2))
    assert len(found.lost) - 1 == is_lost and found.cancelled == 2
    assert found.answers[0].reason == ("abort" if given.reason == SILENT and not is_lost else given.reason)


def test_tokens_are_counted_where_their_answer_ended():
    answers = [heard(9, 9, ended=0.9), heard(4, 4, ended=1.0), heard(8, 8, ended=2.0), heard(16, 16, ended=3.0)]
    assert speed(answers, 1.0, 3.0) == 6.0


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (64, [64]), (65, [64, 1]), (256, [64] * 4)])
def test_every_stream_is_of_one_process_and_none_has_too_many(count, sizes):
    assert [len(numbers) for numbers in shares(count)] == sizes
    assert [number for numbers in shares(count) for number in numbers] == list(range(count))


def test_a_process_of_streams_that_dies_is_told_and_not_waited_for():
    with Streams("http://127.0.0.1:1", "policy", [[1]], 1, 0) as asking:
        asking._processes[0].kill()
        asking._processes[0].join()
        with pytest.raises(RuntimeError, match="ended with code -9"):
            asking.check()
        with pytest.raises(RuntimeError, match="has died"):
            asking.end()


def test_what_is_mapped_from_shared_memory_is_no_growth_of_a_process():
    here, size = psutil.Process(), 64 << 20
    before = soak.own_bytes(here)
    file, path = shared_file.create()
    with file:
        file.truncate(size)
        mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).fill_(1)
        assert soak.own_bytes(here) - before < size // 2
        kept = mapped.clone()
        assert soak.own_bytes(here) - before > size // 2 and kept[-1] == 1


@pytest.mark.parametrize(
    ("mib", "grows"), [([100], False), ([100, 200], True), ([100, 200, 210], False), ([100, 200, 240, 270], True)]
)
def test_memory_that_the_first_round_of_swaps_takes_is_kept_for_the_next_and_more_is_growth(mib, grows):
    memory = {"engine": [value << 20 for value in mib]}
    failed = soak.summary(Found(CHANGES[:1]), {}, memory, Verdict())["failed"]
    assert ["engine has grown by" in text for text in failed].count(True) == grows


def test_memory_is_looked_at_after_each_round_in_which_every_kind_of_swap_has_come(monkeypatch):
    seconds, found, kinds = [0.0], Found(CHANGES[:1]), set()
    clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=lambda length: seconds.append(seconds.pop() + length))
    monkeypatch.setattr(soak_load, "time", clock)

    class Client:
        def __init__(self, transport):
            self.transport = transport

        def swap(self, tensors, config, *, version, requests):
            kinds.add((self.transport, requests))
            return version

        def set_noise(self, sigma, *, seed, rollout): ...

    looks = []
    clients = {transport: Client(transport) for transport in soak_load.TRANSPORTS}
    soak_load.push(
        clients, lambda _: ({}, {}), 0, 70.0, found, lambda: looks.append((found.changes[-1].adapter, {*kinds}))
    )
    assert [number for number, _ in looks] == [30, 60]
    assert looks[0][1] == looks[1][1] == {(way, mode) for way in clients for mode in soak_load.MODES}


# a server that forgets to empty its caches when the policy changes
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
def test_a_short_soak_finds_nothing_on_a_sound_server_and_the_stale_answers_of_a_broken_one(is_sound, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(WITHOUT_RESET)
    line = command if is_sound else lambda *given: [sys.executable, str(script), *command(*given)[3:]]
    folder = soak.write_model("tiny", 0, tmp_path / "model")
    with soak.serving(folder, 16, Path(tmp_path, "log"), line) as (server, token):
        found, speed, memory = soak.measure(server, token, folder, 16, 12, 0)
    assert len(found.changes) > 5 and found.cancelled > 0
    assert speed["with swaps"] > 0  # in the 2 s before them a busy machine may end no answer
    verdict = judge(found.answers, found.changes, [soak_replay.reference(folder, 0)], soak.TOLERANCE["float32"])
    result = soak.summary(found, speed, memory, verdict)
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
def test_engines_that_share_the_policies_replay_as_one_does_and_one_that_dies_is_told(monkeypatch, tmp_path):
    """As on a GPU, where several fit."""
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
