"""Build the calls that both clients of /v1/qerl send.

An adapter travels in one of three ways: the server reads it from its GPU, reads it from shared memory, or receives it
in the request's body.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from qerl_vllm_plugin.adapter import folder as adapter_folder
from qerl_vllm_plugin.adapter.check import AdapterError, joined, plain_config
from qerl_vllm_plugin.client_body import gpu_body, metadata, pieces
from qerl_vllm_plugin.wire import cuda_ipc, gpu_memory, shared_file
from qerl_vllm_plugin.wire.address import Login, authorization, parted, shown
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.wire.safetensors_file import Tensors
from qerl_vllm_plugin.wire.shared_segment import NoRoomError, Segments
from qerl_vllm_plugin.wire.timing import DRAIN

TOKEN_HEADER = "X-QeRL-Admin-Token"
TRANSPORTS = ("auto", "ipc", "shared", "http")
NO_ROUTES = (
    "a server has /v1/qerl only where VLLM_PLUGINS names qerl and QERL_ADMIN_TOKEN or QERL_ADMIN_TOKEN_FILE is set; "
    "the client's url is the server's, such as http://127.0.0.1:8000"
)
UNREACHABLE = "unreachable"  # the reason of a refusal that concerns the transport alone
NO_OTHER_WAY = "transport is {!r}, and {}; leave it out, and tensors go another way where this one is closed"
STATE: dict[str, Any] = {"method": "GET", "url": "state"}
KEYS = {"version", "touched"}  # one of them is in every answer of a server of a policy

Call = dict[str, Any]  # keyword arguments of httpx's ``request``


class PolicyRefusedError(RuntimeError):
    """The server refused a call.

    A refused change leaves what is served unchanged, except for the reasons "lost" and "engine_dead": that engine
    serves nothing any more.
    ``status`` is the HTTP status, ``reason`` the word under which the server counts the refusal. Status 0 means that
    the client could not send the adapter by the one transport that it may use. Status 200 or 300 to 399 means that
    something else answered, such as a proxy.
    """

    def __init__(self, status: int, text: str, reason: str = "") -> None:
        super().__init__(f"{text} (HTTP {status})" if status else text)
        self.status, self.reason = status, reason


class Calls:
    """Base of both clients: builds each call as keyword arguments for httpx, and reads the answer.

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
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}; it is one of {', '.join(TRANSPORTS)}")
        self._transport = transport
        self._place: dict[str, Any] | None = None  # the server's state, which names its machine and GPUs, once asked
        self._unreachable: str | None = None
        self._segments = Segments(PolicyRefusedError, shared_file.create_for_server)
        self._has_no_memory = False  # True once shared memory cannot be used with this server
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

    @staticmethod
    def _given(tensors: Tensors | None, config: Any, norms: Tensors | None) -> tuple[Tensors | None, dict[str, Any]]:
        """Return all tensors to send, adapter and norms together, and the config as JSON can hold it.

        Raises AdapterError for norms without an adapter, an adapter without its config, and a name in both.
        """
        if tensors is None and norms:
            raise AdapterError("trained norms travel beside an adapter: give its tensors and its config, too")
        if tensors is not None and config is None:
            raise AdapterError("an adapter needs its config: the content of adapter_config.json")
        return None if tensors is None else joined(tensors, norms), plain_config(config)

    @staticmethod
    def _check_base(folder: str | Path, state: Mapping[str, Any]) -> None:
        """Raise AdapterError for a folder that says it was trained on another base than the server's."""
        trained_on = adapter_folder.trained_on(folder)
        if trained_on is not None and state["base_hash"] not in (None, trained_on):
            raise AdapterError(f"{folder} was trained on another base than the server's ({state['base']})")

    def _asks_first(self, given: Tensors | None) -> bool:
        """Return True if the server's state must be fetched first, to choose the transport."""
        return bool(given) and self._transport != "http" and self._place is None

    @contextmanager
    def _by_gpu(self, given: Tensors | None, config: Any, query: dict[str, str]) -> Iterator[Call | None]:
        """Yield the call for tensors that the server reads from their GPU while the ``with`` block runs.

        Yield None if they must travel another way. A refusal that concerns the transport alone is swallowed at the end
        of the block, and the tensors must then travel another way, too. Raises PolicyRefusedError if no other way is
        allowed.
        """
        if not given or self._transport in ("http", "shared"):
            yield None
            return
        reason = self._unreachable or gpu_memory.why_not(given) or self._why_not_near(given)
        if reason is None:
            try:
                with gpu_body(given, config) as content:
                    yield _put_named(gpu_memory.MEDIA_TYPE, content, query)
                return
            except PolicyRefusedError as refused:
                self._without_gpu(_of_the_way(refused), given)
                return
            except CudaIPCError as error:  # raised before anything was yielded
                reason = str(error)
        self._without_gpu(reason, given)
        yield None

    def _why_not_near(self, given: Tensors) -> str | None:
        """Return why the server does not see the GPU of these tensors; None if it does."""
        assert self._place is not None
        gpu = cuda_ipc.uuid(next(iter(given.values())).device)
        if self._place.get("machine") == shared_file.machine() and gpu in self._place.get("gpus", ()):
            return None
        return f"the server does not see GPU {gpu} of this machine"

    def _without_gpu(self, reason: str, given: Tensors) -> None:
        if self._transport == "ipc":
            raise PolicyRefusedError(0, NO_OTHER_WAY.format("ipc", reason), UNREACHABLE)
        if self._unreachable is None and any(tensor.is_cuda for tensor in given.values()):
            self._unreachable = reason
            warnings.warn(f"adapters travel through the CPU, which is slower: {reason}", stacklevel=5)

    @contextmanager
    def _by_memory(self, given: Tensors | None, config: Any, query: dict[str, str]) -> Iterator[Call | None]:
        """Yield the call for tensors that the server reads from shared memory; otherwise as ``_by_gpu``."""
        if not given or self._transport in ("http", "ipc") or self._has_no_memory or not self._is_here():
            yield None
            return
        try:
            with self._segments.filled(given, metadata(config)) as path:
                content = json.dumps({"file": shared_file.ticket(path)}).encode()
                yield _put_named(shared_file.MEDIA_TYPE, content, query)
            return
        except PolicyRefusedError as refused:
            self._without_memory(_of_the_way(refused))
            return
        except NoRoomError as error:  # raised before anything was yielded
            self._without_memory(str(error))
        yield None

    def _is_here(self) -> bool:
        """Return True if the server runs on this machine.

        Raises PolicyRefusedError if it does not and the transport is "shared".
        """
        assert self._place is not None
        is_here = bool(self._place.get("machine") == shared_file.machine())
        if not is_here:
            self._has_no_memory = True  # without a warning: no other way to another machine is faster than the body
            self._check_way("the server is on another machine")
        return is_here

    def _without_memory(self, reason: str) -> None:
        self._check_way(reason)
        self._has_no_memory = True
        warnings.warn(f"adapters travel in the requests' bodies, which is slower: {reason}", stacklevel=5)

    def _check_way(self, reason: str) -> None:
        if self._transport == "shared":
            raise PolicyRefusedError(0, NO_OTHER_WAY.format("shared", reason), UNREACHABLE)

    @staticmethod
    def _swap(given: Tensors | None, config: Any, query: dict[str, str]) -> Call:
        """Return the call with the adapter in its body, or the call that serves the base alone."""
        if given is None:
            return {"method": "DELETE", "url": "policy", "params": query}
        length = len(next(pieces(given, config))) + sum(tensor.nbytes for tensor in given.values())
        headers, content = {"Content-Length": str(length)}, pieces(given, config)
        return {"method": "PUT", "url": "policy", "params": query, "headers": headers, "content": content}

    @staticmethod
    def _noise(sigma: float, seed: int, rollout: int, targets: Sequence[str] | None, requests: str) -> Call:
        given: dict[str, Any] = {"sigma": sigma, "seed": seed, "rollout": rollout}
        given |= {} if targets is None else {"targets": list(targets)}
        return {"method": "PUT", "url": "noise", "params": {"requests": requests}, "json": given}

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
        found = content if isinstance(content, dict) else {"error": content}
        if response.status_code == 200 and KEYS & found.keys():
            self.answered = found
            return found
        text = str(found.get("error", content))
        if response.has_redirect_location:
            where = shown(response.headers["location"])
            text = f"{response.url} points to {where}; give the url of the server itself"
        elif response.status_code == 200 or (response.status_code == 404 and "reason" not in found):
            text = f"{text or 'an empty answer'}: {NO_ROUTES}"
        raise PolicyRefusedError(response.status_code, text, str(found.get("reason", "")))


def _address(url: str, api_key: str | None) -> tuple[str, Login | None]:
    """Return a server's url without its user and password, and these two, or None, apart.

    Raises ValueError for any other url; the message shows neither user nor password.
    """
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


def query(version: int | None, requests: str) -> dict[str, str]:
    """Return the query parameters of a swap."""
    return {"requests": requests} | ({} if version is None else {"version": str(version)})


def _put_named(kind: str, content: bytes, query: dict[str, str]) -> Call:
    """Return the call for an adapter that stays where it is; ``content`` says where."""
    headers = {"Content-Type": kind}
    return {"method": "PUT", "url": "policy", "params": query, "headers": headers, "content": content}


def _of_the_way(refused: PolicyRefusedError) -> str:
    """Return the text of a refusal that concerns the transport alone; raise any other refusal again."""
    if refused.reason != UNREACHABLE:
        raise refused
    return str(refused)
