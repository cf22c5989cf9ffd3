"""The calls of both clients of /v1/qerl, and the ways that an adapter goes: from its GPU, through shared memory, in a
body."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from qerl_vllm_plugin.adapter import folder as adapter_folder
from qerl_vllm_plugin.adapter.check import AdapterError, Tensors, joined, plain_config
from qerl_vllm_plugin.client_body import gpu_body, metadata, pieces
from qerl_vllm_plugin.wire import cuda_ipc, gpu_memory, shared_file
from qerl_vllm_plugin.wire.address import Login, authorization, parted, shown
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.wire.shared_segment import NoRoomError, Segments
from qerl_vllm_plugin.wire.timing import DRAIN

TOKEN_HEADER = "X-QeRL-Admin-Token"
TRANSPORTS = ("auto", "ipc", "shared", "http")
NO_ROUTES = (
    "a server has /v1/qerl only where VLLM_PLUGINS names qerl and QERL_ADMIN_TOKEN or QERL_ADMIN_TOKEN_FILE is set; "
    "the client's url is the server's, such as http://127.0.0.1:8000"
)
UNREACHABLE = "unreachable"  # the reason of a refusal that is only of the way
NO_OTHER_WAY = "transport is {!r}, and {}; leave it out, and tensors go another way where this one is closed"
STATE: dict[str, Any] = {"method": "GET", "url": "state"}
KEYS = {"version", "touched"}  # one of them is in every answer

Call = dict[str, Any]  # what httpx's ``request`` takes


class PolicyRefusedError(RuntimeError):
    """The server refused a change, and serves what it served before; ``status`` is the HTTP status, ``reason`` the word
    under which the server counts the refusal. Status 0: the client could not send it in the only way it may. Status 200
    or one of 300 to 399: what answered, such as a proxy, is no server of a policy."""

    def __init__(self, status: int, text: str, reason: str = "") -> None:
        super().__init__(f"{text} (HTTP {status})" if status else text)
        self.status, self.reason = status, reason


class Calls:
    """The calls as arguments of httpx, which both clients send in their own way."""

    def __init__(
        self,
        url: str,
        admin_token: str,
        api_key: str | None = None,
        timeout: float | None = 120.0,
        *,
        transport: str = "auto",
    ) -> None:
        """``url`` is the server's, such as http://127.0.0.1:8000; a user and a password in it are sent (HTTP Basic, for
        a proxy before the server) and shown nowhere. ``api_key`` is that of --api-key.

        ``transport``: tensors on a GPU that the server sees go from GPU to GPU, others to a server of this machine
        through shared memory, and all that is left in the request's body (auto); or one of the three alone (ipc,
        shared, http). What goes through shared memory stays there, as large as the adapter, for the next swap, and
        ends with the client. ``timeout``: seconds without an answer (None: for ever), beside those in which the server
        lets requests end ("wait"). Raises ValueError for another transport, for what is no such url, and for a token or
        key that no header can carry.
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
        self._place: dict[str, Any] | None = None  # the server's machine and its GPUs, once it has been asked
        self._unreachable: str | None = None
        self._segments = Segments(PolicyRefusedError, shared_file.create_for_server)
        self._has_no_memory = False  # that the server could read
        self.answered: dict[str, Any] = {}  # what the server answered last: of a change, its seconds by part, too
        self._timeout = timeout
        headers = {TOKEN_HEADER: admin_token} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        plain, login = _address(url, api_key)
        self._options: dict[str, Any] = {
            "base_url": plain.rstrip("/").removesuffix("/v1") + "/v1/qerl/",
            "headers": headers | ({"Authorization": authorization(login)} if login else {}),
            "timeout": timeout,
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options['base_url']})"  # without the token, and whoever the url names

    @staticmethod
    def _given(tensors: Tensors | None, config: Any, norms: Tensors | None) -> tuple[Tensors | None, dict[str, Any]]:
        """All tensors that are sent, and their config. Raises AdapterError for what the server would never see."""
        if tensors is None and norms:
            raise AdapterError("trained norms travel beside an adapter: give its tensors and its config, too")
        if tensors is not None and config is None:
            raise AdapterError("an adapter needs its config: the content of adapter_config.json")
        return None if tensors is None else joined(tensors, norms), plain_config(config)

    @staticmethod
    def _check_base(folder: str | Path, state: Mapping[str, Any]) -> None:
        """Raises AdapterError for a folder that says it was trained on another base than the server's."""
        trained_on = adapter_folder.trained_on(folder)
        if trained_on is not None and state["base_hash"] not in (None, trained_on):
            raise AdapterError(f"{folder} was trained on another base than the server's ({state['base']})")

    def _asks_first(self, given: Tensors | None) -> bool:
        """Whether ``_place`` is wanted and not known."""
        return bool(given) and self._transport != "http" and self._place is None

    @contextmanager
    def _by_gpu(self, given: Tensors | None, config: Any, query: dict[str, str]) -> Iterator[Call | None]:
        """The call for tensors that the server reads from their GPU until the end of the block; None where they must
        go another way. A refusal that is only of the way leaves the block, and they must then, too.

        Raises PolicyRefusedError where no other way is allowed.
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
            except CudaIPCError as error:  # before the block
                reason = str(error)
        self._without_gpu(reason, given)
        yield None

    def _why_not_near(self, given: Tensors) -> str | None:
        """Why the server does not see the GPU of these tensors; None if it does."""
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
        """The call for tensors that the server reads from shared memory, as ``_by_gpu``."""
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
        except NoRoomError as error:  # before the block
            self._without_memory(str(error))
        yield None

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
        warnings.warn(f"adapters travel in the requests' bodies, which is slower: {reason}", stacklevel=5)

    def _check_way(self, reason: str) -> None:
        if self._transport == "shared":
            raise PolicyRefusedError(0, NO_OTHER_WAY.format("shared", reason), UNREACHABLE)

    @staticmethod
    def _swap(given: Tensors | None, config: Any, query: dict[str, str]) -> Call:
        """The call with the adapter in its body, or for the base alone."""
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
        """One that lets requests end may take as long as the server gives them."""
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
    """The url without whom it names, if it is one of a server, and whom. Raises ValueError, which shows nobody."""
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
    """What a swap says beside its adapter."""
    return {"requests": requests} | ({} if version is None else {"version": str(version)})


def _put_named(kind: str, content: bytes, query: dict[str, str]) -> Call:
    """The call for an adapter that stays where it is; ``content`` says where."""
    headers = {"Content-Type": kind}
    return {"method": "PUT", "url": "policy", "params": query, "headers": headers, "content": content}


def _of_the_way(refused: PolicyRefusedError) -> str:
    """What a refusal says that is only of the way; raises any other."""
    if refused.reason != UNREACHABLE:
        raise refused
    return str(refused)
