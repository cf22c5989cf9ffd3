"""Bring the engine to rest for a change, in turn with other changes and with vLLM's own pauses.

There are two locks, each shared by all API server processes of an engine. A change holds the **line** lock from its
beginning to its end, also while it lets requests end ("wait", up to ``DRAIN`` seconds). So there is one change at a
time; those that wait for the lock get it in no particular order. It holds the **engine** lock only for a moment, while
nothing may run.

vLLM's own calls that pause and resume (/pause, /resume, /sleep, /wake_up) take the engine lock too. They run before or
after a change, do not wait for requests under the lock, and decide whether the engine stays paused. A change holds
neither lock while it waits for requests that somebody else lets end.

As with vLLM's own /pause, a change that aborts requests cuts short a change that lets them end.
"""

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from qerl_vllm_plugin.compat import engine_client
from qerl_vllm_plugin.server.engine import Engine
from qerl_vllm_plugin.wire.body import Refused
from qerl_vllm_plugin.wire.timing import DRAIN, Timer
from qerl_vllm_plugin.worker.change_log import ChangeLog

PAUSE = 0.005  # seconds between two tries to take a lock
LINE = 60.0  # seconds that a change waits for earlier changes, and for requests that somebody else lets end
GLANCE = 0.02  # seconds between two checks of an engine that comes to rest
BUSY = "not made after {:.0f} s, and nothing has changed: {}. Send it again later"
ABORT = ", or with requests=abort, which waits for no requests"
STILL_RUNNING = "requests still ran after {:.0f} s; use requests={}"
GONE = "the caller has gone while the change waited for its turn, so it was not made"
FROZEN = (
    "the engine was paused with requests running, which cannot end so; call /resume first, or use requests=keep "
    "or abort"
)
Look = Callable[[], Awaitable[bool]]


async def is_there() -> bool:
    """Return False, as the check ``is_gone`` of a caller that is known to wait."""
    return False


async def pause() -> None:
    await asyncio.sleep(PAUSE)


