"""Test the order of the steps of a change on a server. The engine client is a fake that records what it is asked."""

import asyncio
import contextlib
import errno
import json
import os
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from engine_client import EngineClient, vllm_config
from safetensors.torch import load_file, save_file
from waiting import PATIENCE

from qerl_vllm_plugin.client import body
from qerl_vllm_plugin.compat import engine_client
from qerl_vllm_plugin.server import quiesce
from qerl_vllm_plugin.server.changes import PolicyServer
from qerl_vllm_plugin.wire import shared_file
from qerl_vllm_plugin.wire.body import Refused
from qerl_vllm_plugin.wire.shared_segment import Segments
from qerl_vllm_plugin.worker.change_log import ChangeLog

CHANGE = ["pause keep", "empty", "qerl_set_noise", "resume"]


class Engine(EngineClient):
    """A fake engine client. ``is_paused``: somebody else has paused it and waits for requests to end, for ``looks``
    polls. ``empties``: what emptying the caches returns or raises."""

    def __init__(self, *, is_paused=False, looks=0, empties=True, drains=True, carrier="resident"):
        super().__init__()
        self.asked, self.emptied, self._log, self._looks = [], [], ChangeLog(), looks
        self._paused, self._empties, self._drains, self._carrier = is_paused, empties, drains, carrier
        self.path = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def is_paused(self):
        return self._paused

    async def call_utility_async(self, method):
        assert method == "has_work"
        self._looks -= 1
        self.asked += [method] if self._looks >= 0 else []
        return self._looks >= 0

    async def pause_scheduler_async(self, mode, clear_cache):
        assert not clear_cache, "its own emptying is not checked"
        self.asked.append(f"pause {mode}")
        self._paused = True
        if mode == "wait" and not self._drains:
            await asyncio.sleep(60)

    async def reset_prefix_cache(self, **options):
        self.asked.append("empty")
        self.emptied.append(options)
        if isinstance(self._empties, Exception):
            raise self._empties
        return self._empties

    async def resume_scheduler_async(self):
        self._paused = False
        self.asked.append("resume")

    async def collective_rpc(self, method, args):
        if method == "qerl_swap":
            self.path = args[0]
        await asyncio.sleep(0.05)
        await self.answers.wait()
        if method not in ("qerl_open", "qerl_state"):
            self.asked.append(method)
        opened = {"carrier": self._carrier, "max_rank": 8, "max_bytes": 1, "gpus": [], "version": 0, "hash": ""}
        return [{**opened, "instance": f"order-{id(self)}", "changes": self._log.path}]


def with_server(engine, use, *, connector=None, api_servers=1):
    """Return or raise what ``use(server)`` does on a server of that engine."""

    async def run():
        server = PolicyServer()
        config = vllm_config(api_servers, connector)
        await server.open(engine, config, None, None, 60)
        return await use(server)

    return asyncio.run(run())


def change(server, mode="keep"):
    return server.set_noise(0.1, 1, 0, [], mode)


async def until(holds):
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.01)


async def asked(engine, expected):
    """Wait until the engine was asked for what is ``expected``, and perhaps for more."""
    await until(lambda: engine.asked[: len(expected)] == expected)


@pytest.mark.parametrize("connector", [None, object()])
def test_promise_05_nothing_runs_between_emptying_and_change(connector):
    engine = Engine()
    with_server(engine, change, connector=connector)
    assert engine.asked == CHANGE
    assert engine.emptied == [{"reset_running_requests": True, "reset_connector": connector is not None}]


@pytest.mark.parametrize("empties", [False, RuntimeError("the store does not answer")])
def test_a_cache_that_is_not_empty_is_a_refusal(empties):
    engine = Engine(empties=empties)
    with pytest.raises(Refused, match="could not") as refused:
        with_server(engine, change)
    assert (refused.value.status, refused.value.reason) == (503, "cannot_reset")
    assert engine.asked == ["pause keep", "empty", "resume"]


@pytest.mark.parametrize("api_servers", [1, 2])
@pytest.mark.parametrize("under_way", [{}, {"a": SimpleNamespace(is_prefilling=True)}])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_last_outputs_are_waited_for_only_if_there_are_any(mode, under_way, api_servers, monkeypatch):
    engine, slept, sleep = Engine(), [], asyncio.sleep
    monkeypatch.setattr(engine_client, "LAST_OUTPUTS", 0.0217)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *_: slept.append(seconds) or sleep(seconds))
    engine.output_processor.request_states = under_way
    with_server(engine, lambda server: change(server, mode), api_servers=api_servers)
    may_end = mode != "keep" and (bool(under_way) or api_servers > 1)
    assert (slept.count(0.0217), engine.asked) == (int(may_end), [f"pause {mode}", *CHANGE[1:]])
    # only "keep" lets requests begin anew
    assert [options["reset_running_requests"] for options in engine.emptied] == [mode == "keep"]


