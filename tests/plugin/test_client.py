"""The client of /v1/qerl by itself."""

import asyncio
import ssl

import httpx
import pytest
import torch

from qerl_vllm_plugin import client
from qerl_vllm_plugin.adapter import AdapterError
from qerl_vllm_plugin.client import AsyncPolicyClient, PolicyClient

NOBODY = "http://127.0.0.1:9"


def test_certificates_are_read_once_and_servers_still_have_to_prove_who_they_are(monkeypatch):
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


def test_what_no_server_would_see_is_refused_before_one_is_asked():
    def later(*args, **keywords):
        return asyncio.run(AsyncPolicyClient(NOBODY, "token").swap(*args, **keywords))

    norm = {"model.norm.weight": torch.ones(64)}
    for swap in (PolicyClient(NOBODY, "token").swap, later):
        with pytest.raises(AdapterError, match="trained norms travel beside an adapter"):
            swap(None, norms=norm)
        with pytest.raises(AdapterError, match="an adapter needs its config"):
            swap(norm)
        with pytest.raises(AdapterError, match=r"model.norm.weight is a tensor of the adapter and a trained norm"):
            swap(norm, {"r": 4}, norms=norm)
        with pytest.raises(AdapterError, match="the adapter's config is int"):
            swap(norm, 4)
