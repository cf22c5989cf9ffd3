"""Provide the synchronous and the asynchronous client of a running server's /v1/qerl; they need torch and httpx.

Both run the same coroutines. An adapter travels in one of three ways (wire/sender.py): the server reads it from its
GPU, reads it from shared memory, or receives it in the request's body.
"""

import functools
import ssl
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx
import torch

from qerl_vllm_plugin import noise
from qerl_vllm_plugin.adapter import folder as adapter_folder
from qerl_vllm_plugin.adapter.check import AdapterError, joined, plain_config
from qerl_vllm_plugin.wire import body as wire_body
from qerl_vllm_plugin.wire import gpu_memory, shared_file
from qerl_vllm_plugin.wire.address import Login, authorization, parted, shown
from qerl_vllm_plugin.wire.safetensors_file import Tensors
from qerl_vllm_plugin.wire.sender import FAILURES, IPC, SHARED, UnreachableError, Ways
from qerl_vllm_plugin.wire.shared_segment import Segments, enter
from qerl_vllm_plugin.wire.timing import DRAIN

TOKEN_HEADER = "X-QeRL-Admin-Token"
VERSION_HEADER = "X-QeRL-Policy-Version"  # on every answer that holds tokens
TRANSPORTS = ("auto", IPC, SHARED, "http")
NO_ROUTES = (
    "a server has /v1/qerl only where VLLM_PLUGINS names qerl and QERL_ADMIN_TOKEN or QERL_ADMIN_TOKEN_FILE is set; "
    "the client's url is the server's, such as http://127.0.0.1:8000"
)
UNREACHABLE = "unreachable"  # the reason of a refusal that concerns the transport alone
KEYS = {"version", "noisy_norms", "touched"}  # one of them is in every answer of a server of a policy

Call = dict[str, Any]  # keyword arguments of httpx's ``request``
STATE: Call = {"method": "GET", "url": "state"}
P = ParamSpec("P")
T = TypeVar("T")


def body(tensors: Tensors, config: Any, norms: Tensors | None = None) -> bytes:
    """Return an adapter as one safetensors file in PEFT's names, with its config in the metadata.

    ``config`` is the content of ``adapter_config.json`` or PEFT's LoraConfig. ``norms`` are trained norms by their
    checkpoint names. A set of module names, as PEFT holds them, becomes a list. Raises AdapterError for a name that
    is in both ``tensors`` and ``norms``, and for another kind of config.
    """
    return b"".join(wire_body.pieces(joined(tensors, norms), plain_config(config)))


class PolicyRefusedError(RuntimeError):
    """Report that the server refused a call.

    A refused change leaves what is served unchanged, except for the reasons "lost" and "engine_dead": that engine
    serves nothing any more.
    ``status`` is the HTTP status, ``reason`` the word under which the server counts the refusal. Status 0 means that
    the client could not send the adapter by the one transport that it may use. Status 200 or 300 to 399 means that
    something else answered, such as a proxy.
    """

    def __init__(self, status: int, text: str, reason: str = "") -> None:
        super().__init__(f"{text} (HTTP {status})" if status else text)
        self.status, self.reason = status, reason