def test_an_engine_that_somebody_else_has_paused_stays_so():
    engine = Engine(is_paused=True)
    with_server(engine, change)
    assert engine.asked == CHANGE[1:3]


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_change_waits_for_requests_of_others(mode):
    engine = Engine(is_paused=True, looks=2)
    with_server(engine, lambda server: change(server, mode))
    assert engine.asked == ["has_work", "has_work", *CHANGE[1:3]]


def test_an_abort_waits_for_nobody_and_leaves_the_pause():
    engine = Engine(is_paused=True, looks=1)
    with_server(engine, lambda server: change(server, "abort"))
    assert engine.asked == ["has_work", "pause abort", "pause abort", *CHANGE[1:3]]


@pytest.mark.parametrize(("mode", "limit"), [("keep", "LINE"), ("wait", "DRAIN")])
def test_requests_of_others_are_waited_for_so_long(mode, limit, monkeypatch):
    monkeypatch.setattr(quiesce, limit, 0.05)
    engine = Engine(is_paused=True, looks=1000)
    with pytest.raises(Refused, match=r"not made after 0 s, and nothing.*or with requests=abort") as refused:
        with_server(engine, lambda server: change(server, mode))
    assert (refused.value.status, refused.value.reason) == (503, "busy")
    assert set(engine.asked) == {"has_work"}, "nothing is emptied, and who has paused it resumes it"


def test_a_lost_engine_is_waited_for_no_longer():
    async def give_up(server):
        waits = asyncio.create_task(change(server))
        await asked(engine, ["has_work"])
        server._engine.lose("half of a policy")
        await asyncio.wait_for(waits, PATIENCE)

    with pytest.raises(Refused, match="half of a policy") as refused:
        with_server(engine := Engine(is_paused=True, looks=10**9), give_up)
    assert refused.value.reason == "lost" and set(engine.asked) == {"has_work"}


def test_requests_stopped_half_way_cannot_be_waited_for():
    engine = Engine(is_paused=True)
    engine.output_processor.request_states = {"a": SimpleNamespace(is_prefilling=False)}
    with pytest.raises(Refused, match="call /resume first") as refused:
        with_server(engine, lambda server: change(server, "wait"))
    assert (refused.value.status, refused.value.reason) == (503, "still_running")
    assert engine.asked == []


def test_requests_that_do_not_end_go_on(monkeypatch):
    monkeypatch.setattr(quiesce, "DRAIN", 0.05)
    engine = Engine(drains=False)
    with pytest.raises(Refused, match="use requests=keep or abort") as refused:
        with_server(engine, lambda server: change(server, "wait"))
    assert (refused.value.status, refused.value.reason) == (503, "still_running")
    assert engine.asked == ["pause wait", "resume"]


@pytest.mark.parametrize("carrier", ["lora", None])
def test_without_the_resident_adapter_there_is_nothing_to_swap(carrier):
    engine = Engine(carrier=carrier)
    with pytest.raises(Refused, match="no resident adapter; start it with") as refused:
        with_server(engine, lambda server: server.swap(None, {}, "", None, "keep"))
    assert (refused.value.status, refused.value.reason) == (409, "no_carrier")
    assert engine.asked == []


@pytest.mark.parametrize(("carrier", "is_stamped"), [("resident", True), (None, True), ("lora", False)])
def test_answers_of_adapters_in_slots_name_no_version(carrier, is_stamped):
    """Check which carriers get a version. Answers of LoRA slots depend on the adapter that the request names, not on
    the policy. Noise makes them answers of no adapter."""
    engine = Engine(carrier=carrier)

    async def opened(server):
        return engine.output_processor.add_request

    assert (with_server(engine, opened) is not None) == is_stamped


def test_a_change_ends_though_its_caller_has_gone():
    engine = Engine()

    async def leave(server):
        engine.answers.clear()
        caller = asyncio.create_task(change(server))
        await asked(engine, CHANGE[:2])
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert engine.asked == CHANGE[:2], "it is half-way"
        engine.answers.set()
        await asked(engine, CHANGE)

    with_server(engine, leave)
    assert engine.asked == CHANGE


