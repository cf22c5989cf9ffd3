"""Requests that are under way when the policy changes, also in an engine that somebody has paused in vLLM's own way."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from policy_requests import API_KEY

from qerl_vllm_plugin.client import PolicyRefusedError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def begun(server):
    """begun(tokens, prompt) -> the lines of a stream with its first token; the engine runs again in the end."""
    question = {"model": "policy", "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(headers={"Authorization": f"Bearer {API_KEY}"}, timeout=120))

        def begin(tokens, prompt=(9, 4, 5)):
            asked = {**question, "max_tokens": tokens, "prompt": list(prompt)}
            stream = client.stream("POST", f"{server[0]}/v1/completions", json=asked)
            lines = stack.enter_context(stream).iter_lines()
            next(lines)
            return lines

        stack.callback(resume, server[0])
        yield begin


def resume(url):
    httpx.post(f"{url}/resume").raise_for_status()


def pause(url, mode):
    httpx.post(f"{url}/pause", params={"mode": mode}, timeout=120).raise_for_status()


def is_paused(url):
    return httpx.get(f"{url}/is_paused").json()["is_paused"]


def last(lines):
    return [line for line in lines if line][-1]


def named(versions):
    return f": X-QeRL-Policy-Version: {versions}"


def count(url, name):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_requests_that_somebody_lets_end_do_so_before_the_policy_changes(server, policy, adapters, begun, mode):
    url, first, before = server[0], policy.state()["version"], count(server[0], "num_preemptions_total")
    with ThreadPoolExecutor(2) as threads:
        lines = begun(600)
        drained = threads.submit(pause, url, "wait")
        while not is_paused(url):
            assert not drained.done(), "the request has ended: nothing is tested"
        swapped = threads.submit(policy.swap, *adapters[1]["second"], requests=mode)
        assert last(lines) == named(first)
        drained.result()
        assert swapped.result() == first + 1
    assert is_paused(url), "who has paused it resumes it"
    assert count(url, "num_preemptions_total") == before


def test_requests_that_somebody_has_stopped_half_way_go_on_under_the_new_policy_or_the_change_is_refused(
    server, policy, adapters, begun
):
    first, lines = policy.state()["version"], begun(600)
    pause(server[0], "keep")
    with pytest.raises(PolicyRefusedError, match="resume it first"):
        policy.swap(*adapters[1]["third"], requests="wait")
    assert policy.state()["version"] == first
    assert policy.swap(*adapters[1]["third"], requests="keep") == first + 1
    resume(server[0])
    assert last(lines) == named(f"{first}-{first + 1}")


def test_requests_that_somebody_lets_end_are_aborted_by_a_change_that_says_so(server, policy, adapters, begun):
    first, lines = policy.state()["version"], begun(3500)
    with ThreadPoolExecutor(1) as threads:
        drained = threads.submit(pause, server[0], "wait")
        while not is_paused(server[0]):
            assert not drained.done(), "the request has ended: nothing is tested"
        assert policy.swap(*adapters[1]["second"], requests="abort") == first + 1
        drained.result()
    assert '"finish_reason":"abort"' in "".join(lines).replace(" ", "")
    assert is_paused(server[0])


def test_requests_that_found_no_room_in_the_cache_end_before_a_change_that_waits(server, policy, adapters, begun):
    """vLLM puts them back and starts them anew when there is room, but not in an engine that is to come to rest."""
    first = policy.state()["version"]
    with ThreadPoolExecutor(7) as threads:  # the server has room for 8064 tokens, and each request will have 1400
        streams = list(threads.map(lambda i: begun(400, [9 + i, *[4, 5] * 500]), range(7)))
        while not count(server[0], "num_requests_waiting"):
            assert count(server[0], "num_requests_running"), "all have ended: nothing is tested"
        assert policy.swap(*adapters[1]["third"], requests="wait") == first + 1
        assert {last(lines) for lines in streams} == {named(first)}
