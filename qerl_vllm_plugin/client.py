"""Provide the synchronous and the asynchronous client of a running server's /v1/qerl; they need torch and httpx."""

import functools
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch

from qerl_vllm_plugin.adapter import folder as adapter_folder
from qerl_vllm_plugin.client_body import body, gpu_body
from qerl_vllm_plugin.client_calls import STATE, TOKEN_HEADER, TRANSPORTS, Call, Calls, PolicyRefusedError, query
from qerl_vllm_plugin.wire.shared_segment import enter

VERSION_HEADER = "X-QeRL-Policy-Version"  # on every answer that holds tokens

__all__ = [
    "TOKEN_HEADER",
    "TRANSPORTS",
    "VERSION_HEADER",
    "AsyncPolicyClient",
    "PolicyClient",
    "PolicyRefusedError",
    "body",
    "gpu_body",
]


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the certificates that httpx trusts, read once.

    httpx would read them again for every call, which takes longer than a swap.
    """
    return httpx.create_ssl_context()


class PolicyClient(Calls):
    """Changes the policy of one server.

    Every method raises PolicyRefusedError if the server refuses, and httpx.HTTPError if no answer comes. After
    httpx.HTTPError a swap may be repeated with the same ``version``: if it had been made, nothing happens.
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
        """Install an adapter in place of the current one and return the version that is served.

        ``tensors`` is PEFT's state dict; None serves the base alone. ``requests`` says what happens to running
        requests: they go on under the new policy ("keep"), end first ("wait"), or are aborted ("abort").
        Raises AdapterError for an adapter without its config, norms without an adapter, or a name in both.
        """
        (given, config), said = self._given(tensors, config, norms), query(version, requests)
        if self._asks_first(given):
            self._place = self.state()
        with self._by_gpu(given, config, said) as call:
            if call is not None:
                return int(self._send(call)["version"])
        with self._by_memory(given, config, said) as call:
            if call is not None:
                return int(self._send(call)["version"])
        return int(self._send(self._swap(given, config, said))["version"])

    def swap_folder(self, folder: str | Path, *, version: int | None = None, requests: str = "keep") -> int:
        """Install the adapter of a folder on this machine, as ``Policy.swap_folder`` does.

        Raises AdapterError for a damaged folder or one that names another base.
        """
        self._check_base(folder, self.state())
        saved = adapter_folder.read(folder)
        return self.swap(saved.tensors, saved.config, norms=saved.norms, version=version, requests=requests)

    def set_noise(
        self, sigma: float, *, seed: int, rollout: int, targets: Sequence[str] | None = None, requests: str = "keep"
    ) -> int:
        """Set the noise on the norms and return how many carry it; sigma 0 restores them bit for bit."""
        return int(self._send(self._noise(sigma, seed, rollout, targets, requests))["touched"])

    def clear_noise(self, *, requests: str = "keep") -> None:
        """Restore the norms without noise, bit for bit."""
        self.set_noise(0.0, seed=0, rollout=0, requests=requests)

    def state(self) -> dict[str, Any]:
        """Return the server's state.

        It holds the version, the number of changes, the adapter's hash, the noise, the largest rank and size, the
        base's hash, and the counters, among others.
        """
        return self._send(STATE)

    def _send(self, call: Call) -> dict[str, Any]:
        with httpx.Client(**self._options, verify=_trusted()) as client:
            return self._answer(client.request(**self._in_time(call)))


class AsyncPolicyClient(Calls):
    """Does what ``PolicyClient`` does, for asyncio."""

    async def swap(
        self,
        tensors: Mapping[str, torch.Tensor] | None,
        config: Any = None,
        *,
        norms: Mapping[str, torch.Tensor] | None = None,
        version: int | None = None,
        requests: str = "keep",
    ) -> int:
        (given, config), said = self._given(tensors, config, norms), query(version, requests)
        if self._asks_first(given):
            self._place = await self.state()
        with self._by_gpu(given, config, said) as call:  # in this thread: its CUDA stream computes the tensors
            if call is not None:
                return int((await self._send(call))["version"])
        with ExitStack() as held:
            call = await enter(self._by_memory(given, config, said), held)
            if call is not None:
                return int((await self._send(call))["version"])
        return int((await self._send(self._swap(given, config, said)))["version"])

    async def swap_folder(self, folder: str | Path, *, version: int | None = None, requests: str = "keep") -> int:
        self._check_base(folder, await self.state())
        saved = adapter_folder.read(folder)
        return await self.swap(saved.tensors, saved.config, norms=saved.norms, version=version, requests=requests)

    async def set_noise(
        self, sigma: float, *, seed: int, rollout: int, targets: Sequence[str] | None = None, requests: str = "keep"
    ) -> int:
        return int((await self._send(self._noise(sigma, seed, rollout, targets, requests)))["touched"])

    async def clear_noise(self, *, requests: str = "keep") -> None:
        await self.set_noise(0.0, seed=0, rollout=0, requests=requests)

    async def state(self) -> dict[str, Any]:
        return await self._send(STATE)

    async def _send(self, call: Call) -> dict[str, Any]:
        if isinstance(pieces := call.get("content"), Iterator):
            call = {**call, "content": _one_by_one(pieces)}
        async with httpx.AsyncClient(**self._options, verify=_trusted()) as client:
            return self._answer(await client.request(**self._in_time(call)))


async def _one_by_one(pieces: Iterator[memoryview]) -> AsyncIterator[memoryview]:
    """Yield the pieces asynchronously, as httpx.AsyncClient needs them."""
    for piece in pieces:
        yield piece
