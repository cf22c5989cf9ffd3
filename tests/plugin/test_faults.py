"""What dies, stalls or runs out of room beside a server: nothing hangs, and nothing is left behind."""

import contextlib
import json
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from waiting import PATIENCE, until

from qerl_vllm_plugin.client import PolicyClient, PolicyRefusedError, body

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
TOKEN = "an-admin-token-of-32-characters!"
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def adapter(reference, make_nvfp4, make_adapter):
    """Tensors and config of one."""
    return make_adapter(reference(make_nvfp4("qwen2", max_position_embeddings=4096)), r=4)[:2]


@pytest.fixture(scope="module")
def start_server(make_nvfp4, hold_port, tmp_path_factory):
    """start_server(program=None, workers=0, **options) -> a server; with ``program``, Python that runs in each of its
    processes first, and with ``workers`` one more process that computes; ``options`` are the plugin's."""
    from qerl_recipes.machine.serve import command
    from qerl_recipes.machine.server_process import started

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


@pytest.fixture(scope="module")
def server(start_server):
    """One that the tests before the last leave as it was."""
    return start_server()


def kept(policy):
    """The state, but for what is counted."""
    return {key: value for key, value in policy.state().items() if key != "counters"}


def ask(server, **changes):
    question = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.0, "logprobs": 1, **changes}
    return httpx.post(f"{server.url}/v1/completions", json=question, timeout=PATIENCE)


def send(server, lines="", content=b"", receive=None):
    """A connection on which a request has begun: its headers, with ``lines``, and what there is of its content."""
    connection = socket.socket()
    if receive is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    connection.sendall(f"{lines}\r\nHost: x\r\nX-QeRL-Admin-Token: {TOKEN}\r\n".encode() + content)
    return connection


def upload(content, share):
    """The beginning of a PUT of an adapter, of which only a share of the content is sent."""
    return f"Content-Length: {len(content)}\r\n\r\n".encode() + content[: int(share * len(content))]


def begin_stream(server, tokens, receive=None):
    question = {"model": "policy", "prompt": [5, 6], "max_tokens": tokens, "stream": True, "logprobs": 20}
    content = json.dumps({**question, "ignore_eos": True}).encode()
    lines = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    return send(server, "POST /v1/completions HTTP/1.1", lines + content, receive)


def health(server):
    return httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code


def nameless_files(process):
    """Files in shared memory without a name that a process has open."""
    found = []
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            found += [target] if target.startswith(f"{SHARED_MEMORY}/") and target.endswith("(deleted)") else []
    return found


