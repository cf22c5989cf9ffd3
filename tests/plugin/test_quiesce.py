"""Test changes while somebody else calls the engine by vLLM's own API. The engine core is a fake that pauses as vLLM's
does."""

import asyncio
import multiprocessing
import os
import random
import re
import time

import pytest
from engine_core import begun, has_rest, noise, said, until, with_servers
from vllm.v1.engine.exceptions import EngineDeadError
from waiting import PATIENCE

from qerl_vllm_plugin.server import quiesce
from qerl_vllm_plugin.server.changes import MODES
from qerl_vllm_plugin.server.quiesce import lock
from qerl_vllm_plugin.wire.body import Refused
from qerl_vllm_plugin.worker.change_log import ChangeLog

CALLS = {
    "keep": lambda client: client.pause_generation(mode="keep", clear_cache=True),
    "wait": lambda client: client.pause_generation(mode="wait"),
    "abort": lambda client: client.pause_generation(),
    "sleep": lambda client: client.sleep(1, "keep"),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_pause_in_a_change_holds_after_it(call, place):
    async def use(core, *servers):
        begun(core, servers[0])
        changed = asyncio.create_task(noise(servers[0]))
        await said(core, "pause keep")
        paused = asyncio.create_task(CALLS[call](servers[place].client))
        await changed
        if call == "wait":
            await said(core, "pause wait")
            await has_rest(core)
            assert not paused.done(), "the request goes on until its end, as they asked"
            await core.end()
        await paused
        assert await servers[0].client.is_paused()
        mode = {"sleep": "keep"}.get(call, call)
        assert core.said == ["pause keep", "change", "resume", f"pause {mode}"]
        await core.end()
        await noise(servers[0])
        assert await servers[0].client.is_paused() and "resume" not in core.said[4:]
        await (servers[place].client.wake_up() if call == "sleep" else servers[place].client.resume_generation())
        await noise(servers[1])
        assert core.said[-3:] == ["pause keep", "change", "resume"]

    with_servers(use)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_pause_while_a_change_drains_holds_as_asked(call, place):
    async def use(core, *servers):
        begun(core, servers[0])
        changed = asyncio.create_task(noise(servers[0], "wait"))
        await said(core, "pause wait")
        paused = asyncio.create_task(CALLS[call](servers[place].client))
        if call == "wait":
            await said(core, "pause wait", 2)
            await core.end()
        await paused
        if call in ("keep", "sleep"):
            with pytest.raises(Refused, match="engine was paused with requests running") as refused:
                await changed
            assert refused.value.reason == "still_running" and core.state == "stands still"
        else:
            await changed
            assert core.said[-1] == "change"
        assert await servers[0].client.is_paused() and "resume" not in core.said
        await servers[place].client.resume_generation()
        await core.end()
        await noise(servers[1], "wait")
        assert core.said[-2:] == ["change", "resume"]

    with_servers(use)


def test_preempted_requests_go_on_before_a_change_that_waits():
    """Let the engine drain while a request that has begun remains, since it found no room in the KV cache."""

    async def use(core, server):
        begun(core, server)
        inner, rounds = core.resume, []

        async def put_back(mode):
            core.said.append(f"pause {mode}")
            core.running, core.state = 0, "lets requests end"

        async def resume():
            rounds.append(len(rounds))
            await inner()
            if len(rounds) == 2:  # in the second round the request has room and ends
                server.client.output_processor.request_states.clear()

        core.pause, core.resume = put_back, resume
        await noise(server, "wait")
        assert core.said == ["pause wait", "resume", "pause wait", "resume", "pause wait", "change", "resume"]

    with_servers(use, 1)


def test_a_resumption_in_a_change_waits_for_its_end():
    async def use(core, *servers):
        await servers[1].client.pause_generation(mode="keep")
        core.running, core.said = 1, []
        changed = asyncio.create_task(noise(servers[0]))
        await until(lambda: core.is_changing)
        await servers[1].client.resume_generation()
        await changed
        assert core.said == ["change", "resume"]

    with_servers(use)


def test_an_engine_that_goes_on_by_itself_is_not_left_paused():
    """Resume the engine past the API servers, by a call that none of them sees."""

    async def use(core, *servers):
        await servers[0].client.pause_generation(mode="keep")
        await core.resume()
        await noise(servers[1])
        assert core.state == "goes on"

    with_servers(use)


def test_a_pause_that_fails_leaves_nothing_behind():
    async def use(core, *servers):
        async def fail(mode, clear_cache):
            raise ValueError(f"Invalid pause mode: {mode}")

        servers[0].client.pause_scheduler_async = fail
        with pytest.raises(ValueError, match="Invalid pause mode"):
            await servers[0].client.pause_generation(mode="x")
        assert not core.log.is_paused

    with_servers(use)


def test_a_drain_that_fails_fails_the_change():
    async def use(core, server):
        begun(core, server)
        inner = core.pause

        async def fail(mode):
            core.pause = inner
            await inner(mode)
            raise RuntimeError("no longer draining")

        core.pause = fail
        changed = asyncio.create_task(noise(server, "wait"))
        await said(core, "pause wait")
        await core.end()
        with pytest.raises(RuntimeError, match="no longer draining"):
            await changed
        assert core.said == ["pause wait", "resume"]

    with_servers(use, 1)


def test_behind_a_change_that_waits_others_are_refused_in_time(monkeypatch):
    monkeypatch.setattr(quiesce, "LINE", 0.1)

    async def use(core, *servers):
        begun(core, servers[0])
        changed = asyncio.create_task(noise(servers[0], "wait"))
        await said(core, "pause wait")
        for server, obstacle in zip(
            servers,
            (
                r"another change \(noise, requests=wait\) has been under way for \d+ s",
                "a change that another API server",
            ),
            strict=True,
        ):
            assert (await server.state())["version"] == 0 and not changed.done()
            with pytest.raises(Refused, match=f"not made after 0 s.*{obstacle}.*requests=abort") as refused:
                await server.swap(None, {}, "", 1, "keep")
            assert (refused.value.status, refused.value.reason) == (503, "busy")
        await core.end()
        await changed
        assert core.said == ["pause wait", "change", "resume"]

    with_servers(use)


@pytest.mark.parametrize("place", [0, 1])
def test_an_abort_cuts_a_drain_short(place):
    async def use(core, *servers):
        begun(core, servers[0])
        changed = asyncio.create_task(servers[0].swap(None, {}, "earlier", None, "wait"))
        await said(core, "pause wait")
        await servers[place].swap(None, {}, "later", None, "abort")
        await changed
        assert core.digest == "later", "changes are made in the order in which they came"
        assert core.said.count("change") == 2 and core.said[-1] == "resume" and core.state == "goes on"

    with_servers(use)


def test_a_change_behind_a_foreign_drain_keeps_nobody_out():
    async def use(core, *servers):
        begun(core, servers[0])
        drained = asyncio.create_task(servers[0].client.pause_generation(mode="wait"))
        await said(core, "pause wait")
        waits = [asyncio.create_task(noise(server)) for server in servers]
        await until(lambda: all(core.looks[server.client] > 1 for server in servers))
        assert not any(wait.done() for wait in waits)
        await servers[1].swap(None, {}, "", None, "abort")
        await asyncio.gather(*waits, drained)
        assert core.said.count("change") == 3 and "resume" not in core.said

    with_servers(use)


@pytest.mark.parametrize("somebody", ["drains", "is in the line", "nobody"])
def test_a_change_whose_caller_has_gone_is_not_made(somebody):
    async def is_gone():
        return True

    async def use(core, *servers):
        begun(core, servers[0])
        if somebody == "drains":
            other = asyncio.create_task(servers[0].client.pause_generation(mode="wait"))
        else:
            other = asyncio.create_task(noise(servers[0], "wait") if somebody == "is in the line" else asyncio.sleep(0))
        if somebody != "nobody":
            await said(core, "pause wait")
        with pytest.raises(Refused, match="the caller has gone") as refused:
            await noise(servers[1], "wait", is_gone=is_gone)
        assert refused.value.reason == "gone" and "change" not in core.said
        await core.end()
        await other
        assert (core.state == "goes on") == (somebody != "drains")

    with_servers(use)


def test_a_change_gone_from_the_line_leaves_another_to_drain():
    """The first change had paused the engine itself before somebody else did. After that pause it no longer owes
    anybody a resumption."""

    async def use(core, *servers):
        has_left, may_end, pause = asyncio.Event(), asyncio.Event(), core.pause

        async def is_gone():
            if servers[0]._quiesce._made is None and "resume" in core.said:  # it is no longer first in the line
                has_left.set()
                await may_end.wait()
            return has_left.is_set()

        async def put_back(mode):
            core.said.append(f"pause {mode}")
            core.running, core.state, core.pause = 0, "lets requests end", pause

        begun(core, servers[0])
        core.pause = put_back  # the request found no room in the KV cache
        first = asyncio.create_task(noise(servers[0], "wait", is_gone=is_gone))
        await said(core, "resume")
        core.running = 1
        paused = asyncio.create_task(servers[0].client.pause_generation(mode="wait"))
        await has_left.wait()
        await servers[0].client.resume_generation()
        second = asyncio.create_task(noise(servers[1], "wait"))
        await said(core, "pause wait", 3)  # the second change has the line and lets requests end
        may_end.set()
        with pytest.raises(Refused, match="the caller has gone"):
            await first
        assert core.state == "lets requests end" and not second.done()
        await core.end()
        await asyncio.gather(second, paused)
        assert core.said == [*("pause wait", "resume") * 2, "pause wait", "change", "resume"]

    with_servers(use)


def test_a_version_served_meanwhile_is_told_as_before():
    async def use(core, *servers):
        swaps = [("a", 1), ("a", 1), ("b", 1), ("c", 2)]  # in any order: one of the first three comes too late
        made = (servers[i % 2].swap(None, {}, digest, version, "keep") for i, (digest, version) in enumerate(swaps))
        return core, await asyncio.gather(*made, return_exceptions=True)

    core, found = with_servers(use)
    refused = [answer for answer in found if isinstance(answer, Refused)]
    assert {(error.status, error.reason) for error in refused} <= {(409, "stale_version")}
    unchanged = [answer for answer in found if not isinstance(answer, Refused) and answer.get("unchanged")]
    assert core.said.count("change") + len(refused) + len(unchanged) == 4 and core.version == 2
    assert refused and all(set(answer) == {"version", "unchanged"} for answer in unchanged)
    assert all(re.search("is not newer", str(error)) for error in refused)


@pytest.mark.parametrize("seed", range(3))
def test_many_changes_at_once_each_find_the_engine_at_rest(seed):
    """Mix changes in every mode from two servers with requests that come and end, and with vLLM's own pauses."""
    chance, made = random.Random(seed), []

    async def change(server):
        for _ in range(6):
            await asyncio.sleep(chance.random() / 50)
            await noise(server, chance.choice(MODES))
            made.append(server)

    async def requests(core, servers):
        while len(made) < 24:
            await asyncio.sleep(0.01)
            if core.state == "goes on":
                begun(core, chance.choice(servers))
            await asyncio.sleep(0.01)
            if core.state != "stands still":
                await core.end()

    async def pauses(servers):
        while len(made) < 20:
            await asyncio.sleep(0.05)
            client = chance.choice(servers).client
            await client.pause_generation(mode=chance.choice(["wait", "abort"]))
            await client.resume_generation()

    async def use(core, *servers):
        core.seconds = 0.005
        changes = [change(server) for server in servers for _ in range(2)]
        await asyncio.gather(*changes, requests(core, servers), pauses(servers))
        assert core.said.count("change") == len(made) == 24
        assert core.state == "goes on" and not any(server._quiesce._made for server in servers)

    with_servers(use)


def test_one_process_at_a_time_holds_the_lock():
    ours, another = (f"test-{os.getpid()}-{name}" for name in "ab")  # lock names are shared by the whole machine
    fork = multiprocessing.get_context("fork")
    held = fork.Event()

    async def hold():
        async with lock(ours):
            held.set()
            time.sleep(600)

    async def wait(name, seconds):
        async with asyncio.timeout(seconds), lock(name):
            return time.monotonic()

    holder = fork.Process(target=lambda: asyncio.run(hold()), daemon=True)
    holder.start()
    assert held.wait(PATIENCE)
    asyncio.run(wait(another, PATIENCE))
    with pytest.raises(TimeoutError):
        asyncio.run(wait(ours, 0.3))
    holder.kill()
    holder.join()
    asyncio.run(wait(ours, PATIENCE))
    asyncio.run(wait(ours, PATIENCE))


def test_an_engine_lost_to_one_api_server_is_lost_to_all(monkeypatch):
    monkeypatch.setattr("qerl_vllm_plugin.server.engine.LOOK", 0.01)
    errors = []

    async def use(core, server, other):
        server.client.output_processor.propagate_error = errors.append
        await noise(server)
        ChangeLog(core.log.path).lose()  # as another process does
        await until(lambda: errors)
        with pytest.raises(Refused, match="another API server's log says why"):
            await noise(server)
        with pytest.raises(EngineDeadError):
            await server.client.check_health()
        assert len(errors) == 1 and core.said.count("change") == 1

    with_servers(use)
