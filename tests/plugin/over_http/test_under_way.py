"""Test requests that are running when the policy changes, also in an engine paused by vLLM's own /pause."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from policy_requests import API_KEY
from waiting import PATIENCE, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
TRIES = 8  # retries where a stall of the machine at the wrong moment leaves a case untested


@pytest.fixture
def begun(server):
    """begun(tokens, prompt) returns the lines of a stream after its first token. The engine is resumed at the end."""
    question = {"model": "policy", "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(headers={"Authorization": f"Bearer {API_KEY}"}, timeout=PATIENCE))

        def begin(tokens, prompt=(9, 4, 5)):
            asked = {**question, "max_tokens": tokens, "prompt": list(prompt)}
            stream = client.stream("POST", f"{server[0]}/v1/completions", json=asked)
            lines = stack.enter_context(stream).iter_lines()
            next(lines)
            return lines

        stack.callback(resume, server[0])
        yield begin


def resume(url):
    httpx.post(f"{url}/resume", timeout=PATIENCE).raise_for_status()


def pause(url, mode):
    httpx.post(f"{url}/pause", params={"mode": mode}, timeout=PATIENCE).raise_for_status()


def is_paused(url):
    return httpx.get(f"{url}/is_paused", timeout=PATIENCE).json()["is_paused"]


def last(lines):
    return [line for line in lines if line][-1]


def named(versions):
    return f": X-QeRL-Policy-Version: {versions}"


def let_end(url, threads, begun, tokens):
    """Start a request, then pause the engine with mode "wait". Return the request's lines and the pending pause
    call."""
    for _ in range(TRIES):
        lines = begun(tokens)
        drained = threads.submit(pause, url, "wait")
        assert until(lambda drained=drained: drained.done() or is_paused(url))
        if not drained.done():
            return lines, drained
        drained.result()
        resume(url)
    return pytest.fail("each request had ended before the engine was paused: nothing is tested")


def count(url, name):
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_change_comes_after_requests_that_somebody_lets_end(server, policy, adapters, begun, mode):
    url, first, before = server[0], policy.state()["version"], count(server[0], "num_preemptions_total")
    with ThreadPoolExecutor(2) as threads:
        lines, drained = let_end(url, threads, begun, 200)
        swapped = threads.submit(policy.swap, *adapters[1]["second"], requests=mode)
        assert last(lines) == named(first)
        drained.result()
        assert swapped.result() == first + 1
    assert is_paused(url), "who has paused it resumes it"
    assert count(url, "num_preemptions_total") == before


def test_abort_ends_requests_that_somebody_lets_end(server, policy, adapters, begun):
    for _ in range(TRIES):
        first = policy.state()["version"]
        with ThreadPoolExecutor(1) as threads:
            lines, drained = let_end(server[0], threads, begun, 3500)
            assert policy.swap(*adapters[1]["second"], requests="abort") == first + 1
            drained.result()
        assert is_paused(server[0])
        said = "".join(lines).replace(" ", "")
        if '"finish_reason":"length"' not in said:
            break  # otherwise it had ended before
        resume(server[0])
    assert '"finish_reason":"abort"' in said


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_in_the_middle_of_a_change_stays(server, policy, adapters, begun, mode):
    first, lines = policy.state()["version"], begun(200)
    with ThreadPoolExecutor(3) as threads:
        changes = [threads.submit(policy.swap, *adapters[1][name]) for name in ("second", "third")]
        paused = threads.submit(pause, server[0], mode)
        for change in (*changes, paused):
            change.result()
    assert is_paused(server[0]) and policy.state()["version"] == first + 2
    resume(server[0])
    ends = "abort|length" if mode == "abort" else "length"  # the request may have ended before the abort
    assert re.search(f'"finish_reason":"({ends})"', "".join(lines).replace(" ", ""))


def test_preempted_requests_end_before_a_change_that_waits(server, policy, adapters, begun):
    """Check preempted requests. vLLM restarts these when there is room, but not in an engine that is being drained."""
    first = policy.state()["version"]
    with ThreadPoolExecutor(7) as threads:  # the server has room for 8064 tokens, and each of the 7 requests needs 1250
        for _ in range(TRIES):
            streams = list(threads.map(lambda i: begun(250, [9 + i, *[4, 5] * 500]), range(7)))
            while not (waiting := count(server[0], "num_requests_waiting")):
                if not count(server[0], "num_requests_running"):
                    break
            if waiting:
                break
        assert waiting, "each time all had ended: nothing is tested"
        assert policy.swap(*adapters[1]["third"], requests="wait") == first + 1
        assert {last(lines) for lines in streams} == {named(first)}
