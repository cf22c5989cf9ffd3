"""Bring the engine to rest for a change, in turn with other changes and with vLLM's own pauses.

There are two locks, each shared by all API server processes of an engine. A change holds the **line** lock from its
beginning to its end, so there is one change at a time. It holds it also while it lets requests end ("wait", up to
``DRAIN`` seconds). It holds the **engine** lock only for a moment, while nothing may run.

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
from contextlib import asynccontextmanager
from typing import Any

from qerl_vllm_plugin.compat import engine_client
from qerl_vllm_plugin.server.engine import Engine
from qerl_vllm_plugin.wire.body import Refused
from qerl_vllm_plugin.wire.timing import DRAIN, Laps
from qerl_vllm_plugin.worker.change_log import ChangeLog

PAUSE = 0.005  # seconds between two tries to take a lock


async def pause() -> None:
    await asyncio.sleep(PAUSE)


@asynccontextmanager
async def turn(name: str, between: Callable[[], Awaitable[None]] = pause) -> AsyncIterator[None]:
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


LINE = 60.0  # seconds that a change waits for earlier changes, and for requests that somebody else lets end
GLANCE = 0.02  # seconds between two checks of an engine that comes to rest
BUSY = "not made after {:.0f} s, and nothing has changed: {}. Send it again later"
ABORT = ", or with requests=abort, which waits for no requests"
STILL_RUNNING = "requests still ran after {:.0f} s; use requests={}"
GONE = "the caller has gone while the change waited for its turn, so it was not made"
FROZEN = (
    "somebody else has paused the engine in the middle of requests, which cannot end so; resume it first, or use "
    "requests=keep or abort"
)

Look = Callable[[], Awaitable[bool]]


async def is_there() -> bool:
    """Return False, as the check ``is_gone`` of a caller that is known to wait."""
    return False


class SomebodyDrains(Exception):
    """Somebody else lets requests end; the change must release its locks meanwhile."""


class Rest:
    """Brings one engine to rest, from one API server process.

    ``instance`` is the engine's name, the same in all its API server processes. ``is_shared`` says that there are
    others.
    """

    def __init__(self, engine: Engine, changes: ChangeLog, instance: str, *, is_shared: bool) -> None:
        self._engine, self._client, self._changes = engine, engine.client, changes
        self._instance, self._is_shared = instance, is_shared
        self._made: tuple[str, float] | None = None  # the change here that holds the line lock, and its start
        engine_client.watch_pauses(self._client, self._pause_of_others, self._resumption_of_others)

    @asynccontextmanager
    async def of(self, change: str, mode: str, is_gone: Look = is_there) -> AsyncIterator[Laps]:
        """Keep the engine at rest while the ``with`` block runs, and resume it unless somebody else has paused it.

        Yield the timer of the change, which has the part ``pause`` already. ``change`` is the change's name in messages
        to others that wait for it. ``mode`` says what happens to running requests, and ``is_gone`` whether the caller
        has stopped waiting. Raises Refused if the engine does not come to rest in time, is lost, or the caller is gone.
        """
        wait = _Patience(self, mode, is_gone)
        if mode == "abort":
            await self._cut_short()
        way = self._once_ended if mode == "wait" else self._at_once
        while True:
            try:
                async with turn(f"{self._instance} line", wait.a_while):
                    self._made = f"another change ({change}, requests={mode})", time.monotonic()
                    try:
                        laps = Laps()
                        async with way(mode, wait):
                            laps.end("pause")
                            yield laps
                            return
                    finally:
                        self._made = None
            except SomebodyDrains:
                await wait.a_while(GLANCE)

    def obstacle(self) -> str:
        """Return a text that says what a change has to wait for."""
        if self._made is not None:
            change, since = self._made
            return f"{change} has been under way for {time.monotonic() - since:.0f} s"
        if self._changes.is_paused:
            return "somebody else has paused the engine (/pause or /sleep) and lets the requests under way end"
        return "a change that another API server process was asked for is under way"

    def _turn(self) -> Any:
        return turn(self._instance)

    @asynccontextmanager
    async def _at_once(self, mode: str, wait: "_Patience") -> AsyncIterator[None]:
        async with self._turn():
            was_paused = await self._is_paused()
            if was_paused and mode != "abort" and await self._is_working():
                raise SomebodyDrains
            try:
                if not was_paused or mode == "abort":
                    await self._engine.in_time(engine_client.pause(self._client, mode, is_shared=self._is_shared))
                yield
            finally:
                if not was_paused:
                    await self._resume()

    @asynccontextmanager
    async def _once_ended(self, mode: str, wait: "_Patience") -> AsyncIterator[None]:
        """Let running requests end, then hold the engine at rest.

        vLLM preempts requests when the KV cache is full, and does not restart them while the engine drains. If this
        process has such requests left, the engine is resumed, which runs them first, and is drained again until none
        is left. Raises Refused if somebody else has paused the engine with such requests left.
        """
        is_ours = False
        try:
            while True:
                drain = None
                async with self._turn():
                    if await self._is_paused():
                        if await self._is_working():
                            raise SomebodyDrains
                        if not await engine_client.have_begun(self._client):
                            yield
                            return
                        if not is_ours or self._changes.is_paused:
                            raise Refused(503, "still_running", FROZEN)
                        await self._engine.in_time(engine_client.resume(self._client))
                    else:
                        drain = asyncio.create_task(engine_client.pause(self._client, mode, is_shared=self._is_shared))
                        is_ours = True
                        await self._begun(drain)
                if drain is None:
                    await asyncio.sleep(engine_client.BREATH)
                else:
                    await wait.until(drain)
        finally:
            if is_ours:
                async with self._turn():
                    await self._resume()

    async def _cut_short(self) -> None:
        """Abort the requests that somebody waits for, even if that is the change that holds the line lock."""
        async with self._turn():
            if await self._is_paused() and await self._is_working():
                await self._engine.in_time(engine_client.pause(self._client, "abort", is_shared=self._is_shared))

    async def _is_paused(self) -> bool:
        self._engine.check()
        is_paused = await self._engine.in_time(self._client.is_paused())
        if not is_paused and self._changes.is_paused:
            self._changes.is_paused = False  # the engine was resumed, though not by a method of the client
        return bool(is_paused)

    async def _is_working(self) -> bool:
        return await self._engine.in_time(engine_client.is_working(self._client))

    async def _begun(self, pause: "asyncio.Task[Any]") -> None:
        """Wait until the engine has been told to pause; requests may still run."""
        while not pause.done() and not await self._engine.in_time(self._client.is_paused()):
            await asyncio.sleep(GLANCE / 10)

    async def _resume(self) -> None:
        """Resume the engine, unless somebody else has paused it or it does not answer.

        A lost engine is resumed too, so that waiting requests are refused instead of waiting on.
        """
        if not self._changes.is_paused and not self._engine.is_silent:
            await self._engine.in_time(engine_client.resume(self._client))

    async def _pause_of_others(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async with self._turn():
            before, self._changes.is_paused = self._changes.is_paused, True
            asked = asyncio.ensure_future(call())
            await self._begun(asked)
        try:
            return await asked
        except Exception:  # such as an unknown mode
            self._changes.is_paused = before
            raise

    async def _resumption_of_others(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async with self._turn():
            answer = await call()
            # an engine that is only partly woken up stays paused
            self._changes.is_paused = self._changes.is_paused and await self._engine.in_time(self._client.is_paused())
            return answer


class _Patience:
    """Limits how long one change waits, and stops it if its caller is gone or the engine is lost."""

    def __init__(self, rest: Rest, mode: str, is_gone: Look) -> None:
        self._rest, self._mode, self._is_gone = rest, mode, is_gone
        self._most = DRAIN if mode == "wait" else LINE
        self._end = time.monotonic() + self._most

    async def a_while(self, seconds: float = PAUSE) -> None:
        """Wait ``seconds``. Raises Refused if the change has waited too long, the caller is gone or the engine lost."""
        await self._look()
        if time.monotonic() > self._end:
            text = BUSY.format(self._most, self._rest.obstacle()) + ("" if self._mode == "abort" else ABORT)
            raise Refused(503, "busy", text)
        await asyncio.sleep(seconds)

    async def until(self, drain: "asyncio.Task[Any]") -> None:
        """Wait until the requests that the change lets end have ended. Raises Refused as ``a_while`` does."""
        try:
            while not (await asyncio.wait({drain}, timeout=GLANCE))[0]:
                await self._look()
                if time.monotonic() > self._end:
                    raise Refused(503, "still_running", STILL_RUNNING.format(self._most, "keep or abort"))
            drain.result()
        finally:
            drain.cancel()

    async def _look(self) -> None:
        self._rest._engine.check()
        if await self._is_gone():
            raise Refused(499, "gone", GONE)
