"""Test what dies, stalls or hangs in a server of its own: nothing else hangs, and nothing is left behind."""

import contextlib
import json
import time

import httpx
import psutil
import pytest
from policy_requests import TOKEN, kept
from raw_requests import begin_stream, named_files, send, tree, upload
from waiting import PATIENCE, until

from qerl_vllm_plugin.client import PolicyClient, PolicyRefusedError, body

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def adapter(reference, make_nvfp4, make_adapter):
    """Return the tensors and config of an adapter."""
    return make_adapter(reference(make_nvfp4("qwen2", max_position_embeddings=4096)), r=4)[:2]


@pytest.fixture(scope="module")
def start_server(make_nvfp4, hold_port, tmp_path_factory):
    """start_server(program=None, workers=0, **options) returns a running server. Each of its processes first runs the
    Python code ``program``. ``workers`` adds a process that computes, and ``options`` are the plugin's."""
    from qerl_recipes.machine.serve import command, started

    with contextlib.ExitStack() as servers:

        def start(program=None, workers=0, **options):
            port, folder = hold_port(), tmp_path_factory.mktemp("server")
            line = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy", "--dtype", "float32"]
            line += ["--max-model-len", "2048", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64"]
            line += ["--additional-config", json.dumps({"qerl": {"policy_adapter": {"rank": 8}, **options}})]
            line = command(str(make_nvfp4("qwen2", max_position_embeddings=4096)), line)
            if program is not None:
                (folder / "server.py").write_text(PROGRAM.format(program))
                line[1:3] = [str(folder / "server.py")]
            environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(workers), "VLLM_PLUGINS": "qerl"}
            environment["QERL_ADMIN_TOKEN"] = TOKEN
            return servers.enter_context(started(line, port, folder / "log", environment, seconds=500))

        yield start


PROGRAM = """
from qerl_recipes.machine.environment import prepare

if __name__ in ("__main__", "__mp_main__"):
    prepare()
    {}
if __name__ == "__main__":
    from qerl_recipes.machine.serve import run

    run()
"""


def ask(server, **changes):
    question = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.0, "logprobs": 1, **changes}
    return httpx.post(f"{server.url}/v1/completions", json=question, timeout=PATIENCE)


def health(server):
    return httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code


@pytest.mark.slow
def test_a_body_that_stalls_is_refused_with_its_limit(start_server, adapter):
    server = start_server()
    policy = PolicyClient(server.url, TOKEN)
    before = kept(policy)
    content, start = upload(body(*adapter), 0.5), time.monotonic()
    with send(server.url, "PUT /v1/qerl/policy HTTP/1.1", content) as stalled:
        stalled.settimeout(PATIENCE)
        answer = b"".join(iter(lambda: stalled.recv(4096), b""))  # the server closes the connection
    assert answer.startswith(b"HTTP/1.1 408") and b"the body stalled for 30 s" in answer
    assert time.monotonic() - start >= 30
    assert kept(policy) == before


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_when_the_engine_dies_requests_and_server_end(start_server, adapter, victim):
    server = start_server(workers=int(victim == "worker"))
    processes = tree(server.process)
    used = named_files(processes)
    names = {process.pid: " ".join(process.cmdline()) for process in processes}
    (dies,) = [p for p in processes if ("Worker" if victim == "worker" else "EngineCore") in names[p.pid]]
    with begin_stream(server.url, 1500) as stream:
        stream.settimeout(PATIENCE)
        assert stream.recv(12) == b"HTTP/1.1 200"
        dies.kill()
        while stream.recv(1 << 16):
            pass  # the stream ends
    with contextlib.suppress(httpx.TransportError):  # unless the server has ended already
        assert until(lambda: health(server) == 503)
        with pytest.raises(PolicyRefusedError, match="the engine has died"):
            PolicyClient(server.url, TOKEN).swap(*adapter)
    assert psutil.wait_procs(processes, PATIENCE)[1] == []
    assert [file for file in used if file.exists()] == []


HALF_WAY = """
    from qerl_vllm_plugin.adapter.resident import ResidentAdapter

    commit = ResidentAdapter.commit

    def fail(self, staged):
        commit(self, staged)
        raise RuntimeError("the device is gone")

    ResidentAdapter.commit = fail
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_server_of_half_a_policy_serves_nothing(start_server, adapter, is_busy):
    server = start_server(program=HALF_WAY.strip())
    processes = tree(server.process)
    policy = PolicyClient(server.url, TOKEN)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(begin_stream(server.url, 1500)) for _ in range(2 * is_busy)]
        for stream in streams:
            stream.settimeout(PATIENCE)
            assert stream.recv(12) == b"HTTP/1.1 200"
        with pytest.raises(PolicyRefusedError, match=r"serves nothing any more; restart it.*the device is gone"):
            policy.swap(*adapter)
        if not is_busy:
            assert health(server) == 503
            assert ask(server).status_code == 500
            for use in (lambda: policy.swap(None), policy.state):
                with pytest.raises(PolicyRefusedError, match="the device is gone"):
                    use()
            return
        for stream in streams:
            while stream.recv(1 << 16):
                pass
    assert psutil.wait_procs(processes, PATIENCE)[1] == []


@pytest.mark.slow
def test_an_engine_that_hangs_is_given_up(start_server, adapter):
    server = start_server(policy_timeout=10)
    policy = PolicyClient(server.url, TOKEN)
    (hangs,) = [process for process in tree(server.process) if "EngineCore" in " ".join(process.cmdline())]
    assert policy.swap(*adapter) == 1
    with begin_stream(server.url, 1500) as stream:
        stream.settimeout(PATIENCE)
        assert stream.recv(12) == b"HTTP/1.1 200"
        hangs.suspend()
        start = time.monotonic()
        with pytest.raises(PolicyRefusedError, match="has not answered for 10 s") as refused:
            policy.swap(*adapter)
        assert refused.value.status == 503 and 10 <= time.monotonic() - start < PATIENCE, "300 s is the default"
        while stream.recv(1 << 16):
            pass  # the stream ends
    with contextlib.suppress(httpx.TransportError):  # unless the server has ended
        assert health(server) == 503
        assert ask(server).status_code == 500
    hangs.kill()
    assert psutil.wait_procs(tree(server.process) if server.process.poll() is None else [], PATIENCE)[1] == []
