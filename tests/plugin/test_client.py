"""Test the client of /v1/qerl without a server."""

import asyncio
import inspect
import ssl

import httpx
import pytest
import torch
from policy_requests import done
from safetensors.torch import save_file

from qerl_vllm_plugin import client
from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.client import AsyncPolicyClient, PolicyClient, PolicyRefusedError
from qerl_vllm_plugin.wire import shared_file

NOBODY = "http://127.0.0.1:9"
NO_URLS = ("127.0.0.1:8000", "", "ftp://x", "http://", "http://x/?a=1", "http://x/#a", "http://::1:1", None)
CLIENTS = [PolicyClient, AsyncPolicyClient]


def test_certificates_are_read_once_and_still_checked(monkeypatch):
    made, create = [], ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda *a, **k: made.append(create(*a, **k)) or made[-1])
    client._trusted.cache_clear()
    for url in (NOBODY, NOBODY.replace("http:", "https:")):
        for _ in range(2):
            with pytest.raises(httpx.ConnectError):
                PolicyClient(url, "token").state()
            with pytest.raises(httpx.ConnectError):
                asyncio.run(AsyncPolicyClient(url, "token").state())
    (trusted,) = made
    assert trusted.verify_mode is ssl.CERT_REQUIRED and trusted.check_hostname
    assert trusted.get_ca_certs()


NORM = {"model.norm.weight": torch.ones(64)}


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("given", "norms", "message"),
    [
        ((None,), NORM, "trained norms travel beside an adapter"),
        ((NORM,), None, "an adapter needs its config"),
        ((NORM, {"r": 4}), NORM, "model.norm.weight is a tensor of the adapter and a trained norm"),
        ((NORM, 4), None, "the adapter's config is int"),
        (([NORM], {"r": 4}), None, "tensors is list; give a dict of torch.Tensor by name"),
        (({"a": [1.0]}, {"r": 4}), None, "tensors holds 'a': list; give names with a dense torch.Tensor each"),
        ((NORM, {"r": 4}), {"b": torch.ones(2, device="meta")}, "norms holds 'b': torch.strided on meta; give"),
    ],
)
def test_an_adapter_is_refused_before_a_server_is_asked(kind, given, norms, message):
    with pytest.raises(AdapterError, match=message):
        done(kind(NOBODY, "token").swap(*given, norms=norms))


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"admin_token": token}, "^admin_token is no text.*stripped") for token in ("a-token\n", "a tokén", None)),
        ({"api_key": "a key\r\n"}, "^api_key is no text that a header can carry.*stripped"),
        ({"transport": "gpu"}, "transport is 'gpu'; it is one of auto, ipc, shared, http"),
        ({"url": "http://user:secret@x:1", "api_key": "key"}, "in place of the api_key"),
        *(({"url": url}, "^url is .*http://127.0.0.1:8000") for url in NO_URLS),
    ],
    ids=str,
)
def test_what_no_server_can_be_sent_is_refused_by_name(kind, options, message):
    with pytest.raises(ValueError, match=message) as refused:
        kind(**{"url": NOBODY, "admin_token": "token", **options})
    assert not any(secret in str(refused.value) for secret in ("a-token", "tokén", "a key", "secret"))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (httpx.Response(200, text="<html>Welcome</html>"), r"^<html>Welcome.*a server has /v1/qerl only where"),
        (httpx.Response(200, json=["ok"]), r"^\['ok'\]: a server has"),
        (httpx.Response(200, json={"status": "ok"}), r"^\{'status': 'ok'\}: a server has"),
        (httpx.Response(200), r"^an empty answer: a server has"),
        (
            httpx.Response(307, headers={"Location": "https://x/v1/qerl/state"}),
            r"/v1/qerl/state points to https://x/v1/qer",
        ),
        (httpx.Response(502, text="Bad Gateway"), r"^Bad Gateway \(HTTP 502\)$"),
    ],
)
def test_an_answer_of_no_policy_server_is_a_refusal(answer, text, monkeypatch):
    answer.request = httpx.Request("GET", f"{NOBODY}/v1/qerl/state")
    monkeypatch.setattr(httpx.Client, "request", lambda *given, **named: answer)
    policy = PolicyClient(NOBODY, "token")
    for call in (policy.state, lambda: policy.swap(None), lambda: policy.set_noise(0.1, seed=0, rollout=0)):
        with pytest.raises(PolicyRefusedError, match=text) as refused:
            call()
        assert refused.value.status == answer.status_code
    assert policy.answered == {}


@pytest.mark.parametrize(
    "url",
    ["http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/", "http://[::1]:1", "https://x/behind/a/path/"],
)
def test_the_url_is_the_servers_however_it_is_written(url):
    with httpx.Client(**PolicyClient(url, "token")._options) as client:
        asked = str(client.build_request("GET", "state").url)
    assert asked == url.rstrip("/").removesuffix("/v1") + "/v1/qerl/state"


