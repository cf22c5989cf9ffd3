"""Tensors of the CPU on their way to a server of this machine: through a file in shared memory, or not at all."""

import asyncio
import contextlib
import json
import os
import warnings

import pytest
from policy_requests import API_KEY, TOKEN, assert_served, kept, put

from qerl_vllm_plugin import shared_file
from qerl_vllm_plugin.client import AsyncPolicyClient, PolicyClient, PolicyRefusedError, body
from qerl_vllm_plugin.segment import Segments

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.mark.parametrize("kind", [PolicyClient, AsyncPolicyClient])
@pytest.mark.parametrize("transport", ["auto", "shared"])
def test_they_are_written_into_one_file_and_served(
    kind, transport, server, questions, expected, adapters, measure, monkeypatch
):
    client = kind(server[0], TOKEN, API_KEY, transport=transport)
    monkeypatch.setattr(client, "_swap", lambda *given: pytest.fail("sent in a body"))
    files = set()
    for name in ("third", "second"):
        made = client.swap(*adapters[1][name])
        version = asyncio.run(made) if asyncio.iscoroutine(made) else made
        assert_served(questions, measure, expected(name), version)
        files.add(client._segments._kept.path)
    assert len(files) == 1


def test_a_swap_is_known_again_whichever_way_it_came(server, adapters):
    near, far = (PolicyClient(server[0], TOKEN, API_KEY, transport=way) for way in ("shared", "http"))
    for first, second in ((near, far), (far, near)):
        version = first.swap(*adapters[1]["third"])
        assert "unchanged" not in first.answered
        assert second.swap(*adapters[1]["third"], version=version) == version and second.answered["unchanged"]
        with pytest.raises(PolicyRefusedError, match="is not newer"):
            second.swap(*adapters[1]["second"], version=version)


def name_file(server, given):
    headers = {"X-QeRL-Admin-Token": TOKEN, "Authorization": f"Bearer {API_KEY}"}
    content = given if isinstance(given, bytes) else json.dumps(given).encode()
    return put(server, content, {**headers, "Content-Type": shared_file.MEDIA_TYPE})


def test_only_an_unnamed_file_of_this_user_is_opened_and_only_an_adapter_is_installed(
    server, policy, adapters, tmp_path
):
    before, good = kept(policy), body(*adapters[1]["third"])
    (tmp_path / "named").write_bytes(good)
    with open(tmp_path / "named", "rb") as named, shared_file.unnamed() as (file, path):
        here = f"/proc/{os.getpid()}/fd/{named.fileno()}"
        for other in (here, str(tmp_path / "named"), "/dev/shm/x", "/proc/self/fd/0", "", "/proc/1/fd/1", path + "0"):
            answer = name_file(server, {"file": other})
            assert (answer.status_code, answer.json()["reason"]) == (403, "unreachable"), other
        for broken in ({"file": 7}, {"file": path, "more": 1}, {}, [], b"{"):
            assert name_file(server, broken).status_code == 400, broken
        answer = name_file(server, {"file": path})
        assert (answer.status_code, answer.json()["reason"]) == (400, "bad_file"), "it is empty"
        file.write(good[: len(good) // 2])
        assert name_file(server, {"file": path}).status_code == 422, "half of it is missing"
        os.ftruncate(file.fileno(), 1 << 40)
        assert name_file(server, {"file": path}).status_code == 413
    assert kept(policy) == before


def refuse_the_file(monkeypatch):
    @contextlib.contextmanager
    def filled(*given):
        yield "/proc/1/fd/1"

    monkeypatch.setattr(Segments, "filled", filled)
    return "no process of the server's user"


def have_no_room(monkeypatch):
    monkeypatch.setattr(shared_file, "fits", lambda size: False)
    return "has no room"


@pytest.mark.parametrize("kind", [PolicyClient, AsyncPolicyClient])
@pytest.mark.parametrize("obstacle", [refuse_the_file, have_no_room])
def test_where_there_is_no_such_way_the_body_is_sent_and_that_is_said_once(
    obstacle, kind, server, questions, expected, adapters, measure, monkeypatch
):
    why = obstacle(monkeypatch)

    def swap(client, name):
        made = client.swap(*adapters[1][name])
        return asyncio.run(made) if asyncio.iscoroutine(made) else made

    client = kind(server[0], TOKEN, API_KEY)
    with pytest.warns(UserWarning, match=why):
        swap(client, "third")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        version = swap(client, "second")
    assert_served(questions, measure, expected("second"), version)
    with pytest.raises(PolicyRefusedError, match=f"transport is 'shared', and .*{why}.*; leave it out") as refused:
        swap(kind(server[0], TOKEN, API_KEY, transport="shared"), "third")
    assert refused.value.status == 0 and "HTTP 0" not in str(refused.value), "it was never asked for over HTTP"


def test_to_another_machine_they_go_in_the_body_and_nothing_is_said(server, adapters, recwarn):
    for transport in ("auto", "shared"):
        client = PolicyClient(server[0], TOKEN, API_KEY, transport=transport)
        client._place = {"machine": "another"}
        with contextlib.ExitStack() as stack:
            if transport == "shared":
                stack.enter_context(pytest.raises(PolicyRefusedError, match="the server is on another machine"))
            client.swap(*adapters[1]["third"])
        assert client._segments._kept is None
    assert not recwarn.list
