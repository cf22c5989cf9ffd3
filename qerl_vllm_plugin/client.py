"""A client of /v1/qerl on a running server, synchronous and asynchronous; it needs torch and httpx."""

import asyncio
import functools
import hashlib
import json
import ssl
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from qerl_vllm_plugin import adapter_folder, cuda_ipc, gpu_tensors, shared_file
from qerl_vllm_plugin.adapter import AdapterError
from qerl_vllm_plugin.checksum import checksums
from qerl_vllm_plugin.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.safetensors_header import header_bytes
from qerl_vllm_plugin.segment import NoRoomError, Segments

TOKEN_HEADER, VERSION_HEADER = "X-QeRL-Admin-Token", "X-QeRL-Policy-Version"


TRANSPORTS = ("auto", "ipc", "shared", "http")
PIECE = 256 << 10
NO_ROUTES = (
    "a server has /v1/qerl only where VLLM_PLUGINS names qerl and QERL_ADMIN_TOKEN or QERL_ADMIN_TOKEN_FILE is set; "
    "the client's url is the server's, such as http://127.0.0.1:8000"
)
UNREACHABLE = "unreachable"  # the reason of a refusal that is only of the way


class PolicyRefusedError(RuntimeError):
    """The server refused a change, and serves what it served before; ``status`` is the HTTP status, ``reason`` the word
    under which the server counts the refusal."""

    def __init__(self, status: int, text: str, reason: str = "") -> None:
        super().__init__(f"{text} (HTTP {status})")
        self.status, self.reason = status, reason


class UnreachableError(Exception):
    """The server cannot read this process's shared memory."""


def body(tensors: Mapping[str, torch.Tensor], config: Any, norms: Mapping[str, torch.Tensor] | None = None) -> bytes:
    """What is sent for an adapter: one safetensors file in PEFT's names, with its config in the metadata.

    ``config`` is the content of ``adapter_config.json`` or PEFT's LoraConfig; ``norms`` are trained norms by their
    checkpoint names. A set of module names, as PEFT holds them, becomes a list.
    """
    return b"".join(_pieces({**tensors, **(norms or {})}, config))


