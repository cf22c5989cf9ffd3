"""A client of /v1/qerl on a running server, synchronous and asynchronous; it needs torch, safetensors and httpx."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save

from qerl_vllm_plugin import adapter_folder

TOKEN_HEADER, VERSION_HEADER = "X-QeRL-Admin-Token", "X-QeRL-Policy-Version"


class PolicyRefusedError(RuntimeError):
    """The server refused a change, and serves what it served before; ``status`` is the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{text} (HTTP {status})")
        self.status = status


def body(tensors: Mapping[str, torch.Tensor], config: Any, norms: Mapping[str, torch.Tensor] | None = None) -> bytes:
    """What is sent for an adapter: one safetensors file in PEFT's names, with its config in the metadata.

    ``config`` is the content of ``adapter_config.json`` or PEFT's LoraConfig; ``norms`` are trained norms by their
    checkpoint names. A set of module names, as PEFT holds them, becomes a list.
    """
    plain = json.dumps(config.to_dict() if hasattr(config, "to_dict") else dict(config), default=adapter_folder.plain)
    # copies: safetensors refuses tensors that share memory, such as one A under two names
    on_cpu = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in {**tensors, **(norms or {})}.items()}
    return save(on_cpu, metadata={"adapter_config": plain})


class _Calls:
    """The calls as arguments of httpx, which both clients send in their own way."""

    def __init__(self, url: str, admin_token: str, api_key: str | None = None, timeout: float = 120.0) -> None:
        """``url`` is the server's, such as http://127.0.0.1:8000; ``api_key`` is that of --api-key."""
        headers = {TOKEN_HEADER: admin_token} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._options: dict[str, Any] = {
            "base_url": url.rstrip("/").removesuffix("/v1") + "/v1/qerl/",
            "headers": headers,
            "timeout": timeout,
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options['base_url']})"  # without the token

    @staticmethod
    def _swap(
        tensors: Mapping[str, torch.Tensor] | None, config: Any, norms: Any, version: int | None, requests: str
    ) -> dict[str, Any]:
        query = {"requests": requests} | ({} if version is None else {"version": str(version)})
        if tensors is None:
            return {"method": "DELETE", "url": "policy", "params": query}
        return {"method": "PUT", "url": "policy", "params": query, "content": body(tensors, config, norms)}

    @staticmethod
    def _noise(sigma: float, seed: int, rollout: int, targets: Sequence[str] | None, requests: str) -> dict[str, Any]:
        given: dict[str, Any] = {"sigma": sigma, "seed": seed, "rollout": rollout}
        given |= {} if targets is None else {"targets": list(targets)}
        return {"method": "PUT", "url": "noise", "params": {"requests": requests}, "json": given}

    @staticmethod
    def _answer(response: httpx.Response) -> dict[str, Any]:
        try:
            content = response.json()
        except ValueError:
            content = {"error": response.text[:200]}
        if response.status_code != 200:
            error = content.get("error") if isinstance(content, dict) else content
            raise PolicyRefusedError(response.status_code, str(error))
        return content


class PolicyClient(_Calls):
    """The policy of a server; every method raises PolicyRefusedError, and httpx.HTTPError where there is no answer.

    After the latter a swap may be repeated with the same version: if it had been made, nothing happens.
    """

    def swap(
        self,
        tensors: Mapping[str, torch.Tensor] | None,
        config: Any = None,
        *,
        norms: Mapping[str, torch.Tensor] | None = None,
        version: int | None = None,
        requests: str = "keep",
    ) -> int:
        """Install an adapter in place of the current one, None for the base alone -> the version that is served.

        ``requests``: running ones go on under the new policy (keep), end first (wait), or are aborted.
        """
        return int(self._send(self._swap(tensors, config, norms, version, requests))["version"])

    def swap_folder(self, folder: str | Path, *, version: int | None = None, requests: str = "keep") -> int:
        """Install the adapter of a folder of this machine, as ``Policy.swap_folder`` does."""
        saved = adapter_folder.read(folder)
        return self.swap(saved.tensors, saved.config, norms=saved.norms, version=version, requests=requests)

    def set_noise(
        self, sigma: float, *, seed: int, rollout: int, targets: Sequence[str] | None = None, requests: str = "keep"
    ) -> int:
        """Set the noise on the norms -> how many carry it; sigma 0 gives them back their bits."""
        return int(self._send(self._noise(sigma, seed, rollout, targets, requests))["touched"])

    def state(self) -> dict[str, Any]:
        """Version, hash of the adapter, noise, largest rank and size, hash of the base."""
        return self._send({"method": "GET", "url": "state"})

    def _send(self, call: dict[str, Any]) -> dict[str, Any]:
        with httpx.Client(**self._options) as client:
            return self._answer(client.request(**call))


class AsyncPolicyClient(_Calls):
    """``PolicyClient`` for asyncio."""

    async def swap(
        self,
        tensors: Mapping[str, torch.Tensor] | None,
        config: Any = None,
        *,
        norms: Mapping[str, torch.Tensor] | None = None,
        version: int | None = None,
        requests: str = "keep",
    ) -> int:
        return int((await self._send(self._swap(tensors, config, norms, version, requests)))["version"])

    async def swap_folder(self, folder: str | Path, *, version: int | None = None, requests: str = "keep") -> int:
        saved = adapter_folder.read(folder)
        return await self.swap(saved.tensors, saved.config, norms=saved.norms, version=version, requests=requests)

    async def set_noise(
        self, sigma: float, *, seed: int, rollout: int, targets: Sequence[str] | None = None, requests: str = "keep"
    ) -> int:
        return int((await self._send(self._noise(sigma, seed, rollout, targets, requests)))["touched"])

    async def state(self) -> dict[str, Any]:
        return await self._send({"method": "GET", "url": "state"})

    async def _send(self, call: dict[str, Any]) -> dict[str, Any]:
        async with httpx.AsyncClient(**self._options) as client:
            return self._answer(await client.request(**call))
