"""Hostile requests to the server of this folder: each is refused by name, and changes nothing."""

import contextlib
import json
import os
import socket
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from policy_requests import API_KEY, TOKEN, description, kept, put
from raw_requests import send, tickets, uploads
from safetensors.torch import save
from waiting import PATIENCE, until

from qerl_vllm_plugin.client import body
from qerl_vllm_plugin.wire import shared_file
from qerl_vllm_plugin.wire.gpu_memory import MEDIA_TYPE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def worked(server):
    """Seconds of a processor that the processes of the server have had: what it does, however busy the machine is."""
    root = psutil.Process(server[2].pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def spoiled(adapters, change):
    """The body of an adapter after ``change(tensors, config)``."""
    tensors, config = dict(adapters[1]["second"][0]), dict(adapters[1]["second"][1])
    change(tensors, config)
    return body(tensors, config)


def nan(tensors, config):
    name = sorted(tensors)[0]
    tensors[name] = torch.full_like(tensors[name], float("nan"))


BODIES = {
    "nan": (lambda a: spoiled(a, nan), 422, "NaN"),
    "no_file": (lambda a: b"\xff" * 200, 400, "no safetensors file"),
    "empty": (lambda a: b"", 400, "no safetensors file"),
    "pickle": (lambda a: b"\x80\x04\x95" + b"cos\nsystem\n(S'id'\ntR." * 9, 400, "no safetensors file"),
    "no_config": (lambda a: save(a[1]["second"][0]), 400, "lack 'adapter_config'"),
    "config_is_a_list": (
        lambda a: save(a[1]["second"][0], metadata={"adapter_config": "[1]"}),
        400,
        "not a JSON object",
    ),
    "deep_json": (
        lambda a: save(a[1]["second"][0], metadata={"adapter_config": "[" * 100_000}),
        400,
        "not valid JSON",
    ),
    "pattern": (lambda a: spoiled(a, lambda t, c: c.update(target_modules="(a+)+$")), 400, "not a pattern"),
    "pattern_of_layers": (
        lambda a: spoiled(a, lambda t, c: c.update(layers_to_transform=[0], layers_pattern=["(a+)+$"])),
        400,
        "not a pattern",
    ),
    "excluded_pattern": (lambda a: spoiled(a, lambda t, c: c.update(exclude_modules="(a+)+$")), 400, "not a pattern"),
    "rank": (lambda a: spoiled(a, lambda t, c: c.update(r=10**30)), 422, "rank"),
    "alpha": (lambda a: spoiled(a, lambda t, c: c.update(lora_alpha=10**400)), 422, "lora_alpha"),
    "another_base": (lambda a: spoiled(a, lambda t, c: t.update({sorted(t)[0]: torch.ones(4, 128)})), 422, "shape"),
    "norm_of_another_model": (
        lambda a: spoiled(a, lambda t, c: t.update({"a.norm.weight": torch.ones(4)})),
        422,
        "norm",
    ),
    "lists_in_lists": (
        lambda a: spoiled(a, lambda t, c: c.update(megatron_config=json.loads("[" * 800 + "]" * 800))),
        422,
        "megatron_config",
    ),
    "cut_file": (lambda a: body(*a[1]["second"])[:-100], 422, ""),
    "too_large": (lambda a: b"x" * (4 << 20), 413, "at most"),
    "too_large_in_chunks": (lambda a: iter([b"x" * (1 << 20)] * 4), 413, "more than"),
}


@pytest.mark.parametrize("case", BODIES)
def test_hostile_bodies_are_refused_within_a_second(server, policy, adapters, case):
    before, files = kept(policy), uploads(server[2])
    make, status, text = BODIES[case]
    content, start = make(adapters), worked(server)
    answer = put(server, content)
    assert worked(server) - start < 1
    assert answer.status_code == status
    assert text in answer.json()["error"]
    assert kept(policy) == before
    assert uploads(server[2]) <= files and len(files) <= 1


def uploads_with(process, content):
    """The paths of the server's files in shared memory that begin so."""
    found = []
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("/dev/shm/") and path.read_bytes()[: len(content)] == content:
                found.append(str(path))
    return found


def put_description(server, given):
    content = given if isinstance(given, bytes) else json.dumps(given).encode()
    headers = {"X-QeRL-Admin-Token": TOKEN, "Authorization": f"Bearer {API_KEY}", "Content-Type": MEDIA_TYPE}
    return put(server, content, headers)


def test_memory_of_a_gpu_is_mapped_only_for_a_process_of_this_user_and_machine(server, policy, adapters, tmp_path):
    before, (given, content) = kept(policy), description(adapters)
    (tmp_path / "named").write_bytes(content)
    with (
        shared_file.proof(content) as good,
        shared_file.proof(content + b"x") as longer,
        shared_file.proof(b"x" * 32) as other,
        open(tmp_path / "named", "rb") as named,
    ):
        here = f"/proc/{os.getpid()}/fd/{named.fileno()}"
        without = good.rpartition("/")[0]
        for path in (longer, other, without, here, str(tmp_path / "named"), "/dev/shm/x", "/proc/self/fd/0", ""):
            answer = put_description(server, {**given, "proof": path})
            assert (answer.status_code, answer.json()["reason"]) == (403, "unreachable"), path
        answer = put_description(server, {**given, "proof": good})
        assert (answer.status_code, answer.json()["reason"]) == (422, "unreachable"), "this server has no GPU"
        assert "and this worker computes on a cpu" in answer.json()["error"]
        for broken in ({**given, "memory": 7}, {**given, "pickle": ""}, {**given, "adapter_config": []}, [], b"{"):
            assert put_description(server, broken).status_code == 400
    whole = {"bytes": 1 << 30, "tensors": json.dumps([["a", "U8", [1 << 30]]])}
    for change, status in (({"bytes": 1}, 400), ({"handle": "5a"}, 400), (whole, 413)):
        given, content = description(adapters, change)
        with shared_file.proof(content) as path:
            assert put_description(server, {**given, "proof": path}).status_code == status
    assert kept(policy) == before


@pytest.mark.parametrize(
    "lines",
    ["Content-Length: 64\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n20\r\n"],
    ids=["of a length", "in pieces"],
)
def test_a_proof_cannot_be_made_over_http(server, policy, adapters, lines):
    """A body that stalls lies in an unnamed file of the server's user, and holds whatever its sender likes."""
    before, (given, content) = kept(policy), description(adapters)
    with send(server[0], "PUT /v1/qerl/policy HTTP/1.1", lines.encode() + content):
        found = until(lambda: uploads_with(server[2], content))
        assert found, "the server has it in a file"
        for ticket in tickets(found[0]):
            answer = put_description(server, {**given, "proof": ticket})
            assert (answer.status_code, answer.json()["reason"]) == (403, "unreachable"), ticket
    assert kept(policy) == before


def test_a_body_that_is_promised_and_never_sent_is_refused_at_once_and_one_that_is_cut_changes_nothing(server, policy):
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


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ({"params": {"version": "-1"}}, 400),
        ({"params": {"version": "1e3"}}, 400),
        ({"params": {"version": "9" * 400}}, 400),
        ({"params": {"requests": "drop"}}, 400),
        ({"params": {"verison": "7"}}, 400),
    ],
)
def test_queries_are_honoured_or_refused_by_name(server, policy, adapters, call, status):
    before = kept(policy)
    assert put(server, body(*adapters[1]["second"]), **call["params"]).status_code == status
    assert kept(policy) == before


