"""Test CPU tensors on their way to a server on this machine: through a file in shared memory, or in the request body
instead."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from policy_requests import API_KEY, HEADERS, TOKEN, assert_served, done, kept, put
from raw_requests import tickets
from waiting import PATIENCE

from qerl_vllm_plugin.client import AsyncPolicyClient, PolicyClient, PolicyRefusedError, body
from qerl_vllm_plugin.wire import body as wire_body
from qerl_vllm_plugin.wire import shared_file
from qerl_vllm_plugin.wire.shared_segment import Segments

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
BOTH = pytest.mark.parametrize(("kind", "transport"), [(PolicyClient, "auto"), (AsyncPolicyClient, "shared")])


@BOTH
def test_tensors_are_written_into_one_file_and_served(
    kind, transport, server, questions, expected, adapters, measure, monkeypatch
):
    client = kind(server[0], TOKEN, API_KEY, transport=transport)
    monkeypatch.setattr(wire_body, "pieces", lambda *given: pytest.fail("sent in a body"))
    files = set()
    for name in ("third", "second"):
        assert_served(questions, measure, expected(name), done(client.swap(*adapters[1][name])))
        files.add(client._segments._kept.path)
    assert len(files) == 1


def test_a_swap_is_known_again_whichever_way_it_came(server, policy, adapters):
    """Check that sending it again changes nothing. An older version, or another adapter under the same version, is
    refused."""
    near, far = (PolicyClient(server[0], TOKEN, API_KEY, transport=way) for way in ("shared", "http"))
    for first, second in ((near, far), (far, near)):
        version = first.swap(*adapters[1]["third"])
        before = policy.state()
        assert "unchanged" not in first.answered
        assert second.swap(*adapters[1]["third"], version=version) == version and second.answered["unchanged"]
        for given in (version, version - 1):
            with pytest.raises(PolicyRefusedError, match=f"version {given} is not newer than {version}") as refused:
                second.swap(*adapters[1]["second"], version=given)
            assert refused.value.status == 409
        assert (policy.state()["version"], policy.state()["hash"]) == (version, before["hash"])


def name_file(server, given):
    content = given if isinstance(given, bytes) else json.dumps(given).encode()
    return put(server, content, {**HEADERS, "Content-Type": shared_file.MEDIA_TYPE})


def test_only_an_adapter_in_a_file_for_servers_is_installed(server, policy, adapters, tmp_path):
    before, good = kept(policy), body(*adapters[1]["third"])
    (tmp_path / "named").write_bytes(good)
    file, path = shared_file.create()
    with open(tmp_path / "named", "rb") as named, file:
        here, ticket = f"/proc/{os.getpid()}/fd/{named.fileno()}", shared_file.ticket(path)
        for other in (here, path, str(tmp_path / "named"), "/dev/shm/x", "/proc/self/fd/0", "", ticket + "0"):
            answer = name_file(server, {"file": other})
            assert (answer.status_code, answer.json()["reason"]) == (403, "unreachable"), other
        for other in ({"file": 7}, {"memory": "as another release sends it: " + 100_000 * "x", "proof": ticket}):
            assert name_file(server, other).status_code == 403
        for broken in ([], b"{"):
            assert name_file(server, broken).status_code == 400, broken
        answer = name_file(server, {"file": ticket})
        assert (answer.status_code, answer.json()["reason"]) == (400, "bad_file"), "it is empty"
        file.write(good[: len(good) // 2])
        assert name_file(server, {"file": ticket}).status_code == 422, "half of it is missing"
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), b"a secret that is no adapter", 0)
        answer = name_file(server, {"file": ticket})
        assert (answer.status_code, answer.json()["reason"]) == (400, "bad_file")
        assert not re.search(r"secret|\d{3}", answer.text), "no content of it, as text or as a number"
        os.ftruncate(file.fileno(), 1 << 40)
        assert name_file(server, {"file": ticket}).status_code == 413
    assert kept(policy) == before


def in_shared_memory(content, how):
    """Create a file of this user in /dev/shm with this content. Return it with its path for other processes."""
    if how == "deleted":  # the name itself ends in " (deleted)"
        file = tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="x-", suffix=" (deleted)", buffering=0)  # noqa: SIM115
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        file, path = shared_file.create()
    file.write(content)
    return file, path


@pytest.mark.parametrize("how", ["the server's own", "deleted", "for another server"])
def test_a_file_that_its_caller_has_not_made_is_not_opened(server, policy, adapters, how):
    policy.swap(*adapters[1]["second"])
    PolicyClient(server[0], TOKEN, API_KEY, transport="http").swap(*adapters[1]["third"])
    before = kept(policy)
    with contextlib.ExitStack() as opened:
        if how == "the server's own":
            links = Path(f"/proc/{server[2].pid}/fd").iterdir()
            paths = [str(link) for link in links if os.readlink(link).startswith("/dev/shm/")]
            assert len(paths) == 1, "of the last body, for the next"
        else:
            file, path = in_shared_memory(body(*adapters[1]["second"]), how)
            opened.enter_context(file)
            paths = [path]
        for ticket in tickets(paths[0]):
            answer = name_file(server, {"file": ticket})
            assert (answer.status_code, answer.json()["reason"]) == (403, "unreachable"), ticket
    assert kept(policy) == before


def refuse_the_file(monkeypatch):
    @contextlib.contextmanager
    def filled(*given):
        with tempfile.TemporaryFile(dir="/dev/shm") as file:  # one without a name
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"

    monkeypatch.setattr(Segments, "filled", filled)
    return "on one machine, as one user"


def have_no_room(monkeypatch):
    monkeypatch.setattr(shared_file, "fits", lambda size: False)
    return "has no room"


@pytest.mark.parametrize(("kind", "obstacle"), [(PolicyClient, refuse_the_file), (AsyncPolicyClient, have_no_room)])
def test_the_body_takes_over_with_one_warning(
    kind, obstacle, server, questions, expected, adapters, measure, monkeypatch
):
    why, client = obstacle(monkeypatch), kind(server[0], TOKEN, API_KEY)
    with pytest.warns(UserWarning, match=why):
        done(client.swap(*adapters[1]["third"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        version = done(client.swap(*adapters[1]["second"]))
    assert_served(questions, measure, expected("second"), version)
    with pytest.raises(PolicyRefusedError, match=f"transport is 'shared', and .*{why}.*; leave it out") as refused:
        done(kind(server[0], TOKEN, API_KEY, transport="shared").swap(*adapters[1]["third"]))
    assert refused.value.status == 0 and "HTTP 0" not in str(refused.value), "it was never asked for over HTTP"


def test_another_machine_gets_the_body_without_a_warning(server, adapters, monkeypatch, recwarn):
    monkeypatch.setattr(shared_file, "machine", lambda: "another")
    for transport in ("auto", "shared"):
        client = PolicyClient(server[0], TOKEN, API_KEY, transport=transport)
        with contextlib.ExitStack() as stack:
            if transport == "shared":
                stack.enter_context(pytest.raises(PolicyRefusedError, match="the server is on another machine"))
            client.swap(*adapters[1]["third"])
        assert client._segments._kept is None
    assert not recwarn.list


@pytest.fixture(scope="module")
def several(adapters):
    """Return adapters of two sizes by their names. The server can install two, ``second`` and ``third``, by name."""
    given = {name: adapters[1][name] for name in ("second", "third")}
    for name in ("second", "third"):
        tensors, config = given[name]
        modules = config["target_modules"][:2]
        part = {key: tensor for key, tensor in tensors.items() if any(module in key for module in modules)}
        given[f"part of {name}"] = part, {**config, "target_modules": modules}
    return given


def installed(server):
    """Return the current version and the digest of the workers' buffers."""
    asked = {"method": "qerl_state", "args": [True]}
    answer = httpx.post(f"{server[0]}/collective_rpc", json=asked, headers=HEADERS, timeout=PATIENCE)
    (state,) = answer.json()["results"]
    return state["version"], state["adapter"]


