"""Test that user and password in a server's address are sent to the server, and appear in no text for readers."""

import asyncio
import base64
import functools
import logging

import httpx
import pytest

from qerl_vllm_plugin.client import AsyncPolicyClient, PolicyClient
from qerl_vllm_plugin.wire.address import hidden, parted, shown

SECRET = "se/cret@ü:?"
IN_A_URL = "se%2Fcret%40%C3%BC:%3F"  # the first colon ends the user


@pytest.mark.parametrize(
    ("url", "plain", "login"),
    [
        ("http://gpu1:8000/v1", "http://gpu1:8000/v1", None),
        ("http://user:pass@gpu1:8000/v1", "http://gpu1:8000/v1", ("user", "pass")),
        (f"https://user:{IN_A_URL}@[::1]:1/", "https://[::1]:1/", ("user", SECRET)),
        ("http://user@gpu1", "http://gpu1", ("user", "")),
        ("http://a:b@c@gpu1", "http://gpu1", ("a", "b@c")),
    ],
)
def test_a_url_is_parted_from_whom_it_names(url, plain, login):
    assert parted(url) == (plain, login)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://gpu1:8000/v1", "http://gpu1:8000/v1"),
        ("http://user:pass@gpu1:8000", "http://***@gpu1:8000"),
        ("user:pass@gpu1:8000", "***@gpu1:8000"),
        ("http://user:pa@ss@gpu1", "http://***@gpu1"),
        ("http://gpu1/?token=pass", "http://gpu1/?***"),
        ("http://gpu1/#pass", "http://gpu1/#***"),
        ("http://user:pa/ss@gpu1", "http://***"),  # or a path with an @, so the password may be on either side
        ("http://gpu1/?token=x@pass", "http://***"),
        ("http://user:pass@gpu1:8000\n", "http://***@gpu1:8000\n"),
        (None, "None"),
    ],
)
def test_nothing_of_a_password_or_a_query_is_shown(url, text):
    assert shown(url) == text


def test_every_url_of_a_text_is_hidden():
    said = "qerl train --vllm_server_base_url=http://a:pass@gpu1:1 --to me@x.org 'https://b:pass@gpu2' http://gpu3/?a=1"
    assert hidden(said) == said.replace("a:pass", "***").replace("b:pass", "***")


URL, WANTED = f"http://user:{IN_A_URL}@127.0.0.1:8000", "Basic " + base64.b64encode(f"user:{SECRET}".encode()).decode()


@pytest.fixture
def asked(monkeypatch):
    """Record the paths of requests to a server that wants a user and a password."""
    paths: list[str] = []

    def answer(request):
        paths.append(request.url.path)
        is_known = request.headers.get("Authorization") == WANTED
        return httpx.Response(200, json={"version": 3}) if is_known else httpx.Response(401, json={"error": "who?"})

    transport = httpx.MockTransport(answer)
    for kind in ("Client", "AsyncClient"):
        monkeypatch.setattr(httpx, kind, functools.partial(getattr(httpx, kind), transport=transport))
    return paths


def test_a_client_tells_the_server_who_asks_and_no_log(asked, caplog):
    with caplog.at_level(logging.DEBUG, logger="httpx"):
        policy, later = PolicyClient(URL, "token"), AsyncPolicyClient(URL, "token")
        assert policy.state() == asyncio.run(later.state()) == {"version": 3}
    assert asked == ["/v1/qerl/state"] * 2
    assert "127.0.0.1" in caplog.text  # httpx logs each request
    for text in (caplog.text, repr(policy), repr(later)):
        assert "cret" not in text and "user" not in text


@pytest.mark.parametrize(
    "url",
    [
        "http://user:pass@gpu1/?token=pass",
        "http://user:pa/pass@gpu1",
        "http://user:80/pass@gpu1",
        "http://user:pass@gpu1:port",
        "http://user:pass@[gpu1",
        "ftp://user:pass@gpu1",
        "user:pass@gpu1",
    ],
)
def test_a_url_that_is_refused_is_shown_without_them(url):
    with pytest.raises(ValueError, match=r"^url is .*http://127\.0\.0\.1:8000") as refused:
        PolicyClient(url, "token")
    assert "pass@" not in str(refused.value) and "=pass" not in str(refused.value)
    assert ":pass" not in str(refused.value)
