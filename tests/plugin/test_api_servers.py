"""Test two API server processes on one port: either can change the policy, and both know the change."""

import concurrent.futures
import contextlib
import json

import httpx
import psutil
import pytest
from waiting import PATIENCE

from qerl_vllm_plugin.client import PolicyClient

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
TOKEN = "an-admin-token-of-32-characters!"
MODULES = ["q_proj", "v_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def adapters(reference, make_nvfp4, make_adapter):
    hf = reference(make_nvfp4("qwen2", max_position_embeddings=4096))
    return [make_adapter(hf, seed=seed, target_modules=MODULES, r=4)[:2] for seed in (1, 2)]


@pytest.fixture(scope="module")
def server(make_nvfp4, hold_port, tmp_path_factory):
    from qerl_recipes.machine.serve import command, started

    port, folder = hold_port(), tmp_path_factory.mktemp("server")
    line = ["--api-server-count", "2", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy"]
    line += ["--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64"]
    line += ["--additional-config", json.dumps({"qerl": {"policy_adapter": {"rank": 8}}})]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "qerl", "QERL_ADMIN_TOKEN": TOKEN}
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # serves vLLM's own /pause and /resume
    line = command(str(make_nvfp4("qwen2", max_position_embeddings=4096)), line)
    with started(line, port, folder / "log", environment, seconds=500) as running:
        yield running


def ask(server, tokens=6, client=httpx):
    """Return the log-probability of an answer and the version that it names. Each new connection reaches a random
    process."""
    question = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0.0, "logprobs": 1}
    answer = client.post(f"{server.url}/v1/completions", json={**question, "ignore_eos": True}, timeout=PATIENCE)
    scores = answer.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"]
    return round(sum(scores), 3), answer.headers["x-qerl-policy-version"]


def connected(server):
    """Return the processes that hold a connection to a client."""
    found, port = set(), int(server.url.rsplit(":", 1)[1])
    for process in psutil.Process(server.process.pid).children(recursive=True):
        lines = process.net_connections("tcp")
        found |= {process.pid for line in lines if line.laddr.port == port and line.status == psutil.CONN_ESTABLISHED}
    return found


def clients_of_both(stack, server, **options):
    """Return twelve clients with open connections that are spread over both processes."""
    clients = []
    while len(clients) < 12 or len(connected(server)) < 2:
        assert len(clients) < 200, "one process has answered all: nothing is tested"
        clients.append(stack.enter_context(httpx.Client(verify=False, timeout=PATIENCE, **options)))
        clients[-1].get(f"{server.url}/health").raise_for_status()
    return clients[:6] + clients[-6:]


def test_each_process_knows_the_version(server, adapters):
    policy = PolicyClient(server.url, TOKEN)
    instances, scores = {policy.state()["instance"] for _ in range(10)}, set()
    assert len(instances) == 1, "one engine, whichever process tells of it"
    with contextlib.ExitStack() as stack:
        clients = clients_of_both(stack, server)
        for version in range(1, 7):
            assert policy.swap(*adapters[version % 2]) == version
            answers = {ask(server, client=client) for client in clients}
            assert {found for _, found in answers} == {str(version)}
            scores |= {(version % 2, score) for score, _ in answers}
        assert len(connected(server)) == 2, "one process has answered all: nothing is tested"
    assert len(scores) == 2 and len({score for _, score in scores}) == 2, "each adapter answers in its own way, always"


def test_changes_of_clients_are_ordered_and_lose_no_request(server, adapters):
    first = PolicyClient(server.url, TOKEN).state()["version"]

    def swap(i):
        return PolicyClient(server.url, TOKEN).swap(*adapters[i % 2])

    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        streams = [threads.submit(ask, server, 1500) for _ in range(4)]
        made = list(threads.map(swap, range(16)))
        spans = [[int(part) for part in stream.result()[1].split("-")] for stream in streams]
    assert sorted(made) == list(range(first + 1, first + 17)), "two changes at once would have had one version"
    assert all(first <= span[0] <= span[-1] <= first + 16 for span in spans)
    assert any(len(span) == 2 for span in spans), "no request ran through a change: this proves nothing"
    assert PolicyClient(server.url, TOKEN).state()["version"] == first + 16


def test_a_pause_of_one_outlasts_changes_of_the_other(server, adapters):
    """Check also that either process can resume the engine."""
    policy = PolicyClient(server.url, TOKEN)
    with contextlib.ExitStack() as stack:
        clients = clients_of_both(stack, server)
        first = policy.state()["version"]
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            for i, client in enumerate(clients):
                swaps = [threads.submit(policy.swap, *adapters[number % 2]) for number in range(4)]
                answer = client.post(f"{server.url}/pause", params={"mode": ("keep", "wait", "abort")[i % 3]})
                answer.raise_for_status()
                made = [swap.result() for swap in swaps]
                paused = [other.get(f"{server.url}/is_paused").json()["is_paused"] for other in clients]
                assert paused == [True] * len(clients), f"resumed by one of {made}"
                assert policy.state()["paused"]
                clients[-1 - i].post(f"{server.url}/resume").raise_for_status()
                assert not policy.state()["paused"]
        assert policy.state()["version"] == first + 4 * len(clients)
        assert ask(server)[1] == str(first + 4 * len(clients))


def test_each_of_them_counts_for_all(server, adapters):
    policy = PolicyClient(server.url, TOKEN)
    before = policy.state()["counters"]
    with contextlib.ExitStack() as stack:
        clients = clients_of_both(stack, server, headers={"X-QeRL-Admin-Token": TOKEN})
        for client in clients:
            # a refusal closes the connection
            assert client.put(f"{server.url}/v1/qerl/noise", json={}).status_code == 400
            client.delete(f"{server.url}/v1/qerl/noise").raise_for_status()
        assert len(connected(server)) == 2, "one process has answered all: nothing is tested"
        counted = [client.get(f"{server.url}/v1/qerl/state").json()["counters"] for client in clients]
    assert all(found == counted[0] for found in counted)
    assert counted[0]["swaps"]["noise"] == before["swaps"].get("noise", 0) + 12
    assert counted[0]["refusals"]["bad_json"] == before["refusals"].get("bad_json", 0) + 12


def test_a_killed_process_ends_the_whole_server(server):
    """Run this last of the tests that use ``server``, since it ends the server. A killed process ends all, because it
    may be the one that has paused the engine."""
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    question = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        streams = []
        while len(connected(server)) < 2 and len(streams) < 8:
            client = stack.enter_context(httpx.Client(timeout=PATIENCE))
            answer = stack.enter_context(client.stream("POST", f"{server.url}/v1/completions", json=question))
            streams.append(answer.iter_bytes())
            assert next(streams[-1])
        psutil.Process(min(connected(server))).kill()
        for stream in streams:
            with contextlib.suppress(httpx.TransportError):
                for _ in stream:
                    pass  # the stream ends
    assert psutil.wait_procs(processes, PATIENCE)[1] == []