@contextlib.contextmanager
def each_is_what_was_sent(server, several):
    """Yield a list to which each sender appends its list of (version, name). Check at the end that each version was
    given once, in order for each sender. Under each version the workers must hold what was sent."""
    client, digests, seen, ended, senders = PolicyClient(server[0], TOKEN, API_KEY), {}, set(), threading.Event(), []
    for name, given in several.items():
        first = client.swap(*given)
        digests[name] = installed(server)[1]
    assert len(set(digests.values())) == len(digests)

    def look():
        while not ended.is_set():
            seen.add(installed(server))
        seen.add(installed(server))

    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(look)
        try:
            yield senders
        finally:
            ended.set()
        looking.result()
    assert all(sent == sorted(sent) for sent in senders)
    names = dict(one for sent in senders for one in sent)
    assert sorted(names) == list(range(first + 1, first + 1 + sum(map(len, senders)))) and len(names) >= 8
    found = {version: digest for version, digest in seen if version > first}
    assert found and found == {version: digests[names[version]] for version in found}


SECONDS = pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=pytest.mark.slow)])


@SECONDS
def test_folders_and_bodies_of_many_clients_come_in_turn(server, several, seconds):
    def send(number):
        sent, chance, end = [], random.Random(number), time.monotonic() + seconds
        while time.monotonic() < end:
            name = chance.choice(list(several))
            if is_folder := name in ("second", "third") and chance.random() < 0.7:
                answer = put(server, b"", folder=name)
            else:
                content = body(*several[name])
                answer = put(server, content if chance.random() < 0.7 else iter([content[:1000], content[1000:]]))
            assert answer.status_code == 200, (is_folder, answer.text)
            sent.append((answer.json()["version"], name))
        return sent

    with each_is_what_was_sent(server, several) as senders, ThreadPoolExecutor(8) as threads:
        senders += threads.map(send, range(8))