class _Client(ABC):
    """Make the calls, choose the way of an adapter and read the answers, for both clients.

    ``answered`` is the server's last answer; after a change it holds the seconds by part, too.
    """

    def __init__(
        self,
        url: str,
        admin_token: str,
        api_key: str | None = None,
        timeout: float | None = 120.0,
        *,
        transport: str = "auto",
    ) -> None:
        """Configure the client; nothing is sent yet.

        ``url`` is the server's, such as http://127.0.0.1:8000. A user and a password in it are sent (HTTP Basic, for
        a proxy in front of the server) and shown nowhere. ``api_key`` is the server's --api-key.

        ``transport`` says how adapters travel. With "auto", tensors on a GPU that the server sees go from GPU to GPU.
        Others go through shared memory to a server on this machine, and all the rest in the request's body. "ipc",
        "shared" and "http" allow one of the three alone. The shared memory, as large as the adapter, is kept for the
        next swap and freed with the client.

        ``timeout`` is the seconds to wait for an answer; None waits for ever. With requests="wait", the time in which
        the server lets requests end is added.

        Raises ValueError for an unknown transport, for a url that is not a server's, and for a token or key that no
        header can carry.
        """
        for name, text in (("admin_token", admin_token), ("api_key", api_key or "")):
            if not isinstance(text, str) or not all("!" <= character <= "~" for character in text):
                raise ValueError(
                    f"{name} is no text that a header can carry: letters, digits and signs of ASCII, no space and no "
                    "end of a line, which what is read from a file has until it is stripped"
                )
        refuse = functools.partial(PolicyRefusedError, 0, reason=UNREACHABLE)
        self._ways = Ways(transport, TRANSPORTS, refuse, _warn)
        self._segments = Segments(PolicyRefusedError)
        self.answered: dict[str, Any] = {}
        self._timeout = timeout
        headers = {TOKEN_HEADER: admin_token} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        plain, login = _address(url, api_key)
        self._options: dict[str, Any] = {
            "base_url": plain.rstrip("/").removesuffix("/v1") + "/v1/qerl/",
            "headers": headers | ({"Authorization": authorization(login)} if login else {}),
            "timeout": timeout,
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options['base_url']})"  # without token, user and password

    @contextmanager
    def _named_server(self) -> Iterator[None]:
        """Name the server in an error of a ``with`` block to which it gives no answer."""
        try:
            yield
        except httpx.TransportError as error:
            text = f"no answer from {self._options['base_url']}: {str(error) or type(error).__name__}"
            raise type(error)(text, request=error._request) from error

    @abstractmethod
    async def _send(self, call: Call) -> dict[str, Any]:
        """Send a call and return the server's answer."""

    @abstractmethod
    async def _enter(self, block: AbstractContextManager[T], held: ExitStack) -> T:
        """Enter a block that takes a while, without holding up what else runs here; ``held`` leaves it."""

    async def _named(self, way: str, given: Tensors, config: Any, held: ExitStack) -> tuple[str, bytes]:
        """Return content type and body of a request for an adapter that stays where it is until ``held`` ends."""
        if way == IPC:  # in this thread: its CUDA stream computes the tensors
            return gpu_memory.MEDIA_TYPE, held.enter_context(wire_body.describing(given, config))
        path = await self._enter(self._segments.filled(given, wire_body.metadata(config)), held)
        return shared_file.MEDIA_TYPE, wire_body.naming(path)

    def _in_time(self, call: Call) -> Call:
        """Return ``call``, with a longer timeout if the server lets running requests end first."""
        if call.get("params", {}).get("requests") != "wait" or self._timeout is None:
            return call
        return {**call, "timeout": httpx.Timeout(self._timeout, read=self._timeout + DRAIN)}

    def _answer(self, response: httpx.Response) -> dict[str, Any]:
        try:
            content = response.json()
        except ValueError:
            content = response.text[:200]
        answer = content if isinstance(content, dict) else {"error": content}
        if response.status_code == 200 and KEYS & answer.keys():
            self.answered = answer
            return answer
        text = str(answer.get("error", content))
        if response.has_redirect_location:
            where = shown(response.headers["location"])
            text = f"{response.url} points to {where}; give the url of the server itself"
        elif response.status_code == 200 or (response.status_code == 404 and "reason" not in answer):
            text = f"{text or 'an empty answer'}: {NO_ROUTES}"
        raise PolicyRefusedError(response.status_code, text, str(answer.get("reason", "")))


