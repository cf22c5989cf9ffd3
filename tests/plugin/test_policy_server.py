"""Test what a server reports of its policy, which versions and folders it accepts, and what it counts. The engine is a
fake."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_client import EngineClient, vllm_config
from policy_requests import TOKEN
from starlette.requests import Request
from vllm.v1.engine.exceptions import EngineDeadError

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.adapter.folder import base_hash
from qerl_vllm_plugin.server import metrics, routes
from qerl_vllm_plugin.server.changes import PolicyServer
from qerl_vllm_plugin.server.engine import Engine
from qerl_vllm_plugin.server.quiesce import is_there
from qerl_vllm_plugin.wire import body, shared_file, timing
from qerl_vllm_plugin.wire.body import Refused
from qerl_vllm_plugin.wire.gpu_memory import MEDIA_TYPE
from qerl_vllm_plugin.worker.change_log import ChangeLog

BASE = Path(__file__).parents[1] / "fixtures/llmcompressor/qwen2-nvfp4"
OPENED = {"carrier": "resident", "max_rank": 8, "max_bytes": 99, "gpus": ["a-gpu"], "version": 5}
SERVED = {"version": 5, "hash": "five", "sigma": 0.1, "seed": 2, "rollout": 3, "targets": ["norm"]}


class Client(EngineClient):
    """A fake engine client that serves version 5 with the digest ``five``. ``changes`` records what it was told to
    change."""

    def __init__(self):
        super().__init__()
        self.log, self.changes, self.served = ChangeLog(), [], dict(SERVED)

    async def is_paused(self):
        return bool(self.changes) and self.changes[-1] == "pause"

    async def call_utility_async(self, method):
        return False

    async def pause_scheduler_async(self, mode, clear_cache):
        self.changes.append("pause")

    async def resume_scheduler_async(self):
        self.changes.append("resume")

    async def reset_prefix_cache(self, **options):
        return True

    async def collective_rpc(self, method, args):
        if method == "qerl_open":
            return [{**OPENED, "instance": f"server-{id(self)}", "changes": self.log.path}]
        if method == "qerl_state":
            return [self.served]
        self.changes.append((method, args))
        self.changes.append("pause")  # the engine is still paused
        return [{"version": 6, "parts": {"receive": 0.01, "commit": 0.02}}]


def with_server(use, base=None, folders=None):
    async def run():
        server, client = PolicyServer(), Client()
        config = vllm_config(drafts=SimpleNamespace(method="ngram"))
        config.model_config.dtype = "torch.bfloat16"
        await server.open(client, config, base, folders, 60)
        return await use(server, client)

    return asyncio.run(run())


@pytest.mark.parametrize("base", [BASE, None])
def test_the_state_is_what_is_served_and_on_what(base):
    async def use(server, client):
        first = await server.state()
        assert metrics.VERSION._value.get() == 5, "before the first change, too"
        client.served |= {"hash": "", "version": 0}
        return first, await server.state()

    state, without = with_server(use, base)
    instance = state.pop("instance")
    assert instance.startswith("server-") and state.pop("counters").keys() == {"swaps", "refusals", "seconds", "bytes"}
    assert state == {
        "version": 5,
        "changes": 0,
        "paused": False,
        "hash": "five",
        "noise": {"sigma": 0.1, "seed": 2, "rollout": 3, "targets": ["norm"]},
        "max_rank": 8,
        "max_bytes": 99,
        "base": None if base is None else str(BASE),
        "base_hash": None if base is None else base_hash(BASE),
        "carrier": "resident",
        "quantization": "qerl_nvfp4",
        "dtype": "bfloat16",
        "logprobs_mode": "",
        "max_model_len": 8,
        "speculative": "ngram",
        "machine": shared_file.machine(),
        "gpus": ["a-gpu"],
    }
    assert without["hash"] is None and without["version"] == 0


@pytest.mark.parametrize(
    ("version", "digest", "expected"),
    [
        (5, "five", "unchanged"),  # the same change again, as after a lost answer
        (5, "other", "stale"),
        (4, "five", "stale"),
        (4, "other", "stale"),
        (6, "five", "changed"),
        (None, "five", "changed"),
    ],
)
def test_a_version_is_newer_or_the_one_that_is_served_already(version, digest, expected):
    async def use(server, client):
        try:
            answer = await server.swap("/path", {"r": 2**70}, digest, version, "keep")
        except Refused as refused:
            answer = refused
        return answer, client.changes

    answer, changes = with_server(use)
    if expected == "changed":
        content = json.dumps({"r": 2**70})
        assert changes[1] == ("qerl_swap", ("/path", content, "/path", False, version, digest))
        assert answer["version"] == 6 and "unchanged" not in answer
        return
    assert changes == []
    if expected == "unchanged":
        assert answer == {"version": 5, "unchanged": True}
    else:
        assert (answer.status, answer.reason) == (409, "stale_version")
        assert str(answer) == f"version {version} is not newer than 5, which is served"


def test_the_parts_of_a_change_are_all_of_its_seconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def taking(seconds, call):
        def slowly(*args, **keywords):
            clock[0] += seconds
            return call(*args, **keywords)

        return slowly

    async def use(server, client):
        before = metrics.counted()
        client.pause_scheduler_async = taking(1.0, client.pause_scheduler_async)
        client.reset_prefix_cache = taking(2.0, client.reset_prefix_cache)
        client.collective_rpc = taking(4.0, client.collective_rpc)
        client.resume_scheduler_async = taking(8.0, client.resume_scheduler_async)
        swap = await server.swap(None, {}, "", None, "keep")
        noise = await server.set_noise(0.1, 1, 2, [], "keep")
        return before, swap, noise, metrics.counted()

    before, swap, noise, after = with_server(use)
    of_worker = {"receive": 0.01, "commit": 0.02}
    for answer in (swap, noise):
        assert answer["parts"] == {"pause": 1.0, "empty": 2.0, "way": 3.97, "resume": 8.0, **of_worker}
        assert answer["seconds"] == 15.0, "each part is counted once"
    for kind in ("swap", "noise"):
        assert after["swaps"][kind] == before["swaps"].get(kind, 0) + 1
    assert after["seconds"] - before["seconds"] == pytest.approx(30.0, abs=1e-3)
    assert metrics.VERSION._value.get() == 6


def test_an_adapter_on_its_gpu_is_counted_by_its_size(monkeypatch):
    async def described(request, limit, held):
        return body.Upload("where it lies", "digest", 7_000, {}, {})

    async def use(server, client):
        before = metrics.counted()["bytes"]
        request = Request({"type": "http", "query_string": b"", "headers": [(b"content-type", MEDIA_TYPE.encode())]})
        monkeypatch.setattr(request, "is_disconnected", is_there)
        answer = await routes.put_policy(server, request)
        return answer["version"], metrics.counted()["bytes"] - before

    monkeypatch.setattr(body, "described", described)
    assert with_server(use) == (6, 7_000)


def test_a_folder_is_one_of_the_directory_and_of_this_base(tmp_path):
    folders = tmp_path / "adapters"
    for name, hashed in (("plain", None), ("ours", base_hash(BASE)), ("theirs", "0" * 64)):
        (folders / name).mkdir(parents=True)
        if hashed is not None:
            (folders / name / "qerl_state.json").write_text(json.dumps({"base": name, "base_hash": hashed}))
    (folders / "file").write_text("")
    (folders / "plain/deeper").mkdir()
    (tmp_path / "outside").mkdir()
    (folders / "link").symlink_to(tmp_path / "outside")
    (folders / "loop").symlink_to(folders / "loop")
    absent = ("file", "absent", "plain/deeper", "../outside", "link", "loop", "", ".", str(folders), "x" * 300, "\0")

    async def use(server, client):
        found = {}
        for name in ("plain", "ours", *absent):
            try:
                found[name] = server.folder(name)
            except Refused as refused:
                found[name] = (refused.status, refused.reason)
        with pytest.raises(AdapterError, match=r"was trained on another base \(theirs\)"):
            server.folder("theirs")
        return found

    found = with_server(use, BASE, str(folders))
    assert found.pop("plain") == folders / "plain" and found.pop("ours") == folders / "ours"
    assert set(found.values()) == {(404, "no_folder")} and len(found) == len(absent)

    async def theirs(server, client):
        return server.folder("theirs")

    assert with_server(theirs, None, str(folders)) == folders / "theirs", "there is nothing to compare with"
    with pytest.raises(Refused, match=r"was started without \"qerl.policy_folders\"; send the adapter") as refused:
        with_server(theirs)
    assert (refused.value.status, refused.value.reason) == (404, "no_folders")


RANKS = {"error": "another rank refused", "unreachable": False}


@pytest.mark.parametrize(
    ("answers", "status", "reason"),
    [
        ([{"error": "a shape"}, RANKS], 422, "refused"),
        ([RANKS, {"error": "no GPU", "unreachable": True}], 422, "unreachable"),
        ([{"error": "older", "stale": True}, RANKS], 409, "stale_version"),
        ([{"error": "half of it", "lost": True}, {"version": 3}], 503, "lost"),
    ],
)
def test_a_rank_refuses_for_all_and_half_a_policy_is_lost(answers, status, reason):
    async def run():
        async def collective_rpc(method, args):
            return answers

        engine = Engine(SimpleNamespace(collective_rpc=collective_rpc), 60)
        with pytest.raises(Refused) as refused:
            await engine.rpc("qerl_swap")
        assert (refused.value.status, refused.value.reason) == (status, reason)
        assert (engine.lost is not None) == (reason == "lost") and not engine.is_silent
        if engine.lost is not None:
            with pytest.raises(Refused, match="half of it"):
                await engine.rpc("qerl_state")
            answers[:] = [{"version": 3}]
            with pytest.raises(Refused, match="half of it"):
                engine.check()

    asyncio.run(run())


@pytest.fixture
def ask(client_of):
    """ask(state) returns the answer of GET /state, where the server's state returns ``state`` or raises it."""

    def get(given, token=TOKEN):
        async def state():
            if isinstance(given, Exception):
                raise given
            return given

        async def run():
            async with client_of(SimpleNamespace(state=state), token) as client:
                return await client.get("state")

        return asyncio.run(run())

    return get


def test_a_refusal_is_counted_and_ends_the_connection(ask):
    before = metrics.counted()["refusals"]
    answers = {
        "unauthorized": (ask({}, "another-token-of-32-characters!!"), 401),
        "busy": (ask(Refused(503, "busy", "later")), 503),
        "engine_dead": (ask(EngineDeadError()), 503),
    }
    after = metrics.counted()["refusals"]
    for reason, (answer, status) in answers.items():
        assert (answer.status_code, answer.json()["reason"], answer.headers["connection"]) == (status, reason, "close")
        assert after[reason] == before.get(reason, 0) + 1
    assert "the engine has died; restart the server" in answers["engine_dead"][0].json()["error"]
    good = ask({"version": 5})
    assert (good.status_code, good.json()) == (200, {"version": 5}) and "connection" not in good.headers
    with pytest.raises(KeyError):  # vLLM answers and logs such an error
        ask(KeyError("a bug"))
