"""Test that what a request gives twice, or in two ways, is refused by name before the engine is asked."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
import torch
from policy_requests import TOKEN

from qerl_vllm_plugin.client import PolicyClient, PolicyRefusedError, body
from qerl_vllm_plugin.wire.body import Refused
from qerl_vllm_plugin.wire.shared_segment import Segments

NOISE = '{"sigma": 0.1, "seed": 1, "rollout": 7'


@pytest.fixture
def send(client_of):
    """send(method, path, **request) returns the answer of routes without an engine. A route that asks the engine
    fails."""

    def ask(method, path, token=TOKEN, **request):
        async def run():
            server = SimpleNamespace(limit=1 << 20, segments=Segments(Refused), set_noise=None)
            async with client_of(server, token) as client:
                return await client.request(method, path, **request)

        return asyncio.run(run())

    return ask


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "!"])
def test_every_route_needs_the_token(send, token):
    calls = [("PUT", "policy"), ("DELETE", "policy"), ("PUT", "noise"), ("DELETE", "noise"), ("GET", "state")]
    for method, path in calls:
        answer = send(method, path, token)
        assert (answer.status_code, answer.json()["reason"]) == (401, "unauthorized")


async def in_pieces(content):
    yield content


@pytest.mark.parametrize(
    ("method", "path", "content", "said"),
    [
        ("PUT", "policy?folder=a&version=5&version=2", b"", "the parameter 'version' is given more than once"),
        ("PUT", "policy?requests=wait&requests=wait", b"", "the parameter 'requests' is given more than once"),
        ("DELETE", "noise?requests=wait&requests=abort", b"", "the parameter 'requests' is given more than once"),
        ("PUT", "policy?folder=a", b"x", "in a folder or in the body: give one, not both"),
        ("PUT", "policy?folder=a", in_pieces(b"x"), "in a folder or in the body: give one, not both"),
        ("PUT", "noise", NOISE + ', "seed": 9}', "a JSON object has the key 'seed' more than once"),
        (
            "PUT",
            "policy",
            b"",
            "the body is empty, so no safetensors file: send one, or name a folder with ?folder=NAME",
        ),
    ],
)
def test_what_is_given_twice_or_not_at_all_is_refused(send, method, path, content, said):
    answer = send(method, path, content=content)
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_a_config_with_a_repeated_key_is_refused(send):
    file = body({"a": torch.ones(1)}, {"r": 4})
    twice = file.replace(rb"{\"r\": 4}", rb"{\"r\":4,\"r\":8}")
    twice = (len(twice) - len(file) + int.from_bytes(file[:8], "little")).to_bytes(8, "little") + twice[8:]
    assert b"more than once" in send("PUT", "policy", content=twice).content
    deep = NOISE + ', "targets": ' + '[{"a": 1, "a": 2}]}'
    assert b"the key 'a' more than once" in send("PUT", "noise", content=deep).content
    many = json.dumps({str(i): 0 for i in range(5000)})[:-1] + ', "4999": 1}'
    assert b"the key '4999' more than once" in send("PUT", "noise", content=many).content


def test_a_client_says_which_routes_are_missing():
    client = PolicyClient("http://127.0.0.1:8000/v1", TOKEN)
    for content in ({"detail": "Not Found"}, {"error": {"message": "not found", "code": 404}}):
        with pytest.raises(
            PolicyRefusedError, match="only where VLLM_PLUGINS names qerl and QERL_ADMIN_TOKEN"
        ) as error:
            client._answer(httpx.Response(404, json=content))
        assert "ot found" in str(error.value).lower() and "None" not in str(error.value)
    refusal = {"error": "there is no folder 'x' directly below policy_folders", "reason": "no_folder"}
    with pytest.raises(PolicyRefusedError) as error:
        client._answer(httpx.Response(404, json=refusal))
    assert str(error.value) == f"{refusal['error']} (HTTP 404)"