def swap_at_once(url, given, seconds, may_begin, answer):
    """Swap from eight tasks of one client at once, and send back each task's list of (version, name)."""
    client, truncate = AsyncPolicyClient(url, TOKEN, API_KEY, transport="shared"), os.ftruncate

    def slowly(*given):
        truncate(*given)
        time.sleep(0.01)  # others have the interpreter meanwhile, as they may have while the kernel frees pages

    async def send(number):
        sent, chance, end = [], random.Random(number), time.monotonic() + seconds
        while time.monotonic() < end:
            name = chance.choice(list(given))
            sent.append((await client.swap(*given[name]), name))
        return sent

    async def all_of_them():
        return await asyncio.gather(*map(send, range(8)))

    os.ftruncate = slowly
    assert may_begin.wait(PATIENCE)
    answer.send(asyncio.run(all_of_them()))


@SECONDS
def test_many_tasks_of_a_client_swap_at_once(server, several, seconds):
    """Run the client in a process of its own, since access to freed memory would end it (SIGBUS)."""
    fork = multiprocessing.get_context("fork")
    (answer, there), may_begin = fork.Pipe(duplex=False), fork.Event()
    tasks = fork.Process(target=swap_at_once, args=(server[0], several, seconds, may_begin, there), daemon=True)
    tasks.start()  # before this process has threads
    there.close()
    with each_is_what_was_sent(server, several) as senders:
        may_begin.set()
        with contextlib.suppress(EOFError):  # of a process that was ended
            senders += answer.recv() if answer.poll(PATIENCE + seconds) else []
        tasks.join(PATIENCE)
        assert tasks.exitcode == 0, f"ended by {tasks.exitcode}"