def named_files(processes):
    """Files in shared memory that processes have open or mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/maps").read_text().split()
            links = [str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            found |= {word for word in (*text, *links) if word.startswith(f"{SHARED_MEMORY}/")}
    return {Path(name) for name in found if Path(name).exists()}


def tree(server):
    """The processes of a server, its own first."""
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def test_a_pusher_that_is_killed_in_the_middle_of_a_body_changes_nothing(server, adapter):
    policy = PolicyClient(server.url, TOKEN)
    before, content = kept(policy), body(*adapter)
    program = (
        "import socket, sys\n"
        f"connection = socket.create_connection(('127.0.0.1', {server.url.rsplit(':', 1)[1]}))\n"
        "connection.sendall(sys.stdin.buffer.read())\n"
        "print('sent', flush=True)\n"
        "sys.stdin = open('/dev/zero')\n"
        "sys.stdin.read()\n"
    )
    pusher = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    head = f"PUT /v1/qerl/policy HTTP/1.1\r\nHost: x\r\nX-QeRL-Admin-Token: {TOKEN}\r\n".encode()
    pusher.stdin.write(head + upload(content, 0.5))
    pusher.stdin.close()
    assert pusher.stdout.readline() == b"sent\n"
    assert until(lambda: nameless_files(server.process)), "the body is not received yet: nothing is tested"
    pusher.kill()
    pusher.wait()
    assert until(lambda: not nameless_files(server.process))
    assert kept(policy) == before
    assert ask(server).status_code == 200


def test_an_adapter_for_which_there_is_no_room_left_is_refused_by_name(server, adapter):
    policy = PolicyClient(server.url, TOKEN, transport="http")
    before, process = kept(policy), psutil.Process(server.process.pid)
    limits = process.rlimit(resource.RLIMIT_FSIZE)
    process.rlimit(resource.RLIMIT_FSIZE, (4 << 10, limits[1]))  # the kernel refuses the write after so many bytes
    try:
        with pytest.raises(
            PolicyRefusedError,
            match=r"/dev/shm is full: File too large; make room there, or give it more \(--shm-size\)",
        ) as refused:
            policy.swap(*adapter)
    finally:
        process.rlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.status == 507
    assert kept(policy) == before
    assert not nameless_files(server.process)
    assert policy.swap(*adapter) == before["version"] + 1


def test_a_client_that_never_reads_holds_nobody_up(server, adapter):
    policy = PolicyClient(server.url, TOKEN)
    before = kept(policy)["version"]
    with begin_stream(server, 1000, receive=4096) as silent:
        assert silent.recv(12) == b"HTTP/1.1 200"  # and no more
        assert policy.swap(*adapter, requests="wait") == before + 1
        assert policy.swap(*adapter, requests="keep") == before + 2
        answer = ask(server)
        assert (answer.status_code, answer.headers["x-qerl-policy-version"]) == (200, str(before + 2))
    assert health(server) == 200


@pytest.mark.slow
def test_a_body_that_stalls_is_refused_with_its_limit(server, adapter):
    policy = PolicyClient(server.url, TOKEN)
    before = kept(policy)
    content, start = upload(body(*adapter), 0.5), time.monotonic()
    with send(server, "PUT /v1/qerl/policy HTTP/1.1", content) as stalled:
        stalled.settimeout(PATIENCE)
        answer = stalled.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408") and b"the body stalled for 30 s" in answer
    assert time.monotonic() - start >= 30
    assert kept(policy) == before


def test_a_server_that_is_killed_leaves_no_process_and_no_file(server, adapter):
    """The last one of ``server``."""
    processes = tree(server)
    assert len(processes) > 1
    streams = begin_stream(server, 1000), send(server, "PUT /v1/qerl/policy HTTP/1.1", upload(body(*adapter), 0.5))
    assert until(lambda: nameless_files(server.process))
    used = named_files(processes)
    server.process.send_signal(signal.SIGKILL)
    alive = psutil.wait_procs(processes, PATIENCE)[1]
    assert alive == []
    assert [file for file in used if file.exists()] == []
    for stream in streams:
        stream.close()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_when_the_engine_dies_every_request_ends_the_server_says_so_and_ends(start_server, adapter, victim):
    server = start_server(workers=int(victim == "worker"))
    processes = tree(server)
    used = named_files(processes)
    names = {process.pid: " ".join(process.cmdline()) for process in processes}
    (dies,) = [p for p in processes if ("Worker" if victim == "worker" else "EngineCore") in names[p.pid]]
    with begin_stream(server, 1500) as stream:
        stream.settimeout(PATIENCE)
        assert stream.recv(12) == b"HTTP/1.1 200"
        dies.kill()
        while stream.recv(1 << 16):
            pass  # it ends
    with contextlib.suppress(httpx.TransportError):  # unless it has ended already
        assert until(lambda: health(server) == 503)
        with pytest.raises(PolicyRefusedError, match="the engine has died"):
            PolicyClient(server.url, TOKEN).swap(*adapter)
    assert psutil.wait_procs(processes, PATIENCE)[1] == []
    assert [file for file in used if file.exists()] == []


HALF_WAY = """
    from qerl_vllm_plugin.resident import ResidentAdapter

    commit = ResidentAdapter.commit

    def fail(self, staged):
        commit(self, staged)
        raise RuntimeError("the device is gone")

    ResidentAdapter.commit = fail
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_server_that_holds_half_a_policy_serves_nothing_and_says_so(start_server, adapter, is_busy):
    server = start_server(program=HALF_WAY.strip())
    processes = tree(server)
    policy = PolicyClient(server.url, TOKEN)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(begin_stream(server, 1500)) for _ in range(2 * is_busy)]
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
def test_an_engine_that_hangs_is_given_up_and_every_request_ends(start_server, adapter):
    server = start_server(policy_timeout=10)
    policy = PolicyClient(server.url, TOKEN)
    (hangs,) = [process for process in tree(server) if "EngineCore" in " ".join(process.cmdline())]
    assert policy.swap(*adapter) == 1
    with begin_stream(server, 1500) as stream:
        stream.settimeout(PATIENCE)
        assert stream.recv(12) == b"HTTP/1.1 200"
        hangs.suspend()
        start = time.monotonic()
        with pytest.raises(PolicyRefusedError, match="has not answered for 10 s") as refused:
            policy.swap(*adapter)
        assert refused.value.status == 503 and 10 <= time.monotonic() - start < PATIENCE, "300 s is the default"
        while stream.recv(1 << 16):
            pass  # it ends
    with contextlib.suppress(httpx.TransportError):  # unless the server has ended
        assert health(server) == 503
        assert ask(server).status_code == 500
    hangs.kill()
    assert psutil.wait_procs(tree(server) if server.process.poll() is None else [], PATIENCE)[1] == []