def _pieces(tensors: Mapping[str, torch.Tensor], config: Any) -> Iterator[memoryview]:
    """The body from its beginning to its end. Small ones: httpcore copies what is left of a piece with every write."""
    layout = ((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    yield memoryview(header_bytes(layout, _metadata(config)))
    for tensor in tensors.values():
        left = memoryview(shared_file.content(tensor).numpy())
        while left:
            yield left[:PIECE]
            left = left[PIECE:]


@contextmanager
def gpu_body(tensors: Mapping[str, torch.Tensor], config: Any) -> Iterator[bytes]:
    """What is sent for tensors on a GPU of the server's machine, which it may read until the end of the block.

    The file that is named as proof shows that the caller is a process of the server's user on its machine. Raises
    CudaIPCError.
    """
    with gpu_tensors.described(tensors) as (text, memory):
        listed = [json.loads(text)["tensors"], checksums([memory])]
        given = {"memory": text, "checksum": hashlib.sha256(json.dumps(listed).encode()).hexdigest()}
        with shared_file.proof(hashlib.sha256(text.encode()).digest()) as path:
            yield json.dumps({**given, "proof": path, "adapter_config": _plain(config)}).encode()


async def _one_by_one(pieces: Iterator[memoryview]) -> AsyncIterator[memoryview]:
    """For the asynchronous httpx."""
    for piece in pieces:
        yield piece


def _metadata(config: Any) -> dict[str, str]:
    return {"adapter_config": json.dumps(_plain(config))}


def _plain(config: Any) -> dict[str, Any]:
    given = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return json.loads(json.dumps(given, default=adapter_folder.plain))


def _query(version: int | None, requests: str) -> dict[str, str]:
    return {"requests": requests} | ({} if version is None else {"version": str(version)})


def _put_named(kind: str, content: bytes, version: int | None, requests: str) -> dict[str, Any]:
    """The call for an adapter that stays where it is; ``content`` says where."""
    query, headers = _query(version, requests), {"Content-Type": kind}
    return {"method": "PUT", "url": "policy", "params": query, "headers": headers, "content": content}


@contextmanager
def _another_way(error: type[Exception]) -> Iterator[None]:
    """Raises ``error`` in place of a refusal that is only of the way."""
    try:
        yield
    except PolicyRefusedError as refused:
        if refused.reason != UNREACHABLE:
            raise
        raise error(str(refused)) from refused


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The certificates that httpx trusts; it would read them again for every call, which takes longer than a swap."""
    return httpx.create_ssl_context()


class _Calls:
    """The calls as arguments of httpx, which both clients send in their own way."""

    def __init__(
        self,
        url: str,
        admin_token: str,
        api_key: str | None = None,
        timeout: float = 120.0,
        *,
        transport: str = "auto",
    ) -> None:
        """``url`` is the server's, such as http://127.0.0.1:8000; ``api_key`` is that of --api-key.

        ``transport``: tensors on a GPU that the server sees go from GPU to GPU, others to a server of this machine
        through shared memory, and all that is left in the request's body (auto); or one of the three alone (ipc,
        shared, http). What goes through shared memory stays there, as large as the adapter, for the next swap, and
        ends with the client. Raises ValueError for another one.
        """
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}; it is one of {', '.join(TRANSPORTS)}")
        self._transport = transport
        self._place: dict[str, Any] | None = None  # the server's machine and its GPUs, once it has been asked
        self._unreachable: str | None = None
        self._segments = Segments(PolicyRefusedError)
        self._has_no_memory = False  # that the server could read
        self.answered: dict[str, Any] = {}  # what the server answered last: of a change, its seconds by part, too
        headers = {TOKEN_HEADER: admin_token} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._options: dict[str, Any] = {
            "base_url": url.rstrip("/").removesuffix("/v1") + "/v1/qerl/",
            "headers": headers,
            "timeout": timeout,
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options['base_url']})"  # without the token

    @staticmethod
    def _given(
        tensors: Mapping[str, torch.Tensor] | None, config: Any, norms: Mapping[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor] | None:
        """All that is sent. Raises AdapterError for what the server would never see."""
        if tensors is None and norms:
            raise AdapterError("trained norms travel beside an adapter: give its tensors and its config, too")
        if tensors is not None and config is None:
            raise AdapterError("an adapter needs its config: the content of adapter_config.json")
        return None if tensors is None else {**tensors, **(norms or {})}

    @staticmethod
    def _check_base(folder: str | Path, state: Mapping[str, Any]) -> None:
        """Raises AdapterError for a folder that says it was trained on another base than the server's."""
        trained_on = adapter_folder.trained_on(folder)
        if trained_on is not None and state["base_hash"] not in (None, trained_on):
            raise AdapterError(f"{folder} was trained on another base than the server's ({state['base']})")

    @staticmethod
    def _swap(
        tensors: Mapping[str, torch.Tensor] | None, config: Any, norms: Any, version: int | None, requests: str
    ) -> dict[str, Any]:
        query = _query(version, requests)
        if tensors is None:
            return {"method": "DELETE", "url": "policy", "params": query}
        given = {**tensors, **(norms or {})}
        length = len(next(_pieces(given, config))) + sum(tensor.nbytes for tensor in given.values())
        return {
            "method": "PUT",
            "url": "policy",
            "params": query,
            "headers": {"Content-Length": str(length)},
            "content": _pieces(given, config),
        }

    def _is_for_gpu(self, tensors: Mapping[str, torch.Tensor] | None) -> bool:
        """Whether the tensors are to be read from their GPU, which needs ``_place``. Raises PolicyRefusedError where
        they must and cannot."""
        if not tensors or self._transport in ("http", "shared"):
            return False
        reason = self._unreachable or gpu_tensors.why_not(tensors)
        if reason is not None:
            self._without_gpu(reason, tensors)
        return reason is None

    def _is_near(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the server sees the GPU of these tensors."""
        assert self._place is not None
        gpu = cuda_ipc.uuid(next(iter(tensors.values())).device)
        if self._place.get("machine") == shared_file.machine() and gpu in self._place.get("gpus", ()):
            return True
        self._without_gpu(f"the server does not see GPU {gpu} of this machine", tensors)
        return False

    def _without_gpu(self, reason: str, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._transport == "ipc":
            raise PolicyRefusedError(0, f"transport is 'ipc', and {reason}", UNREACHABLE)
        if self._unreachable is None and any(tensor.is_cuda for tensor in tensors.values()):
            self._unreachable = reason
            warnings.warn(f"adapters travel through the CPU, which is slower: {reason}", stacklevel=4)

    def _is_for_memory(self, tensors: Mapping[str, torch.Tensor] | None) -> bool:
        """Whether the tensors may go through shared memory, if the server is of this machine, as ``_place`` says."""
        return bool(tensors) and self._transport in ("auto", "shared") and not self._has_no_memory

    def _is_here(self) -> bool:
        """Whether the server is of this machine. Raises PolicyRefusedError where it must be and is not."""
        assert self._place is not None
        is_here = bool(self._place.get("machine") == shared_file.machine())
        if not is_here:
            self._has_no_memory = True  # its body is the way then, and no slower than another
            self._check_way("the server is on another machine")
        return is_here

    def _without_memory(self, reason: str) -> None:
        self._check_way(reason)
        self._has_no_memory = True
        warnings.warn(f"adapters travel in the requests' bodies, which is slower: {reason}", stacklevel=3)

    def _check_way(self, reason: str) -> None:
        if self._transport == "shared":
            raise PolicyRefusedError(0, f"transport is 'shared', and {reason}", UNREACHABLE)

    @contextmanager
    def _memory_swap(
        self, tensors: Mapping[str, torch.Tensor], config: Any, version: int | None, requests: str
    ) -> Iterator[dict[str, Any]]:
        """Raises NoRoomError, UnreachableError, and what the sending raises."""
        with self._segments.filled(tensors, _metadata(config)) as path, _another_way(UnreachableError):
            content = json.dumps({"file": path}).encode()
            yield _put_named(shared_file.MEDIA_TYPE, content, version, requests)

    @contextmanager
    def _gpu_swap(
        self, tensors: Mapping[str, torch.Tensor], config: Any, version: int | None, requests: str
    ) -> Iterator[dict[str, Any]]:
        """Raises CudaIPCError, and what the sending raises unless it is of the GPU alone."""
        with gpu_body(tensors, config) as content, _another_way(CudaIPCError):
            yield _put_named(gpu_tensors.MEDIA_TYPE, content, version, requests)

    @staticmethod
    def _noise(sigma: float, seed: int, rollout: int, targets: Sequence[str] | None, requests: str) -> dict[str, Any]:
        given: dict[str, Any] = {"sigma": sigma, "seed": seed, "rollout": rollout}
        given |= {} if targets is None else {"targets": list(targets)}
        return {"method": "PUT", "url": "noise", "params": {"requests": requests}, "json": given}

    def _answer(self, response: httpx.Response) -> dict[str, Any]:
        try:
            content = response.json()
        except ValueError:
            content = {"error": response.text[:200]}
        if response.status_code != 200:
            found = content if isinstance(content, dict) else {"error": content}
            text = str(found.get("error", content))
            if response.status_code == 404 and "reason" not in found:
                text = f"{text}: {NO_ROUTES}"
            raise PolicyRefusedError(response.status_code, text, str(found.get("reason", "")))
        self.answered = content
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
        Raises AdapterError for an adapter without its config, and norms without an adapter.
        """
        given = self._given(tensors, config, norms)
        if given and self._is_for_gpu(given):
            self._place = self._place or self.state()
            if self._is_near(given):
                try:
                    with self._gpu_swap(given, config, version, requests) as call:
                        return int(self._send(call)["version"])
                except CudaIPCError as error:
                    self._without_gpu(str(error), given)
        if given and self._is_for_memory(given):
            self._place = self._place or self.state()
            if self._is_here():
                try:
                    with self._memory_swap(given, config, version, requests) as call:
                        return int(self._send(call)["version"])
                except (NoRoomError, UnreachableError) as error:
                    self._without_memory(str(error))
        return int(self._send(self._swap(tensors, config, norms, version, requests))["version"])

    def swap_folder(self, folder: str | Path, *, version: int | None = None, requests: str = "keep") -> int:
        """Install the adapter of a folder of this machine, as ``Policy.swap_folder`` does.

        Raises AdapterError for a damaged folder or one that names another base.
        """
        self._check_base(folder, self.state())
        saved = adapter_folder.read(folder)
        return self.swap(saved.tensors, saved.config, norms=saved.norms, version=version, requests=requests)

    def set_noise(
        self, sigma: float, *, seed: int, rollout: int, targets: Sequence[str] | None = None, requests: str = "keep"
    ) -> int:
        """Set the noise on the norms -> how many carry it; sigma 0 gives them back their bits."""
        return int(self._send(self._noise(sigma, seed, rollout, targets, requests))["touched"])

    def state(self) -> dict[str, Any]:
        """Version, hash of the adapter, noise, largest rank and size, hash of the base, counters."""
        return self._send({"method": "GET", "url": "state"})

    def _send(self, call: dict[str, Any]) -> dict[str, Any]:
        with httpx.Client(**self._options, verify=_trusted()) as client:
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
        given = self._given(tensors, config, norms)
        if given and self._is_for_gpu(given):
            self._place = self._place or await self.state()
            if self._is_near(given):
                try:
                    with self._gpu_swap(given, config, version, requests) as call:
                        return int((await self._send(call))["version"])
                except CudaIPCError as error:
                    self._without_gpu(str(error), given)
        if given and self._is_for_memory(given):
            self._place = self._place or await self.state()
            if self._is_here():
                try:
                    return await self._swap_through_memory(given, config, version, requests)
                except (NoRoomError, UnreachableError) as error:
                    self._without_memory(str(error))
        return int((await self._send(self._swap(tensors, config, norms, version, requests)))["version"])

    async def _swap_through_memory(
        self, given: Mapping[str, torch.Tensor], config: Any, version: int | None, requests: str
    ) -> int:
        with ExitStack() as stack:
            # in a thread: a large adapter takes a while to be written
            filled = self._memory_swap(given, config, version, requests)
            call = await asyncio.to_thread(stack.enter_context, filled)
            return int((await self._send(call))["version"])

    async def swap_folder(self, folder: str | Path, *, version: int | None = None, requests: str = "keep") -> int:
        self._check_base(folder, await self.state())
        saved = adapter_folder.read(folder)
        return await self.swap(saved.tensors, saved.config, norms=saved.norms, version=version, requests=requests)

    async def set_noise(
        self, sigma: float, *, seed: int, rollout: int, targets: Sequence[str] | None = None, requests: str = "keep"
    ) -> int:
        return int((await self._send(self._noise(sigma, seed, rollout, targets, requests)))["touched"])

    async def state(self) -> dict[str, Any]:
        return await self._send({"method": "GET", "url": "state"})

    async def _send(self, call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(pieces := call.get("content"), Iterator):
            call = {**call, "content": _one_by_one(pieces)}
        async with httpx.AsyncClient(**self._options, verify=_trusted()) as client:
            return self._answer(await client.request(**call))
