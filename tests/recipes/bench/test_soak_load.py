"""What a soak changes, and that what it writes down of it is what the server was told: its judge knows nothing else."""

from types import SimpleNamespace

import pytest

from qerl_recipes.bench import soak_load
from qerl_recipes.bench.soak_load import Change, Found
from qerl_recipes.bench.soak_streams import SILENT, Answer, Heard


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves: the seconds since the start, in a list."""
    now = [100.0]
    sleep = lambda seconds: now.append(now.pop() + seconds)  # noqa: E731
    monkeypatch.setattr(soak_load, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


@pytest.fixture
def clients(clock):
    """Clients of a server of which each swap takes a quarter of a second, and noise a half; and what it was told."""
    told = []

    class Client:
        def __init__(self, transport):
            self.transport = transport

        def swap(self, tensors, config, *, version, requests):
            told.append(("swap", self.transport, requests, tensors, config, version, clock[0]))
            clock[0] += 0.25
            return version

        def set_noise(self, sigma, *, seed, rollout):
            told.append(("noise", self.transport, (sigma, seed, rollout)))
            clock[0] += 0.5

    return {transport: Client(transport) for transport in soak_load.TRANSPORTS}, told


def test_what_is_written_down_of_each_change_is_what_the_server_was_told(clients):
    found, (policies, told) = Found([Change(7, None, (0.0, 0, 0))]), clients
    soak_load.push(policies, lambda number: (f"tensors {number}", f"config {number}"), 3, 11.5, found, lambda: None)
    swaps = [given for given in told if given[0] == "swap"]
    assert [given[3:] for given in swaps] == [
        (f"tensors {number}", f"config {number}", 7 + number, 99.0 + number) for number in range(1, 13)
    ], "one a second, each of the next version"
    assert [given[1] for given in swaps] == ["shared", "http", "shared"] * 4
    modes = ["keep", "wait", "keep", "keep", "wait", "keep", "keep", "wait", "keep", "abort", "keep", "wait"]
    assert [given[2] for given in swaps] == modes
    noises = [(index, given[2]) for index, given in enumerate(told) if given[0] == "noise"]
    assert noises == [(5, (0.05, 3, 5)), (11, (0.0, 0, 0))], "after every fifth swap, on and off in turn"

    still, noise = (0.0, 0, 0), (0.05, 3, 5)
    expected = [Change(7, None, still), *(Change(7 + number, number, still) for number in range(1, 6))]
    expected += [Change(12, 5, noise), *(Change(7 + number, number, noise) for number in range(6, 11))]
    expected += [Change(17, 10, still), Change(18, 11, still), Change(19, 12, still)]
    assert found.changes == expected
    assert found.aborts == [(109.0, 109.25)]
    assert found.seconds["noise"] == [0.5, 0.5] and sum(map(len, found.seconds.values())) == 14
    assert found.seconds["swap, http, requests=wait"] == [0.25, 0.25, 0.25]
    assert found.seconds["swap, shared, requests=abort"] == [0.25]


def test_an_abort_lasts_until_it_is_answered_or_to_the_end_if_it_never_is(clients):
    found, (policies, _) = Found([Change(1, None, (0.0, 0, 0))]), clients
    inner = policies["shared"].swap

    def swap(tensors, config, *, version, requests):
        if requests == "abort":
            raise ConnectionError("the server has died")
        return inner(tensors, config, version=version, requests=requests)

    policies["shared"].swap = swap
    with pytest.raises(ConnectionError):
        soak_load.push(policies, lambda number: ({}, {}), 0, 60.0, found, lambda: None)
    assert found.aborts == [(109.0, float("inf"))] and found.changes[-1].version == 10


@pytest.mark.parametrize(("asked", "ended", "is_aborted"), [(1, 4, True), (9, 11, True), (5, 8, False), (6, 7, False)])
def test_a_silent_answer_was_aborted_if_any_abort_came_while_it_was_waited_for(asked, ended, is_aborted):
    found = Found([Change(1, None, (0.0, 0, 0))], aborts=[(3.0, 5.0), (10.0, 12.0)])
    found.take(Heard([Answer([5], [], [], "", SILENT, 3, float(asked), float(ended))]))
    assert (found.answers[0].reason, len(found.lost)) == (("abort", 0) if is_aborted else (SILENT, 1))


def test_a_load_is_a_quiet_part_and_a_busy_one_and_each_is_timed_by_itself(clock, monkeypatch):
    order = []

    class Streams:
        def __init__(self, url, model, pool, count, seed):
            order.append((url, model, len(pool), count, seed))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            order.append("dead")

        def check(self):
            order.append(("check", clock[0]))

        def end(self):
            answers = [Answer([5], [1] * n, [0.0] * n, "1", "length", n, 0.0, at) for n, at in ((8, 101), (30, 104))]
            return Heard(answers, ["gone"], 2)

    class Client:
        def __init__(self, url, token, *, transport):
            assert (url, token) == ("http://server", "secret")

        def state(self):
            return {"version": 5}

    def push(policies, adapter, seed, seconds, found, between):
        assert found.changes == [Change(5, None, (0.0, 0, 0))] and set(policies) == {"shared", "http"}
        order.append(("push", adapter, seed, seconds, clock[0]))
        clock[0] += seconds
        between()

    for name, played in (("Streams", Streams), ("PolicyClient", Client), ("push", push)):
        monkeypatch.setattr(soak_load, name, played)
    options = {"vocabulary": 64, "streams": 3, "quiet": 2.0, "busy": 6.0, "seed": 4, "adapter": "adapters"}
    between = lambda: order.append(("between", clock[0]))  # noqa: E731
    found, speed = soak_load.load("http://server", "secret", "policy", **options, between=between)
    assert order == [
        ("http://server", "policy", 24, 3, 4),
        ("check", 102.0),
        ("between", 102.0),
        ("push", "adapters", 4, 6.0, 102.0),
        ("between", 108.0),
        ("check", 108.0),
        ("between", 108.0),
        "dead",
    ]
    assert speed == {"without swaps": 4.0, "with swaps": 5.0}
    assert (found.lost, found.cancelled, len(found.answers)) == (["gone"], 2, 2)
