"""Test faults beside this folder's server: something dies, stalls or runs out of room, and at last the server itself
dies. Nothing hangs, and nothing is left behind. These tests run last, since the last one kills the server."""

import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from policy_requests import API_KEY, MODULES, TOKEN, kept
from raw_requests import begin_stream, head, named_files, send, tree, upload, uploads
from waiting import PATIENCE, until

from qerl_vllm_plugin.client import PolicyClient, PolicyRefusedError, body
from qerl_vllm_plugin.server.token import HEADER

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def another(hf, make_adapter):
    """Return an adapter of a new size, so that the server cannot reuse the file that it has kept."""
    return make_adapter(hf, r=3, target_modules=MODULES)[:2]


def ask(server):
    question = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.0, "logprobs": 1}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    return httpx.post(f"{server[0]}/v1/completions", json=question, headers=headers, timeout=PATIENCE)


def test_a_pusher_killed_in_the_middle_changes_nothing(server, policy, another):
    before, files, content = kept(policy), uploads(server[2]), body(*another)
    program = (
        "import socket, sys\n"
        f"connection = socket.create_connection(('127.0.0.1', {server[0].rsplit(':', 1)[1]}))\n"
        "connection.sendall(sys.stdin.buffer.read())\n"
        "print('sent', flush=True)\n"
        "sys.stdin = open('/dev/zero')\n"
        "sys.stdin.read()\n"
    )
    pusher = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pusher.stdin.write(head("PUT /v1/qerl/policy HTTP/1.1") + upload(content, 0.5))
    pusher.stdin.close()
    assert pusher.stdout.readline() == b"sent\n"
    assert until(lambda: uploads(server[2]) - files), "the body is not received yet: nothing is tested"
    pusher.kill()
    pusher.wait()
    assert until(lambda: uploads(server[2]) <= files)
    assert kept(policy) == before
    assert ask(server).status_code == 200


def test_an_adapter_without_room_is_refused_by_name(server, another):
    policy = PolicyClient(server[0], TOKEN, API_KEY, transport="http")
    before, process = kept(policy), psutil.Process(server[2].pid)
    limits = process.rlimit(resource.RLIMIT_FSIZE)
    process.rlimit(resource.RLIMIT_FSIZE, (4 << 10, limits[1]))  # the kernel refuses writes beyond this size
    try:
        with pytest.raises(
            PolicyRefusedError,
            match=r"/dev/shm is full: File too large; make room there, or give it more \(--shm-size\)",
        ) as refused:
            policy.swap(*another)
    finally:
        process.rlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.status == 507
    assert kept(policy) == before
    assert not uploads(server[2])
    assert policy.swap(*another) == before["version"] + 1


def test_a_client_that_never_reads_holds_nobody_up(server, policy, another):
    before = kept(policy)["version"]
    with begin_stream(server[0], 1000, receive=4096) as silent:
        assert silent.recv(12) == b"HTTP/1.1 200"  # reads no more of the answer
        assert policy.swap(*another, requests="wait") == before + 1
        assert policy.swap(*another, requests="keep") == before + 2
        answer = ask(server)
        assert (answer.status_code, answer.headers["x-qerl-policy-version"]) == (200, str(before + 2))
    assert httpx.get(f"{server[0]}/health", timeout=PATIENCE).status_code == 200


def test_a_killed_server_leaves_no_process_and_no_file(server, adapters):
    processes, files, content = tree(server[2]), uploads(server[2]), body(*adapters[1]["second"])
    assert len(processes) > 1
    streams = begin_stream(server[0], 1000), send(server[0], "PUT /v1/qerl/policy HTTP/1.1", upload(content, 0.5))
    assert until(lambda: uploads(server[2]) - files)
    used = named_files(processes)
    server[2].send_signal(signal.SIGKILL)
    assert psutil.wait_procs(processes, PATIENCE)[1] == []
    assert [file for file in used if file.exists()] == []
    for stream in streams:
        stream.close()


@pytest.mark.slow
def test_a_server_without_its_core_answers_at_once_and_ends(start_server):
    asked = {
        # waits for the end of a stream, which takes longer than the test
        "wait": ("DELETE", "/v1/qerl/policy?requests=wait"),
        "keep": ("DELETE", "/v1/qerl/policy?requests=keep"),
        "abort": ("DELETE", "/v1/qerl/policy?requests=abort&version=9"),
        "noise": ("DELETE", "/v1/qerl/noise"),
        "state": ("GET", "/v1/qerl/state"),
        "vLLM's own": ("POST", "/pause?mode=keep"),
    }
    headers = {"Authorization": f"Bearer {API_KEY}", HEADER: TOKEN}
    with start_server() as running, ThreadPoolExecutor() as threads:

        def call(name):
            method, path = asked[name]
            return threads.submit(httpx.request, method, running.url + path, headers=headers, timeout=PATIENCE)

        with begin_stream(running.url, 4000) as stream:
            assert stream.recv(12) == b"HTTP/1.1 200"
            core = next(process for process in tree(running.process) if "EngineCore" in " ".join(process.cmdline()))
            answers = {"wait": call("wait")}
            assert not until(answers["wait"].done, 1), "nothing is drained, nothing is tested"
            core.suspend()
            answers |= {name: call(name) for name in asked if name != "wait"}
            assert not until(lambda: any(answer.done() for answer in answers.values()), 1)
            core.kill()
            killed = time.monotonic()
            found = {name: answer.result() for name, answer in answers.items()}
            assert time.monotonic() - killed < PATIENCE, "not after 300 s, as from an engine that does not answer"
            assert running.process.wait(PATIENCE) == 1, "a supervisor takes 0 for an end that was asked for"
    assert found.pop("vLLM's own").status_code == 500
    assert {(answer.status_code, answer.json()["reason"]) for answer in found.values()} == {(503, "engine_dead")}