@pytest.mark.parametrize(("reason", "is_given_back"), [("refused", True), ("lost", False)])
def test_a_refused_adapter_gives_its_memory_back(reason, is_given_back):
    """Check that memory is kept where the engine has not answered. A worker that still reads it would die (SIGBUS)."""

    async def refuse(server):
        with contextlib.suppress(Refused), server.segments.filled({"x": torch.ones(4)}) as path:
            number = os.open(path, os.O_RDONLY)  # as a worker that keeps the file mapped
            raise Refused(422, reason, "it holds NaN")
        size = os.fstat(number).st_size
        os.close(number)
        return size

    assert (with_server(Engine(), refuse) == 0) == is_given_back


async def in_pieces(content):
    yield content[:100]
    yield content[100:]


@pytest.fixture
def with_routes(client_of, tmp_path):
    """with_routes(engine, use) returns what ``use(server, client)`` returns; the client calls the server's routes. The
    folder ``first`` can be installed, and its only tensor is ``x``."""
    (tmp_path / "first").mkdir()
    save_file({"x": torch.ones(4)}, tmp_path / "first" / "adapter_model.safetensors")
    (tmp_path / "first" / "adapter_config.json").write_text("{}")

    def run(engine, use):
        async def with_client(server):
            server._folders, server.limit = tmp_path, 1 << 20
            async with client_of(server) as client:
                return await use(server, client)

        return with_server(engine, with_client)

    return run


@contextlib.contextmanager
def named_file(tensors):
    with Segments(Refused).filled(tensors, {"adapter_config": "{}"}) as path:
        content = json.dumps({"file": shared_file.ticket(path)}).encode()
        yield {"headers": {"Content-Type": shared_file.MEDIA_TYPE}, "content": content}


def sent(way):
    """Return a context with the request that sends the tensor ``x`` of ones in this way."""
    tensors = {"x": torch.ones(4)}
    if way == "folder":
        return contextlib.nullcontext({"params": {"folder": "first"}})
    if way == "file":
        return named_file(tensors)
    return contextlib.nullcontext({"content": body(tensors, {}) if way == "body" else in_pieces(body(tensors, {}))})


@pytest.mark.parametrize("way", ["folder", "body", "pieces", "file"])
def test_what_a_change_reads_stays_until_its_end(way, with_routes):
    """Check that the file stays open. Otherwise its descriptor number could be reused for the next file."""
    engine = Engine()

    async def leave(server, client):
        engine.answers.clear()
        with sent(way) as call:
            caller = asyncio.create_task(client.put("policy", **call))
            await until(lambda: engine.path)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
        assert load_file(engine.path)["x"].equal(torch.ones(4))
        engine.answers.set()
        await asked(engine, ["pause keep", "empty", "qerl_swap", "resume"])
        await until(lambda: way != "file" or not os.path.exists(engine.path))

    with_routes(engine, leave)


async def cut_off():
    yield body({"x": torch.ones(4)}, {})
    yield bytes(2 << 20)  # more than the server takes


@pytest.mark.parametrize("content", [lambda: in_pieces(body({"x": torch.ones(4)}, {})), cut_off])
def test_other_requests_go_on_while_the_rest_of_an_uploads_memory_is_freed(content, monkeypatch, with_routes):
    freed, truncate = [], os.ftruncate

    def noted(number, size):
        freed.append((threading.get_ident() == here, os.fstat(number).st_size - size))
        truncate(number, size)

    async def put(server, client):
        await client.put("policy", content=content())

    here = threading.get_ident()
    monkeypatch.setattr(os, "ftruncate", noted)
    with_routes(Engine(), put)
    assert [is_here for is_here, size in freed if size > 1 << 19] == [False]


@pytest.mark.parametrize("way", ["body", "pieces", "folder"])
@pytest.mark.parametrize("is_filled_later", [False, True])
def test_shared_memory_without_room_is_a_refusal_by_name(way, is_filled_later, monkeypatch, with_routes):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = Engine()
    if is_filled_later:
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(shared_file, "fits", lambda size: False)

    async def put(server, client):
        with sent(way) as call:
            return await client.put("policy", **call)

    answer = with_routes(engine, put)
    assert (answer.status_code, answer.json()["reason"]) == (507, "no_room")
    said = "is full: No space left on device" if is_filled_later else r"has no room for \d+ bytes"
    assert re.fullmatch(rf"/dev/shm {said}; make room there, or give it more \(--shm-size\)", answer.json()["error"])
    assert engine.asked == []
