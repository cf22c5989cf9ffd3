"""Make the body of a request that carries an adapter, and receive and check it.

A body is a safetensors file. Or it says where one lies in shared memory, or describes tensors on a GPU. It may have no
more bytes than an adapter can need.
"""

import asyncio
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

from qerl_vllm_plugin.wire import gpu_memory, shared_file
from qerl_vllm_plugin.wire.checksum import checksums
from qerl_vllm_plugin.wire.safetensors_file import Tensors, header_bytes
from qerl_vllm_plugin.wire.shared_segment import NoRoomError, Segment, Segments, enter
from qerl_vllm_plugin.wire.timing import Timer

PIECE = 256 << 10
MAX_HEADER = 4 << 20  # names of a 32B model's adapter take 0.2 MB
MAX_JSON = 64 << 10
STALLED = 30.0  # seconds without a byte after which a body is refused
NOT_NEAR = (
    "ipc and shared need client and server on one machine, as one user and of one release of this package; use "
    "transport='http' otherwise"
)
CONFIG = "adapter_config"  # the key of the file's metadata that holds the content of adapter_config.json
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")


def metadata(config: dict[str, Any]) -> dict[str, str]:
    """Return the metadata of the safetensors file: the adapter's config as JSON."""
    return {CONFIG: json.dumps(config)}