@pytest.mark.parametrize(("mode", "seconds"), [("keep", 5), ("abort", 5), ("wait", 605)])
def test_a_change_that_waits_has_the_time_of_the_server(mode, seconds, monkeypatch):
    asked = []

    def request(client, **call):
        asked.append(client.build_request(**call).extensions["timeout"])
        return httpx.Response(200, json={"version": 1, "noisy_norms": 4})

    monkeypatch.setattr(httpx.Client, "request", request)
    policy = PolicyClient(NOBODY, "token", timeout=5, transport="http")
    policy.swap(None, requests=mode)
    policy.swap({"x": torch.ones(1)}, {}, requests=mode)
    policy.set_noise(0.1, seed=0, rollout=0, requests=mode)
    PolicyClient(NOBODY, "token", timeout=None).set_noise(0.1, seed=0, rollout=0, requests=mode)
    assert [found["read"] for found in asked] == [seconds] * 3 + [None]
    assert [found["connect"] for found in asked] == [5] * 3 + [None]


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("error", "text"), [(httpx.ConnectError("refused"), "refused"), (httpx.ReadTimeout(""), "ReadT")]
)
def test_a_server_that_does_not_answer_is_named(kind, error, text, monkeypatch):
    def request(*given, **named):
        error.request = httpx.Request("GET", NOBODY)
        raise error

    monkeypatch.setattr(httpx.Client, "request", request)
    monkeypatch.setattr(httpx.AsyncClient, "request", request)
    with pytest.raises(type(error), match=f"no answer from {NOBODY}/v1/qerl/: {text}") as raised:
        answer = kind(NOBODY, "token").state()
        asyncio.run(answer)
    assert raised.value.request is error.request


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sigma": float("nan")}, "noise sigma is nan; it must be a number from 0 to"),
        ({"seed": 1.5}, r"the noise's seed is 1\.5; it must be a whole number"),
        ({"targets": "norm"}, "the noise's targets are 'norm'; they must be a list"),
    ],
)
def test_noise_is_refused_before_a_server_is_asked(kind, values, message):
    with pytest.raises(ValueError, match=message):
        done(kind(NOBODY, "token").set_noise(**{"sigma": 0.1, "seed": 0, "rollout": 0, **values}))


@pytest.mark.parametrize("kind", CLIENTS)
def test_noise_is_cleared_by_a_sigma_of_0_whatever_it_was(kind, monkeypatch):
    asked = []

    def request(client, **call):
        asked.append(call)
        return httpx.Response(200, json={"touched": 0})  # as a server of the previous release answers

    async def later(client, **call):
        return request(client, **call)

    monkeypatch.setattr(httpx.Client, "request", request)
    monkeypatch.setattr(httpx.AsyncClient, "request", later)
    assert done(kind(NOBODY, "token").clear_noise(requests="wait")) is None
    (call,) = asked
    assert (call["method"], call["url"], call["params"]) == ("PUT", "noise", {"requests": "wait"})
    assert call["json"] == {"sigma": 0.0, "seed": 0, "rollout": 0}


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("by", ["swap", "swap_folder"])
def test_a_warning_names_the_callers_line(kind, by, monkeypatch, tmp_path):
    save_file(NORM, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    answer = httpx.Response(200, json={"version": 1, "base_hash": None, "gpus": [], "machine": shared_file.machine()})

    async def later(client, **call):
        return answer

    monkeypatch.setattr(httpx.Client, "request", lambda client, **call: answer)
    monkeypatch.setattr(httpx.AsyncClient, "request", later)
    monkeypatch.setattr(shared_file, "fits", lambda size: False)

    async def call():
        given = (tmp_path,) if by == "swap_folder" else (NORM, {})
        version = getattr(kind(NOBODY, "token"), by)(*given)
        return await version if inspect.isawaitable(version) else version

    with pytest.warns(UserWarning, match="adapters travel in messages, which is slower: .* has no room") as said:
        assert asyncio.run(call()) == 1
    assert [warning.filename for warning in said] == [__file__]


def test_a_client_shows_no_user_of_its_url():
    assert repr(PolicyClient("http://user:secret@x:1", "token")) == "PolicyClient(http://x:1/v1/qerl/)"


def test_the_blocking_client_has_the_methods_of_the_other():
    for name in ("swap", "swap_folder", "set_noise", "clear_noise", "state"):
        ours, theirs = (getattr(kind, name) for kind in CLIENTS)
        assert inspect.signature(ours) == inspect.signature(theirs) and ours.__doc__ == theirs.__doc__
        assert inspect.iscoroutinefunction(theirs) and not inspect.iscoroutinefunction(ours)