class AsyncPolicyClient(_Client):
    """Change the policy of one server, for asyncio.

    Every method raises PolicyRefusedError if the server refuses, and httpx.HTTPError if no answer comes. After
    httpx.HTTPError a swap may be repeated with the same ``version``: if it had been made, nothing happens.
    """

    async def swap(
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
        if tensors is None and norms:
            raise AdapterError("trained norms travel beside an adapter: give its tensors and its config, too")
        if tensors is not None and config is None:
            raise AdapterError("an adapter needs its config: the content of adapter_config.json")
        given, config = joined(tensors, norms), plain_config(config)
        query = {"requests": requests} | ({} if version is None else {"version": str(version)})
        put: Call = {"method": "PUT", "url": "policy", "params": query}
        if tensors is None:
            return int((await self._send({**put, "method": "DELETE"}))["version"])
        if given and self._ways.transport != "http" and self._ways.gpus is None:
            state = await self._send(STATE)
            is_far, self._ways.gpus = state.get("machine") != shared_file.machine(), state.get("gpus", ())
            self._ways.far = "the server is on another machine" if is_far else None
        for way in self._ways.open(given) if given else ():
            try:
                with ExitStack() as held:
                    kind, content = await self._named(way, given, config, held)
                    call = {**put, "headers": {"Content-Type": kind}, "content": content}
                    return int((await self._send(call))["version"])
            except PolicyRefusedError as refused:
                if refused.reason != UNREACHABLE:
                    raise
                self._ways.close(way, UnreachableError(refused))
            except FAILURES as error:
                self._ways.close(way, error)
        length = len(next(wire_body.pieces(given, config))) + sum(tensor.nbytes for tensor in given.values())
        put |= {"headers": {"Content-Length": str(length)}, "content": wire_body.pieces(given, config)}
        return int((await self._send(put))["version"])

    async def swap_folder(self, folder: str | Path, *, version: int | None = None, requests: str = "keep") -> int:
        """Install the adapter of a folder on this machine; raise AdapterError if it is damaged or of another base."""
        state, trained_on = await self._send(STATE), adapter_folder.trained_on(folder)
        if trained_on is not None and state["base_hash"] not in (None, trained_on):
            raise AdapterError(f"{folder} was trained on another base than the server's ({state['base']})")
        saved = adapter_folder.read(folder)
        given = saved.tensors, saved.config
        return await AsyncPolicyClient.swap(self, *given, norms=saved.norms, version=version, requests=requests)

    async def set_noise(
        self, sigma: float, *, seed: int, rollout: int, targets: Sequence[str] | None = None, requests: str = "keep"
    ) -> int:
        """Set the noise on the norms and return how many carry it; sigma 0 restores them bit for bit.

        Raises ValueError for a sigma out of range and for values of another kind, before the server is asked.
        """
        sigma, seed, rollout, names = noise.checked(sigma, seed, rollout, () if targets is None else targets)
        settings: dict[str, Any] = {"sigma": sigma, "seed": seed, "rollout": rollout}
        settings |= {} if targets is None else {"targets": names}
        call = {"method": "PUT", "url": "noise", "params": {"requests": requests}, "json": settings}
        answer = await self._send(call)
        return int(answer["noisy_norms"] if "noisy_norms" in answer else answer["touched"])  # an older server's name

    async def clear_noise(self, *, requests: str = "keep") -> None:
        """Restore the norms without noise, bit for bit."""
        await AsyncPolicyClient.set_noise(self, 0.0, seed=0, rollout=0, requests=requests)

    async def state(self) -> dict[str, Any]:
        """Return the server's state: version, number of changes, adapter's hash, noise, limits, base and counters."""
        return await self._send(STATE)

    async def _send(self, call: Call) -> dict[str, Any]:
        if isinstance(pieces := call.get("content"), Iterator):
            call = {**call, "content": _one_by_one(pieces)}
        with self._named_server():
            async with httpx.AsyncClient(**self._options, verify=_trusted()) as client:
                return self._answer(await client.request(**self._in_time(call)))

    async def _enter(self, block: AbstractContextManager[T], held: ExitStack) -> T:
        return await enter(block, held)


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Turn a method of AsyncPolicyClient into one of PolicyClient, whose coroutines never wait for an event loop."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **keywords: P.kwargs) -> T:
        try:
            method(self, *args, **keywords).send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a call of the synchronous client waits for an event loop")

    return call


class PolicyClient(_Client):
    """Change the policy of one server, as AsyncPolicyClient does; each call blocks until it is answered."""

    swap = _blocking(AsyncPolicyClient.swap)
    swap_folder = _blocking(AsyncPolicyClient.swap_folder)
    set_noise = _blocking(AsyncPolicyClient.set_noise)
    clear_noise = _blocking(AsyncPolicyClient.clear_noise)
    state = _blocking(AsyncPolicyClient.state)

    async def _send(self, call: Call) -> dict[str, Any]:
        with self._named_server(), httpx.Client(**self._options, verify=_trusted()) as client:
            return self._answer(client.request(**self._in_time(call)))

    async def _enter(self, block: AbstractContextManager[T], held: ExitStack) -> T:
        return held.enter_context(block)


def _warn(text: str) -> None:
    """Warn at the line that called into this package, however many of its functions lie between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("qerl_vllm_plugin."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the certificates that httpx trusts; reading them for every call would take longer than a swap."""
    return httpx.create_ssl_context()


async def _one_by_one(pieces: Iterator[memoryview]) -> AsyncIterator[memoryview]:
    """Yield the pieces asynchronously, as httpx.AsyncClient needs them."""
    for piece in pieces:
        yield piece


def _address(url: str, api_key: str | None) -> tuple[str, Login | None]:
    """Return a server's url, and its user and password or None; raise ValueError for any other url, showing neither."""
    try:
        plain, login = parted(url)
        found = httpx.URL(plain)
    except (httpx.InvalidURL, ValueError, TypeError, AttributeError):
        raise ValueError(f"url is {shown(url)!r}, no address; it looks like http://127.0.0.1:8000") from None
    if found.scheme not in ("http", "https") or not found.host or found.query or found.fragment or "@" in plain:
        raise ValueError(
            f"url is {shown(url)!r}; it must be the server's, with http or https and without a query, such as "
            "http://127.0.0.1:8000; in a user's password write / ? # @ as %2F %3F %23 %40"
        )
    if api_key and login:
        raise ValueError("url names a user, who would be sent in place of the api_key; leave one of the two out")
    return plain, login
