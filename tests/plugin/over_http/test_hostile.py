"""Test hostile requests to this folder's server: each is refused by name and changes nothing."""

import contextlib
import json
import os
import socket
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from policy_requests import API_KEY, HEADERS, TOKEN, description, kept, put
from raw_requests import send, tickets, uploads
from safetensors.torch import save
from waiting import PATIENCE, until

from qerl_vllm_plugin.client import body
from qerl_vllm_plugin.wire import shared_file
from qerl_vllm_plugin.wire.gpu_memory import MEDIA_TYPE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def worked(server):
    """Return the CPU seconds that the server's processes have used. Unlike wall time, this does not depend on how busy
    the machine is."""
    root = psutil.Process(server[2].pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def nan(tensors, config):
    name = sorted(tensors)[0]
    tensors[name] = torch.full_like(tensors[name], float("nan"))


def spoiled(change):
    """Return a function that maps an adapter to its request body after ``change(tensors, config)``."""

    def make(adapter):
        tensors, config = dict(adapter[0]), dict(adapter[1])
        change(tensors, config)
        return body(tensors, config)

    return make


def with_config(text):
    return lambda adapter: save(adapter[0], metadata={"adapter_config": text})


BODIES = {
    "nan": (spoiled(nan), 422, "NaN"),
    "no_file": (lambda _: b"\xff" * 200, 400, "no safetensors file"),
    "empty": (lambda _: b"", 400, "no safetensors file"),
    "no_config": (lambda adapter: save(adapter[0]), 400, "lack 'adapter_config'"),
    "config_is_a_list": (with_config("[1]"), 400, "not a JSON object"),
    "deep_json": (with_config("[" * 100_000), 400, "not valid JSON"),
    "pattern": (spoiled(lambda t, c: c.update(target_modules="(a+)+$")), 400, "not a pattern"),
    "pattern_of_layers": (
        spoiled(lambda t, c: c.update(layers_to_transform=[0], layers_pattern=["(a+)+$"])),
        400,
        "not a pattern",
    ),
    "rank": (spoiled(lambda t, c: c.update(r=10**30)), 422, "rank"),
    "alpha": (spoiled(lambda t, c: c.update(lora_alpha=10**400)), 422, "lora_alpha"),
    "another_base": (spoiled(lambda t, c: t.update({sorted(t)[0]: torch.ones(4, 128)})), 422, "shape"),
    "another_norm": (spoiled(lambda t, c: t.update({"a.norm.weight": torch.ones(4)})), 422, "norm"),
    "lists_in_lists": (
        spoiled(lambda t, c: c.update(megatron_config=json.loads("[" * 800 + "]" * 800))),
        422,
        "megatron_config",
    ),
    "cut_file": (lambda adapter: body(*adapter)[:-100], 422, "no whole safetensors file"),
    "too_large": (lambda _: b"x" * (4 << 20), 413, "at most"),
    "too_large_in_chunks": (lambda _: iter([b"x" * (1 << 20)] * 4), 413, "more than"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_hostile_body_is_refused_within_a_second(server, policy, adapters, case):
    before, files = kept(policy), uploads(server[2])
    make, status, text = BODIES[case]
    content, start = make(adapters[1]["second"]), worked(server)
    answer = put(server, content)
    assert worked(server) - start < 1
    assert answer.status_code == status
    assert text in answer.json()["error"]
    assert kept(policy) == before
    assert uploads(server[2]) <= files and len(files) <= 1


def uploads_with(process, content):
    """Return the paths of the server's files in shared memory that begin with ``content``."""
    found = []
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("/dev/shm/") and path.read_bytes()[: len(content)] == content:
                found.append(str(path))
    return found


def put_description(server, ticket):
    content = json.dumps({"file": ticket}).encode()
    return put(server, content, {**HEADERS, "Content-Type": MEDIA_TYPE})


@contextlib.contextmanager
def file_of(given):
    """Yield the ticket of a file that holds this JSON value."""
    file, path = shared_file.create()
    with file:
        file.write(given if isinstance(given, bytes) else json.dumps(given).encode())
        yield shared_file.ticket(path)


def test_gpu_memory_is_mapped_for_a_proven_caller_alone(server, policy, adapters, tmp_path):
    before, given = kept(policy), description(adapters)
    (tmp_path / "named").write_text(json.dumps(given))
    with file_of(given) as good, open(tmp_path / "named", "rb") as named:
        here = f"/proc/{os.getpid()}/fd/{named.fileno()}"
        without = good.rpartition("/")[0]
        for path in (good + "0", without, here, str(tmp_path / "named"), "/dev/shm/x", "/proc/self/fd/0", ""):
            answer = put_description(server, path)
            assert (answer.status_code, answer.json()["reason"]) == (403, "unreachable"), path
        answer = put_description(server, good)
        assert (answer.status_code, answer.json()["reason"]) == (422, "unreachable"), "this server has no GPU"
        assert "and this worker computes on a cpu" in answer.json()["error"]
        assert put_description(server, 7).status_code == 403
    whole = {"bytes": 1 << 30, "tensors": json.dumps([["a", "U8", [1 << 30]]])}
    changes = [(description(adapters, change), 400) for change in ({"bytes": 1}, {"handle": "5a"})]
    broken = [{**given, "memory": 7}, {**given, "adapter_config": []}, {}, [], b"{"]
    for content, status in (*changes, (description(adapters, whole), 413), *((one, 400) for one in broken)):
        with file_of(content) as ticket:
            assert put_description(server, ticket).status_code == status, content
    assert kept(policy) == before


@pytest.mark.parametrize(
    "lines",
    ["Content-Length: {0}\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n{0:x}\r\n"],
    ids=["of a length", "in pieces"],
)
def test_a_file_cannot_be_made_over_http(server, policy, adapters, lines):
    """Forge a file by a stalled upload: its body lies in a file of the server's user, with content of the sender's
    choice."""
    before, content = kept(policy), json.dumps(description(adapters)).encode()
    with send(server[0], "PUT /v1/qerl/policy HTTP/1.1", lines.format(2 * len(content)).encode() + content):
        found = until(lambda: uploads_with(server[2], content))
        assert found, "the server has it in a file"
        for ticket in tickets(found[0]):
            answer = put_description(server, ticket)
            assert (answer.status_code, answer.json()["reason"]) == (403, "unreachable"), ticket
    assert kept(policy) == before


def test_a_body_that_never_comes_or_is_cut_changes_nothing(server, policy):
    before, files, address = kept(policy), uploads(server[2]), server[0].removeprefix("http://").split(":")
    lines = f"PUT /v1/qerl/policy HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
    with socket.create_connection((address[0], int(address[1])), timeout=PATIENCE) as promise:
        promise.sendall(f"{lines}X-QeRL-Admin-Token: {TOKEN}\r\nContent-Length: {2 << 30}\r\n\r\n".encode())
        assert promise.recv(100).startswith(b"HTTP/1.1 413")
    with socket.create_connection((address[0], int(address[1])), timeout=PATIENCE) as cut:
        cut.sendall(f"{lines}X-QeRL-Admin-Token: {TOKEN}\r\nContent-Length: 5000\r\n\r\nabc".encode())
    with socket.create_connection((address[0], int(address[1])), timeout=PATIENCE) as stranger:
        stranger.sendall(f"{lines}Content-Length: {2 << 30}\r\n\r\n".encode())
        assert stranger.recv(100).startswith(b"HTTP/1.1 401")
    assert kept(policy) == before
    assert until(lambda: uploads(server[2]) <= files), "what had arrived of a cut body must go"


def test_queries_are_honoured_or_refused(server, policy, adapters):
    before, content = kept(policy), body(*adapters[1]["second"])
    for query in ({"version": "-1"}, {"version": "1e3"}, {"version": "9" * 400}, {"requests": "drop"}, {"verison": 7}):
        assert put(server, content, **query).status_code == 400, query
    assert kept(policy) == before


GOOD_NOISE = {"sigma": 0.1, "seed": 1, "rollout": 1}


@pytest.mark.parametrize(
    "noise",
    [
        {**GOOD_NOISE, "sigma": 10**40},
        {**GOOD_NOISE, "seed": 2**63},
        {**GOOD_NOISE, "targets": ["no_such_norm"]},
        {**GOOD_NOISE, "target": ["norm"]},
        {"sigma": 0.1, "seed": 1},
        [0.1],
    ],
    ids=str,
)
def test_impossible_noise_is_refused(server, policy, noise):
    before = kept(policy)
    answer = httpx.put(f"{server[0]}/v1/qerl/noise", json=noise, headers=HEADERS, timeout=PATIENCE)
    assert answer.status_code in (400, 422)
    assert len(answer.json()["error"]) > 10 and answer.json()["reason"] in ("bad_json", "refused")
    assert kept(policy) == before
