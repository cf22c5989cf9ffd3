"""Test that each route which answers with tokens names the policy, also one that changed during the answer."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from policy_requests import API_KEY, VERSION
from waiting import PATIENCE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
TRIES = 8  # retries where a stall of the machine at the wrong moment leaves a case untested
TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
IDS = [9, 4, 5]
TURN = [{"role": "user", "content": "1+2="}]
SAID = {"messages": TURN, "chat_template": "{{ messages[0]['content'] }}"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
BEAMS = {"use_beam_search": True, "n": 2, "temperature": 0.0}
# path, request body, and the key that limits the tokens
KINDS = {
    "text": (TEXT, {"prompt": IDS, "logprobs": 0, "logit_bias": {"7": 5, "8": -5.0}}, "max_tokens"),
    "prompts": (TEXT, {"prompt": [IDS, [7]], "echo": True, "logprobs": 1}, "max_tokens"),
    "n_stream": (TEXT, {"prompt": IDS, "n": 3, "temperature": 1.0, "stream": True}, "max_tokens"),
    "beams": (TEXT, {"prompt": IDS, **BEAMS}, "max_tokens"),
    "chat_tools": (CHAT, {**SAID, "tools": [TOOL], "tool_choice": "none"}, "max_completion_tokens"),
    "chat_n_stream": (CHAT, {**SAID, "n": 2, "stream": True}, "max_completion_tokens"),
    "chat_batch": (f"{CHAT}/batch", {"messages": [TURN, TURN]}, "max_tokens"),
    "responses": (RESPONSES, {"input": "1+2="}, "max_output_tokens"),
    "responses_stream": (RESPONSES, {"input": "1+2=", "stream": True}, "max_output_tokens"),
    "messages_stream": ("/v1/messages", {"messages": TURN, "stream": True}, "max_tokens"),
    "invocations": ("/invocations", {"prompt": IDS}, "max_tokens"),
    "scores": ("/generative_scoring", {"query": IDS, "items": [[5], [6]], "label_token_ids": [7, 8]}, None),
}


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server[0], headers={"Authorization": f"Bearer {API_KEY}"}, timeout=PATIENCE) as client:
        yield client


def asked(http, kind, tokens):
    path, given, key = KINDS[kind]
    return http.post(path, json={**given, "model": "policy", **({key: tokens, "ignore_eos": True} if key else {})})


def named(answer):
    """Return the policy version in an answer's header and the one in the last line of a stream."""
    assert answer.status_code == 200, answer.text
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    assert ("X-QeRL-Policy-Version" in answer.text) == is_stream
    last = answer.text.strip().rpartition("\n")[2].removeprefix(": X-QeRL-Policy-Version: ") if is_stream else None
    return answer.headers.get(VERSION), last


def test_its_answer_names_the_policy(http, policy):
    version = str(policy.state()["version"])
    found = {kind: named(asked(http, kind, 3)) for kind in KINDS}
    expected = {kind: (version, version if given.get("stream") else None) for kind, (_, given, _) in KINDS.items()}
    # the stream begins before the engine is asked for anything, so its header names no version
    assert found == {**expected, "responses_stream": (None, version)}


def generated(http):
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


@pytest.mark.parametrize(
    ("kind", "mode"), [("prompts", "wait"), ("n_stream", "keep"), ("n_stream", "abort"), ("beams", "abort")]
)
def test_a_change_in_the_middle_of_an_answer_is_named(kind, mode, http, policy, adapters):
    # a beam search makes one engine request a token, so a change does not wait for its end
    both = mode == "keep" or kind == "beams"
    for _ in range(TRIES):
        first, before = policy.state()["version"], generated(http)
        with ThreadPoolExecutor(1) as threads:
            answered = threads.submit(asked, http, kind, 80 if kind == "beams" else 200)
            while not answered.done() and generated(http) < before + 8:
                time.sleep(0.01)
            assert policy.swap(*adapters[1]["second"], requests=mode) == first + 1
            went_on = not answered.done()
        header, last = named(answered.result())
        was_aborted = "abort" in answered.result().text
        if went_on if both else was_aborted or mode == "wait":
            break  # otherwise it had ended before the change
    assert (last or header) == (f"{first}-{first + 1}" if both else str(first))
    assert was_aborted == (mode == "abort" and kind != "beams")


def test_an_answer_without_tokens_names_no_policy(http):
    for path, given in (
        ("/tokenize", {"prompt": "1+2="}),
        ("/v1/completions/render", {"prompt": IDS}),
        (TEXT, {"prompt": IDS, "max_tokens": 0, "n": 0}),
    ):
        answer = http.post(path, json={"model": "policy", **given})
        assert VERSION not in answer.headers and "X-QeRL" not in answer.text, path
