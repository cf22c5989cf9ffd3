"""Test an engine that does not answer. A program and a server give it up after a while and never ask it again."""

import asyncio
import threading
import time

import pytest
from engine_client import EngineClient, vllm_config
from vllm.v1.engine.exceptions import EngineDeadError
from waiting import PATIENCE

from qerl_vllm_plugin.options import Options
from qerl_vllm_plugin.policy import Policy, PolicyLostError
from qerl_vllm_plugin.server import engine as server_engine
from qerl_vllm_plugin.server.changes import PolicyServer
from qerl_vllm_plugin.wire.timing import begun, in_time
from qerl_vllm_plugin.worker.change_log import ChangeLog

SILENCE = "the engine has not answered for 0.2 s, and whether it has changed nobody knows; restart it"


def test_a_call_is_waited_for_and_raises_its_own_error():
    assert in_time(begun(lambda: 7), PATIENCE) == 7
    with pytest.raises(ZeroDivisionError):
        in_time(begun(lambda: 1 // 0), PATIENCE)
    never = threading.Event()
    with pytest.raises(TimeoutError, match=SILENCE):
        in_time(begun(lambda: never.wait(60)), 0.2)
    never.set()


def test_a_call_to_an_engine_core_that_dies_is_not_waited_for():
    never, began = threading.Event(), time.monotonic()
    with pytest.raises(TimeoutError, match="the engine core has died"):
        in_time(begun(lambda: never.wait(60)), PATIENCE, lambda: time.monotonic() > began + 0.1)
    assert time.monotonic() < began + 60, "not only when the call ends"
    assert in_time(begun(lambda: 7), PATIENCE, lambda: False) == 7
    never.set()


def test_a_program_gives_up_a_silent_engine_for_good(boot, make_nvfp4, carriers, monkeypatch):
    engine = boot(make_nvfp4("qwen2"), **carriers["resident"])
    policy, asked, never = Policy(engine, timeout=0.2), [], threading.Event()
    answer = engine.collective_rpc

    def hangs(method, **keywords):
        asked.append(method)
        return never.wait(60) if not policy._sender.is_here else (time.sleep(0.4), answer(method, **keywords))[1]

    monkeypatch.setattr(engine, "collective_rpc", hangs)
    policy.swap(None)  # a call to an engine in this process has no time limit
    policy._sender.is_here = False
    for use in (lambda: policy.swap(None), lambda: policy.set_noise(0.1, seed=1, rollout=1), policy.state):
        with pytest.raises(PolicyLostError, match=SILENCE):
            use()
    with pytest.raises(PolicyLostError, match=SILENCE):
        _ = policy.request
    assert asked == ["qerl_swap", "qerl_swap"], "it is asked once and never again"
    never.set()


class Engine(EngineClient):
    """An engine client whose engine stops answering or, with ``dies``, dies. As vLLM's, it serves ``generate`` and
    reports its health."""

    def __init__(self, silent, *, dies=False):
        super().__init__()
        self._dies, self.is_left_paused = dies, False
        self._silent, self.asked, self.ended, self.changes = silent, [], [], ChangeLog()
        self.changes.add(0)
        self.output_processor.propagate_error = self.ended.append

    async def _answer(self, name, value):
        if self.errored:
            raise EngineDeadError
        self.asked.append(name)
        if name == self._silent:
            answer = self.utility_results[name] = asyncio.get_running_loop().create_future()
            self.errored = self._dies
            await answer  # nobody sets its result, as in vLLM's client
        return value

    def is_paused(self):
        return self._answer("is_paused", self.is_left_paused)

    def call_utility_async(self, method):
        return self._answer(method, False)

    def pause_scheduler_async(self, mode, clear_cache):
        return self._answer("pause_scheduler_async", None)

    def reset_prefix_cache(self, reset_running_requests, reset_connector):
        return self._answer("reset_prefix_cache", True)

    def resume_scheduler_async(self):
        return self._answer("resume_scheduler_async", None)

    def collective_rpc(self, method, args):
        state = {"version": 0, "hash": "", "sigma": 0.0, "seed": 0, "rollout": 0, "targets": []}
        opened = {"carrier": "resident", "max_rank": 8, "max_bytes": 1 << 20, "gpus": []}
        opened |= {"changes": self.changes.path, "instance": f"test-{id(self)}"}
        return self._answer(method, [{**state, **opened, "noisy_norms": 4}])

    async def generate(self):
        yield "an answer"

    async def check_health(self):
        return None


ASKED = ["is_paused", "pause_scheduler_async", "reset_prefix_cache", "qerl_set_noise", "resume_scheduler_async"]


@pytest.fixture
def serve(client_of):
    """serve(engine, patience, use) returns what ``use(client)`` returns, with a client of this engine's server."""

    def run(engine, patience, use):
        async def serve():
            server = PolicyServer()
            await server.open(engine, vllm_config(), None, None, patience)
            async with client_of(server) as client:
                return await use(client)

        return asyncio.run(serve())

    return run


@pytest.mark.parametrize("silent", ASKED)
def test_a_server_gives_up_a_silent_engine_and_its_requests(serve, silent):
    engine = Engine(silent)

    async def use(client):
        noise = {"sigma": 0.1, "seed": 1, "rollout": 1}
        answers = [await client.put("noise", json=noise), await client.get("state"), await client.delete("policy")]
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            async for _ in engine.generate():
                pytest.fail("a lost engine has answered")
        return answers

    answers = serve(engine, 0.2, use)
    assert [answer.status_code for answer in answers] == [503] * 3
    assert all(SILENCE in answer.json()["error"] and answer.json()["reason"] == "lost" for answer in answers)
    assert engine.changes.is_lost, "other processes must know"
    assert engine.asked[-1] == silent, "an engine that is silent is not asked again, not even to go on"
    assert [str(error) for error in engine.ended] == [str(EngineDeadError(SILENCE))], "requests under way end"


# an engine that somebody else has paused gets no resume call, which would fail too
@pytest.mark.parametrize(("call", "paused"), [*((call, False) for call in ASKED), ("reset_prefix_cache", True)])
def test_a_call_that_an_engine_dies_in_is_answered_at_once(serve, monkeypatch, call, paused):
    monkeypatch.setattr(server_engine, "LOOK", 0.01)
    failed = []
    monkeypatch.setattr(server_engine.engine_client, "fail_at_exit", lambda: failed.append(1))
    engine = Engine(call, dies=True)
    engine.is_left_paused = paused

    async def use(client):
        asked = [client.delete("noise"), client.delete("policy"), client.get("state")]
        return await asyncio.wait_for(asyncio.gather(*asked), PATIENCE / 4)

    answers = serve(engine, PATIENCE, use)
    assert (answers[0].status_code, answers[0].json()["reason"]) == (503, "engine_dead")
    assert failed == [1], "once, though it is looked at again and again"
    # answers given before the engine died may be right
    assert {answer.json().get("reason") for answer in answers} <= {"engine_dead", None}


def test_the_time_limit_is_a_number_of_seconds():
    def options(value):
        return Options.parse({"qerl": {"policy_timeout": value}})

    assert options(5).policy_timeout == 5 and Options.parse({}).policy_timeout == 300
    for value in (0, -1, "5", True, float("nan"), float("inf"), None):
        with pytest.raises(ValueError, match=r"qerl\.policy_timeout.* must be a number of seconds above 0"):
            options(value)