@pytest.mark.parametrize(
    "noise",
    [
        {"sigma": -1, "seed": 1, "rollout": 1},
        {"sigma": "much", "seed": 1, "rollout": 1},
        {"sigma": None, "seed": 1, "rollout": 1},
        {"sigma": 0.1, "seed": 1.5, "rollout": 1},
        {"sigma": 1e308, "seed": 1, "rollout": 1},
        {"sigma": 0.1, "seed": 2**63, "rollout": 1},
        {"sigma": 10**40, "seed": 1, "rollout": 1},
        {"sigma": 0.1, "seed": 1},
        {"sigma": 0.1, "seed": 1, "rollout": 1, "target": ["norm"]},
        {"sigma": 0.1, "seed": 1, "rollout": 1, "targets": ["no_such_norm"]},
        {"sigma": 0.1, "seed": 1, "rollout": 1, "targets": "norm"},
        [0.1],
    ],
)
def test_impossible_noise_is_refused(server, policy, noise):
    before = kept(policy)
    headers = {"X-QeRL-Admin-Token": TOKEN, "Authorization": f"Bearer {API_KEY}"}
    answer = httpx.put(f"{server[0]}/v1/qerl/noise", json=noise, headers=headers, timeout=PATIENCE)
    assert answer.status_code in (400, 422)
    assert len(answer.json()["error"]) > 10 and answer.json()["reason"] in ("bad_json", "refused")
    assert kept(policy) == before
