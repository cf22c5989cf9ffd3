"""Which policy version computed an answer: the header ``X-QeRL-Policy-Version: FIRST``, or ``FIRST-LAST``.

FIRST alone: one policy computed all of it. Where only the noise has changed in between, FIRST and LAST are equal.

vLLM stamps the first and the last token of each request with the engine's clock, which all processes of a machine
share; a change is made while the engine is paused, so no token lies near its time (change_log.py). Where an engine
keeps no statistics (--disable-log-stats), a request's arrival and end stand in: a range that is never too narrow.
"""

import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from qerl_vllm_plugin.change_log import Span

HEADER = "X-QeRL-Policy-Version"

_spans: ContextVar[dict[str, Span] | None] = ContextVar("qerl_spans", default=None)


def tell_versions(engine: Any) -> None:
    """Makes the engine's ``generate`` note, for the HTTP request that it serves, when its tokens were computed."""
    generate = engine.generate

    async def noting(*args: Any, **keywords: Any) -> AsyncIterator[Any]:
        spans, arrival = _spans.get(), time.monotonic()
        async for output in generate(*args, **keywords):
            if spans is not None:
                metrics = getattr(output, "metrics", None)
                first = getattr(metrics, "first_token_ts", 0.0) or arrival
                last = getattr(metrics, "last_token_ts", 0.0) or time.monotonic()
                spans[output.request_id] = (first, last)
            yield output

    engine.generate = noting


class StampVersions:
    """ASGI middleware: the header on every answer that holds tokens, and a last comment line on streams."""

    def __init__(self, app: Any, server: Any) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        spans: dict[str, Span] = {}
        _spans.set(spans)
        started: dict[str, Any] = {}  # the start of the answer, held back until its first bytes
        is_stream = False

        async def send_stamped(message: Any) -> None:
            nonlocal started, is_stream
            if message["type"] == "http.response.start":
                started = dict(message)
                is_stream = any(
                    k == b"content-type" and v.startswith(b"text/event-stream") for k, v in message["headers"]
                )
                return
            if started:
                if spans:
                    text = self._server.changes.text(list(spans.values())[:1] if is_stream else list(spans.values()))
                    started["headers"] = [*started["headers"], (HEADER.lower().encode(), text.encode())]
                await send(started)
                started = {}
            if is_stream and spans and message["type"] == "http.response.body" and not message.get("more_body"):
                comment = f": {HEADER}: {self._server.changes.text(list(spans.values()))}\n\n".encode()
                message = {**message, "body": message.get("body", b"") + comment}
            await send(message)

        await self._app(scope, receive, send_stamped)
