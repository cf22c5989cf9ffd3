"""Test a prefix cache in another process. It is emptied while the adapter is packed, and must be empty before a change
is sent."""

from concurrent.futures import Future
from contextlib import contextmanager
from time import monotonic
from types import SimpleNamespace

import pytest
from waiting import PATIENCE

from qerl_vllm_plugin.compat import engine_client
from qerl_vllm_plugin.policy import Policy, PolicyLostError
from qerl_vllm_plugin.wire import timing
from qerl_vllm_plugin.wire.timing import begun

EMPTY, CHANGE = "reset_prefix_cache", "qerl_swap"


@pytest.fixture(scope="module")
def engine(boot, make_nvfp4, carriers):
    return boot(make_nvfp4("qwen2"), **carriers["resident"])


@pytest.fixture
def policy(engine, monkeypatch):
    """Return a policy whose engine is treated as one of another process. ``asked`` records the calls in order, and
    ``emptied`` is the pending answer."""
    policy = Policy(engine, timeout=PATIENCE)
    policy.swap(None)
    policy._sender.is_here, policy.asked, policy.emptied = False, [], Future()

    def note(call):
        policy.asked.append(call.args[0] if call.args else EMPTY)
        return begun(call) if call.args else policy.emptied

    encoded = policy._sender._encoded

    @contextmanager
    def packed(way, tensors):
        with encoded(way, tensors) as sent:
            policy.asked.append("packed")
            if policy.answer is not None:
                policy.emptied.set_result(policy.answer)
            yield sent

    monkeypatch.setattr("qerl_vllm_plugin.policy.scheduler_here", lambda llm: None)
    monkeypatch.setattr("qerl_vllm_plugin.policy.begun", note)
    monkeypatch.setattr(policy._sender, "_encoded", packed)
    return policy


@pytest.fixture
def adapter(reference, make_nvfp4, make_adapter):
    return make_adapter(reference(make_nvfp4("qwen2")))[:2]


def test_it_is_emptied_while_the_adapter_is_packed(policy, adapter):
    policy.answer = True
    version = policy.version
    assert policy.swap(*adapter) == version + 1
    assert policy.asked == [EMPTY, "packed", CHANGE]
    assert list(policy.parts) == ["empty", "pack", "way", "free", "receive", "check", "stage", "agree", "commit"]
    policy.set_noise(0.1, seed=1, rollout=1)
    assert policy.asked[3:] == [EMPTY, "qerl_set_noise"]


@pytest.mark.parametrize("is_here", [True, False])
def test_its_time_is_told_apart_from_packing(policy, adapter, monkeypatch, is_here):
    """Check the reported time. An engine in this process empties its cache before packing. For another process only the
    time spent waiting is reported."""
    policy.answer = True
    policy._sender.is_here = is_here
    reset, clock = policy._llm.reset_prefix_cache, [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=monotonic))

    def slowly(**options):
        clock[0] += 7.0
        return reset(**options)

    monkeypatch.setattr(policy._llm, "reset_prefix_cache", slowly)
    policy.swap(*adapter)
    assert {part: seconds for part, seconds in policy.parts.items() if seconds} == ({"empty": 7.0} if is_here else {})


def test_without_an_empty_cache_no_change_is_sent(policy, adapter):
    policy.answer = False
    before = policy.state(digest=True)
    policy.asked.clear()
    for change in (lambda: policy.swap(*adapter), lambda: policy.set_noise(0.1, seed=1, rollout=1)):
        with pytest.raises(RuntimeError, match="could not empty its prefix cache"):
            change()
    assert policy.asked == [EMPTY, "packed", EMPTY]
    assert policy.state(digest=True) == before


def test_a_swap_that_cannot_be_packed_leaves_no_call_under_way(policy, adapter, monkeypatch):
    """Its caller may ask the engine next, and two threads that send at a time would mix their messages."""
    monkeypatch.setattr(engine_client, "has_died", lambda llm: policy.emptied.set_result(True))  # asked by who waits
    with pytest.raises(ValueError, match="has dtype"):
        policy.swap({name: tensor.cfloat() for name, tensor in adapter[0].items()}, adapter[1])
    assert policy.asked == [EMPTY] and policy.emptied.done()


def test_a_cache_that_is_not_heard_of_is_an_engine_given_up(policy, adapter):
    policy.answer, policy._timeout = None, 0.2
    with pytest.raises(PolicyLostError, match="has not answered"):
        policy.swap(*adapter)
    assert policy.asked == [EMPTY, "packed"]