@asynccontextmanager
async def lock(name: str, between: Callable[[], Awaitable[None]] = pause) -> AsyncIterator[None]:
    """Hold the lock ``name``, which excludes all processes of this machine, while the ``with`` block runs.

    ``between`` is awaited between two tries, and may raise to give up. The lock is the address of an abstract Unix
    socket. Only one socket can have it, the kernel takes it back from a process that dies, and no file is left behind.
    """
    with socket.socket(socket.AF_UNIX) as place:
        while True:
            try:
                place.bind(f"\0qerl-{name}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            await between()
        yield


class Quiesce:
    """Bring an engine to rest, called ``instance`` in all its API server processes; ``is_shared`` if it has several."""

    def __init__(self, engine: Engine, changes: ChangeLog, instance: str, *, is_shared: bool) -> None:
        self.engine, self._client, self._changes = engine, engine.client, changes
        self._instance, self._is_shared = instance, is_shared
        self._made: _Turn | None = None  # the change of this process that holds the line lock
        engine_client.watch_pauses(self._client, self._pause_of_others, self._resumption_of_others)

    @asynccontextmanager
    async def at_rest(self, change: str, mode: str, is_gone: Look = is_there) -> AsyncIterator[Timer]:
        """Keep the engine at rest while the ``with`` block runs, and resume it unless somebody else has paused it.

        Yield the timer of the change, which has the part ``pause`` already. ``change`` is the change's name in messages
        to others that wait for it. ``mode`` says what happens to running requests, and ``is_gone`` whether the caller
        has stopped waiting. Raises Refused if the engine does not come to rest in time, is lost, or the caller is gone.
        Raises Refused also with "wait" if somebody else has paused the engine in the middle of requests.
        """
        turn, has_paused = _Turn(self, change, mode, is_gone), False
        if mode == "abort":
            await self._cut_short()
        async with AsyncExitStack() as line:
            try:
                while True:
                    if self._made is not turn:
                        await line.enter_async_context(self._line(turn))
                        timer = Timer()
                    drain, is_at_rest = None, False
                    async with lock(self._instance):
                        is_paused = await self._is_paused()
                        if mode == "abort" or not is_paused:
                            has_paused = not is_paused
                            drain = asyncio.create_task(self._pause(mode))
                            is_at_rest = mode != "wait"
                            await (self.engine.in_time(drain) if is_at_rest else self._begun(drain))
                        elif await self._is_working():  # somebody else lets requests end
                            if has_paused:  # before them; others may let requests end while this one waits again
                                has_paused = False
                                await self._resume()
                            await line.aclose()
                        elif mode == "keep" or not await engine_client.have_begun(self._client):
                            is_at_rest = True
                        elif has_paused and not self._changes.is_paused:
                            # vLLM preempts requests when the KV cache is full, and does not restart them while it lets
                            # requests end. It runs them first once it is resumed, and is then paused again.
                            await self.engine.in_time(engine_client.resume(self._client))
                        else:
                            raise Refused(503, "still_running", FROZEN)
                        if is_at_rest:
                            timer.end("pause")
                            try:
                                yield timer
                            finally:
                                if has_paused:
                                    has_paused = False
                                    await self._resume()
                            return
                    if drain is not None:
                        await turn.until(drain)
                    elif self._made is not turn:
                        await turn.a_while(GLANCE)
                    else:
                        await asyncio.sleep(engine_client.BREATH)
            finally:
                if has_paused:
                    async with lock(self._instance):
                        await self._resume()

    @asynccontextmanager
    async def _line(self, turn: "_Turn") -> AsyncIterator[None]:
        async with lock(f"{self._instance} line", turn.a_while):
            self._made, turn.made_since = turn, time.monotonic()
            try:
                yield
            finally:
                self._made = None

    async def _cut_short(self) -> None:
        """Abort the requests that somebody waits for, even if that is the change that holds the line lock."""
        async with lock(self._instance):
            if await self._is_paused() and await self._is_working():
                await self.engine.in_time(self._pause("abort"))

    def obstacle(self) -> str:
        """Return a text that says what a change has to wait for."""
        if self._made is not None:
            made, seconds = self._made, time.monotonic() - self._made.made_since
            return f"another change ({made.change}, requests={made.mode}) has been under way for {seconds:.0f} s"
        if self._changes.is_paused:
            return "somebody else has paused the engine (/pause or /sleep) and lets the requests under way end"
        return "a change that another API server process was asked for is under way"

    async def _pause(self, mode: str) -> None:
        await engine_client.pause(self._client, mode, is_shared=self._is_shared)

    async def _is_paused(self) -> bool:
        self.engine.check()
        is_paused = await self.engine.in_time(self._client.is_paused())
        if not is_paused and self._changes.is_paused:
            self._changes.is_paused = False  # the engine was resumed, though not by a method of the client
        return bool(is_paused)

    async def _is_working(self) -> bool:
        return await self.engine.in_time(engine_client.is_working(self._client))

    async def _begun(self, pause: "asyncio.Future[Any]") -> None:
        """Wait until the engine has been told to pause; requests may still run."""
        while not pause.done() and not await self.engine.in_time(self._client.is_paused()):
            await asyncio.sleep(GLANCE / 10)

    async def _resume(self) -> None:
        """Resume the engine, unless somebody else has paused it or it does not answer.

        A lost engine is resumed too, so that waiting requests are refused instead of waiting on.
        """
        if not self._changes.is_paused and not self.engine.is_silent:
            await self.engine.in_time(engine_client.resume(self._client))

    async def _pause_of_others(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async with lock(self._instance):
            before, self._changes.is_paused = self._changes.is_paused, True
            answer = asyncio.ensure_future(call())
            await self._begun(answer)
        try:
            return await answer
        except Exception:  # such as an unknown mode
            self._changes.is_paused = before
            raise

    async def _resumption_of_others(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async with lock(self._instance):
            answer = await call()
            # an engine that is only partly woken up stays paused
            self._changes.is_paused = self._changes.is_paused and await self.engine.in_time(self._client.is_paused())
            return answer


class _Turn:
    """Describe a change that waits for the engine: how long it may, and whether its caller still waits."""

    def __init__(self, quiesce: Quiesce, change: str, mode: str, is_gone: Look) -> None:
        self._quiesce, self.change, self.mode, self._is_gone = quiesce, change, mode, is_gone
        self._limit = DRAIN if mode == "wait" else LINE
        self._start = self.made_since = time.monotonic()

    async def a_while(self, seconds: float = PAUSE) -> None:
        """Wait ``seconds``. Raises Refused if the change has waited too long, the caller is gone or the engine lost."""
        if await self._is_over():
            text = BUSY.format(self._limit, self._quiesce.obstacle()) + ("" if self.mode == "abort" else ABORT)
            raise Refused(503, "busy", text)
        await asyncio.sleep(seconds)

    async def until(self, drain: "asyncio.Task[Any]") -> None:
        """Wait until the requests that the change lets end have ended. Raises Refused as ``a_while`` does."""
        try:
            while not (await asyncio.wait({drain}, timeout=GLANCE))[0]:
                if await self._is_over():
                    raise Refused(503, "still_running", STILL_RUNNING.format(self._limit, "keep or abort"))
            drain.result()
        finally:
            drain.cancel()

    async def _is_over(self) -> bool:
        self._quiesce.engine.check()
        if await self._is_gone():
            raise Refused(499, "gone", GONE)
        return time.monotonic() > self._start + self._limit