def pieces(tensors: Tensors, config: dict[str, Any]) -> Iterator[memoryview]:
    """Yield a safetensors file in small pieces, for httpcore copies the rest of a piece with every write."""
    layout = ((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    yield memoryview(header_bytes(layout, metadata(config)))
    for tensor in tensors.values():
        left = memoryview(shared_file.content(tensor).numpy())
        while left:
            yield left[:PIECE]
            left = left[PIECE:]


@contextmanager
def describing(tensors: Tensors, config: dict[str, Any]) -> Iterator[bytes]:
    """Yield the body that names a file with a description of tensors on a GPU; valid inside the ``with`` block.

    The file shows that the caller runs on the server's machine as the server's user. Raises CudaIPCError if the GPU
    memory cannot be shared, and NoRoomError if shared memory has no room for the file.
    """
    with gpu_memory.described(tensors) as (text, memory):
        listed = [json.loads(text)["tensors"], checksums([memory])]
        checksum = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
        content = json.dumps({"memory": text, "checksum": checksum, CONFIG: config}).encode()
        segment = Segment(len(content))
        with segment.file:
            segment.write(content, 0)
            yield naming(segment.path)


def naming(path: str) -> bytes:
    """Return the body that names a file of ``shared_file.create``. Raises OSError."""
    return json.dumps({"file": shared_file.ticket(path)}).encode()


class Refused(Exception):
    """Refuse a request with an HTTP ``status``, the ``reason`` under which it is counted, and a text for the caller."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(text)
        self.status, self.reason = status, reason


def no_room(text: str) -> Refused:
    """Return the refusal of an adapter for which the memory shared with the workers has no room."""
    return Refused(507, "no_room", f"{text}; make room there, or give it more (--shm-size)")


@dataclass(frozen=True)
class Upload:
    """Hold an adapter for the workers: a safetensors file, or tensors on a GPU.

    For a file, ``path`` is its path, and ``digest`` and ``size`` (bytes) are the file's. For tensors on a GPU, ``path``
    is their description, and ``digest`` is that of the caller's checksum and the config. ``config`` is the adapter's
    config. ``parts`` are the seconds that receiving and digesting took.
    """

    path: str
    digest: str
    size: int
    config: dict[str, Any]
    parts: dict[str, float]


def declared(request: Any, limit: int) -> int | None:
    """Return the body's Content-Length, or None without one. Raises Refused if it is no number or above ``limit``."""
    text = request.headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 18 or int(text) > limit:
        raise Refused(413, "too_large", f"the body has {text[:40]} bytes; at most {limit} can be used")
    return int(text)


def is_there(request: Any) -> bool:
    """Return True if the request has a body, with or without a stated length."""
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"


async def chunks(request: Any, limit: int) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; raise Refused if it is too long, is cut off or stalls."""
    expected = declared(request, limit)
    from starlette.requests import ClientDisconnect

    most, reason = (limit, "can be used") if expected is None else (expected, "it has announced")
    stream, received = request.stream(), 0
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream, None), STALLED)
        except asyncio.TimeoutError:
            raise Refused(408, "stalled", f"the body stalled for {STALLED:g} s") from None
        except ClientDisconnect:
            raise Refused(400, "cut_body", "the body was cut off") from None
        if chunk is None:
            break
        received += len(chunk)
        if received > most:
            raise Refused(413, "too_large", f"the body has more than {most} bytes, which are all that {reason}")
        yield chunk
    if expected is not None and received != expected:
        raise Refused(400, "cut_body", f"the body was cut off after {received} of {expected} bytes")


async def read_json(request: Any, limit: int = MAX_JSON) -> dict[str, Any]:
    """Return the body as a JSON object of at most ``limit`` bytes. Raises Refused for anything else."""
    return _object("the body", b"".join([chunk async for chunk in chunks(request, limit)]))


async def _opened(request: Any, held: ExitStack) -> IO[bytes]:
    """Open the file in shared memory that the body names: {"file": "/proc/PID/fd/NUMBER/NAME"}.

    It stays open here until ``held`` is closed, whatever becomes of the caller. Raises Refused for a file that the
    caller does not prove to have made for a server (shared_file.py).
    """
    # another release may send something else, such as the description of tensors itself
    given = (await read_json(request, 2 * gpu_memory.MAX_TEXT)).get("file")
    file = shared_file.open_ticket(given) if isinstance(given, str) else None
    if file is None:
        raise Refused(403, "unreachable", NOT_NEAR)
    return held.enter_context(file)


async def described(request: Any, limit: int, held: ExitStack) -> Upload:
    """Read the file that describes tensors on a GPU of this machine (``describing``); the tensors stay where they are.

    The size of the upload is the tensors'. Raises Refused for a damaged description, and for tensors above ``limit``
    bytes. Raises Refused also as ``_opened``: the workers would map whatever memory they are told to.
    """
    timer = Timer()
    given = _object("the description of tensors", (await _opened(request, held)).read(2 * gpu_memory.MAX_TEXT))
    timer.end("body")
    try:
        text, checksum, config = (given[key] for key in ("memory", "checksum", CONFIG))
        description = gpu_memory.parse(text)
        check_patterns(config)
    except (KeyError, AttributeError, ValueError) as error:
        raise Refused(400, "bad_json", f"this is no description of tensors that this release writes: {error}") from None
    if (size := description.layout.size) > limit:
        raise Refused(413, "too_large", f"the tensors have {size} bytes; at most {limit} can be used")
    content = json.dumps([checksum, config], sort_keys=True)
    timer.end("digest")
    return Upload(text, hashlib.sha256(content.encode()).hexdigest(), size, config, timer.seconds)


async def named(request: Any, limit: int, held: ExitStack) -> Upload:
    """Take the adapter's file in shared memory, which the caller has filled (client.py) and the body names.

    Raises Refused for a file that is damaged or above ``limit`` bytes, and as ``_opened``.
    """
    timer = Timer()
    file = await _opened(request, held)
    timer.end("body")
    if (size := os.fstat(file.fileno()).st_size) > limit:
        raise Refused(413, "too_large", f"the file has {size} bytes; at most {limit} can be used")
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    config = _config(path, size)
    digest = shared_file.Digest(file)
    try:
        found = await asyncio.to_thread(digest.finish, size)
    finally:
        await asyncio.to_thread(digest.close)
    timer.end("digest")
    return Upload(path, found, size, config, timer.seconds)


async def received(request: Any, limit: int, segments: Segments, held: ExitStack) -> Upload:
    """Receive the body into a file that only this user can open, kept until ``held`` is closed. Raises Refused."""
    size = declared(request, limit)
    try:
        file = await enter(segments.of(size or limit), held)  # allocating the memory takes a while
        timer, written, digest = Timer(), 0, shared_file.Digest(file.file)
        try:
            try:
                async for chunk in chunks(request, limit):
                    file.write(chunk, written)
                    written += len(chunk)
                    digest.grow(written)
            finally:  # in a thread, as the digest below, so that other requests go on meanwhile
                await asyncio.to_thread(file.shorten, written)
            timer.end("body")
            config = _config(file.path, written)
            found = await asyncio.to_thread(digest.finish, written)
            timer.end("digest")
            return Upload(file.path, found, written, config, timer.seconds)
        finally:
            await asyncio.to_thread(digest.close)
    except NoRoomError as error:
        raise no_room(str(error)) from None


def _config(path: str, size: int) -> dict[str, Any]:
    """Return the adapter's config from a safetensors header; raise Refused without one, or if it has patterns."""
    if size == 0:
        raise Refused(
            400, "bad_file", "the body is empty, so no safetensors file: send one, or name a folder with ?folder=NAME"
        )
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise Refused(400, "bad_file", "this is no safetensors file: it does not begin with its header's length")
        header = _object("the header of the safetensors file", file.read(length))
    metadata = header.get("__metadata__")
    text = metadata.get(CONFIG) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise Refused(400, "bad_file", f"the file's metadata lack {CONFIG!r}: the content of adapter_config.json")
    config = _object(CONFIG, text)
    check_patterns(config)
    return config


def check_patterns(config: dict[str, Any]) -> None:
    """Raise Refused for a config that names modules by a regular expression, which every worker would run."""
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(key)
        if value is None or (key == "target_modules" and value == "all-linear"):
            continue
        if not isinstance(value, list) or not all(isinstance(v, str) and _PLAIN_NAME.fullmatch(v) for v in value):
            raise Refused(
                400,
                "pattern",
                f"{key} must be a list of plain names over HTTP, not a pattern; PEFT's save_pretrained "
                "and the names of the adapter's tensors give them",
            )


def _object(what: str, text: bytes | str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "bad_json", f"{what} is not valid JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise Refused(400, "bad_json", f"{what} is not a JSON object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of these pairs. Raises Refused for a repeated key, whose last value json would keep."""
    if len(found := dict(pairs)) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise Refused(400, "bad_json", f"a JSON object has the key {key[:40]!r} more than once; give it once")
    return found
