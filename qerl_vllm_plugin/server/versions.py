"""Tell which policy version computed an answer: the header ``X-QeRL-Policy-Version: FIRST``, or ``FIRST-LAST``.

FIRST alone means that one policy computed all of it. If only the noise has changed in between, FIRST and LAST are
equal.

vLLM stamps the first and the last token of each sequence with the engine's clock, which all processes of a machine
share. A change is made while the engine is paused, so no token lies near its time (change_log.py). An answer of several
sequences (``n``, several prompts) names the earliest and the latest version of all. If an engine keeps no statistics
(--disable-log-stats), a request's arrival and end are used, a range that is never too narrow.
"""

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from qerl_vllm_plugin.compat import engine_client
from qerl_vllm_plugin.worker.change_log import Span

HEADER = "X-QeRL-Policy-Version"


class Sequence:
    """Follow a sequence that the engine computes for an HTTP request; ``stamps`` are vLLM's token times, or None."""

    def __init__(self, stamps: Any, is_running: Callable[[], bool]) -> None:
        self._stamps, self.is_running, self._arrival = stamps, is_running, time.monotonic()

    @property
    def has_begun(self) -> bool:
        """Return True if the sequence has a token, or if that is not known."""
        return self._stamps is None or bool(self._stamps.first_token_ts)

    @property
    def span(self) -> Span:
        first = getattr(self._stamps, "first_token_ts", 0.0) or self._arrival
        return first, getattr(self._stamps, "last_token_ts", 0.0) or time.monotonic()


_sequences: ContextVar[list[Sequence] | None] = ContextVar("qerl_sequences", default=None)


def tell_versions(engine: Any) -> None:
    """Make the engine client record the sequences of each HTTP request, for ``StampVersions``."""

    def note(stamps: Any, is_running: Callable[[], bool]) -> None:
        if (sequences := _sequences.get()) is not None:
            sequences.append(Sequence(stamps, is_running))

    engine_client.watch_sequences(engine, note)


class StampVersions:
    """Add the header to every answer that holds tokens, and a last comment line to streams (ASGI middleware).

    A stream's header comes with its first tokens; its comment line covers all of them.
    """

    def __init__(self, app: Any, server: Any) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sequences: list[Sequence] = []
        _sequences.set(sequences)
        started: dict[str, Any] = {}  # the start message of the answer, held back until the first bytes of its body
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
                begun = [sequence.span for sequence in sequences if sequence.has_begun]
                # an answer sent before its tokens (background: true) cannot tell which policy will compute them
                is_known = is_stream or not any(sequence.is_running() for sequence in sequences)
                if sequences and is_known and started["status"] < 400:
                    # a stream has its first tokens alone so far; without any, use all sequences' whole times
                    spans = begun if is_stream and begun else [sequence.span for sequence in sequences]
                    text = self._server.changes.text(spans)
                    started["headers"] = [*started["headers"], (HEADER.lower().encode(), text.encode())]
                await send(started)
                started = {}
            if is_stream and sequences and message["type"] == "http.response.body" and not message.get("more_body"):
                text = self._server.changes.text([sequence.span for sequence in sequences])
                message = {**message, "body": message.get("body", b"") + f": {HEADER}: {text}\n\n".encode()}
            await send(message)

        await self._app(scope, receive, send_stamped)
