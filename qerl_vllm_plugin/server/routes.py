"""Handle the routes under /v1/qerl; each checks the admin token before it reads anything else of the request."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from qerl_vllm_plugin import noise
from qerl_vllm_plugin.adapter import folder as adapter_folder
from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.compat import engine_client
from qerl_vllm_plugin.server import metrics
from qerl_vllm_plugin.server.changes import MODES, PolicyServer
from qerl_vllm_plugin.server.token import HEADER, matches
from qerl_vllm_plugin.wire import body, gpu_memory, shared_file
from qerl_vllm_plugin.wire.body import Refused
from qerl_vllm_plugin.wire.shared_segment import NoRoomError, enter

Handler = Callable[[PolicyServer, Request], Awaitable[dict[str, Any]]]
NOISE_KEYS = ("sigma", "seed", "rollout", "targets")
BOTH = "the adapter is in a folder or in the body: give one, not both"


def attach(app: Any, token: bytes) -> None:
    """Add the routes to the server's application; ``token`` is the SHA-256 of the admin token."""

    def add(path: str, method: str, handler: Handler) -> None:
        async def answer(request: Request) -> JSONResponse:
            try:
                if not matches(request.headers.get(HEADER), token):
                    raise Refused(401, "unauthorized", f"{HEADER} is missing or wrong")
                return JSONResponse(await handler(app.state.qerl, request))
            except Refused as refused:
                refusal = refused
            except Exception as error:
                if not engine_client.is_engine_death(error):
                    raise
                refusal = Refused(503, "engine_dead", "the engine has died; restart the server, its log says why")
            metrics.REFUSALS.labels(refusal.reason).inc()
            # the rest of the body stays unread, so the connection must close
            content = {"error": str(refusal), "reason": refusal.reason}
            return JSONResponse(content, refusal.status, headers={"Connection": "close"})

        app.add_api_route(f"/v1/qerl/{path}", answer, methods=[method], include_in_schema=False)

    add("policy", "PUT", put_policy)
    add("policy", "DELETE", delete_policy)
    add("noise", "PUT", put_noise)
    add("noise", "DELETE", delete_noise)
    add("state", "GET", get_state)


async def put_policy(server: PolicyServer, request: Request) -> dict[str, Any]:
    """Install the adapter in the body, in the GPU memory or file that the body names, or in ``?folder=NAME``."""
    query = _query(request, "version", "requests", "folder")
    version, mode = _version(query), _mode(query)
    kind = request.headers.get("content-type")
    if "folder" in query and (kind in (gpu_memory.MEDIA_TYPE, shared_file.MEDIA_TYPE) or body.is_there(request)):
        raise Refused(400, "bad_query", BOTH)
    with ExitStack() as held:
        if "folder" in query:
            upload = await _from_folder(server, query["folder"], held)
        elif kind == gpu_memory.MEDIA_TYPE:
            upload = await body.described(request, server.limit, held)
        elif kind == shared_file.MEDIA_TYPE:
            upload = await body.named(request, server.limit, held)
        else:
            upload = await body.received(request, server.limit, server.segments, held)
        metrics.BYTES.inc(upload.size)
        change = (upload.path, upload.config, upload.digest, version, mode, request.is_disconnected)
        answer = await server.swap(*change, held.pop_all())
    if "parts" not in answer:  # nothing has changed
        return answer
    of_upload = {part: round(seconds, 4) for part, seconds in upload.parts.items()}
    return {**answer, "parts": {**of_upload, **answer["parts"]}}


async def _from_folder(server: PolicyServer, name: str, held: ExitStack) -> body.Upload:
    """Copy a folder's adapter into a file for the workers, kept until ``held`` is closed. Raises Refused."""
    # in threads, so that other requests go on meanwhile
    try:
        folder = await asyncio.to_thread(server.folder, name)
        saved = await asyncio.to_thread(adapter_folder.read, folder)
        digest = await asyncio.to_thread(saved.digest)
    except AdapterError as error:
        raise Refused(422, "refused", str(error)) from error
    body.check_patterns(saved.config)
    tensors = {**saved.tensors, **(saved.norms or {})}
    try:
        path = await enter(server.segments.filled(tensors), held)
    except NoRoomError as error:
        raise body.no_room(str(error)) from None
    return body.Upload(path, digest, sum(tensor.nbytes for tensor in tensors.values()), saved.config, {})


async def delete_policy(server: PolicyServer, request: Request) -> dict[str, Any]:
    """Remove the adapter and serve the base alone."""
    query = _query(request, "version", "requests")
    return await server.swap(None, {}, "", _version(query), _mode(query), request.is_disconnected)


async def put_noise(server: PolicyServer, request: Request) -> dict[str, Any]:
    """Set the noise: {"sigma": 0.01, "seed": 1, "rollout": 7}, and "targets" unless they are the default norms."""
    mode = _mode(_query(request, "requests"))
    values = await body.read_json(request)
    if unknown := sorted(set(values) - set(NOISE_KEYS)):
        raise Refused(400, "bad_json", f"unknown key {unknown[0]!r}; known: {', '.join(NOISE_KEYS)}")
    if missing := [key for key in NOISE_KEYS[:3] if key not in values]:
        raise Refused(400, "bad_json", f"the key {missing[0]!r} is missing")
    for key in NOISE_KEYS[:3]:
        # vLLM's own message format has no longer numbers
        if isinstance(values[key], int) and values[key].bit_length() > 63:
            raise Refused(400, "bad_json", f"{key} is {str(values[key])[:40]}; whole numbers have at most 64 bits here")
    targets = values.get("targets", list(noise.DEFAULT_TARGETS))
    return await server.set_noise(
        values["sigma"], values["seed"], values["rollout"], targets, mode, request.is_disconnected
    )


async def delete_noise(server: PolicyServer, request: Request) -> dict[str, Any]:
    """Restore the norms without noise, bit for bit."""
    return await server.set_noise(0.0, 0, 0, [], _mode(_query(request, "requests")), request.is_disconnected)


async def get_state(server: PolicyServer, request: Request) -> dict[str, Any]:
    _query(request)
    return await server.state()


def _query(request: Request, *known: str) -> dict[str, str]:
    names = [name for name, _ in request.query_params.multi_items()]
    if unknown := sorted(set(names) - set(known)):
        raise Refused(400, "bad_query", f"unknown parameter {unknown[0]!r}; known: {', '.join(known) or 'none'}")
    if repeated := sorted(name for name in set(names) if names.count(name) > 1):
        raise Refused(400, "bad_query", f"the parameter {repeated[0]!r} is given more than once; give it once")
    return dict(request.query_params)


def _version(query: dict[str, str]) -> int | None:
    text = query.get("version")
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise Refused(400, "bad_query", "version must be a whole number")
    return int(text)


def _mode(query: dict[str, str]) -> str:
    mode = query.get("requests", MODES[0])
    if mode not in MODES:
        raise Refused(400, "bad_query", f"requests is one of {', '.join(MODES)}")
    return mode
