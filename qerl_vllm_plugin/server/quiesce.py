"""An engine at rest for a change: whose turn it is, what is waited for, and what others ask of the engine meanwhile.

There are two turns, each among all API server processes of an engine. A change has the **line** from its beginning to
its end, also while it lets requests end ("wait", up to ``DRAIN`` seconds): one change at a time. It has the **engine**
from the pause to the resumption, a moment. vLLM's own calls that pause and resume (/pause, /resume, /sleep, /wake_up)
take the second turn too: they come before a change or behind it, wait for nobody's requests, and what they ask for is
how the engine is left. Nobody who waits for requests that somebody else lets end has a turn.

As with vLLM's own /pause, one that lets requests end is cut short by one that aborts them.
"""

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from qerl_vllm_plugin.compat import engine_client
from qerl_vllm_plugin.server.body import Refused
from qerl_vllm_plugin.server.engine import Engine
from qerl_vllm_plugin.wire.timing import DRAIN, Laps
from qerl_vllm_plugin.worker.change_log import ChangeLog

PAUSE = 0.005  # seconds between two tries


async def pause() -> None:
    await asyncio.sleep(PAUSE)


@asynccontextmanager
async def turn(name: str, between: Callable[[], Awaitable[None]] = pause) -> AsyncIterator[None]:
    """Waits until nobody else, of any process, is in such a block of this name, and keeps all others out until its end.
    ``between`` two tries may raise.

    An address of a socket is what only one can have, and what the kernel takes back from a process that dies; it is no
    file, so that nothing is left.
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


LINE = 60.0  # seconds that a change waits for those before it, and for requests that somebody else lets end
GLANCE = 0.02  # seconds between two looks at an engine that comes to rest
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
    """Of a caller who is known to wait: has not gone."""
    return False


class SomebodyDrains(Exception):
    """Somebody else lets requests end: the line is left to others meanwhile."""


class Rest:
    """Of one engine, in one API server process; ``instance`` is the engine's name among all of them, ``is_shared``
    whether there are others."""

    def __init__(self, engine: Engine, changes: ChangeLog, instance: str, *, is_shared: bool) -> None:
        self._engine, self._client, self._changes = engine, engine.client, changes
        self._instance, self._is_shared = instance, is_shared
        self._made: tuple[str, float] | None = None  # the change of this process that has the line, and since when
        engine_client.watch_pauses(self._client, self._pause_of_others, self._resumption_of_others)

    @asynccontextmanager
    async def of(self, change: str, mode: str, is_gone: Look = is_there) -> AsyncIterator[Laps]:
        """Nothing is computed in the block, and afterwards the engine goes on, unless somebody else has paused it.
        The laps are those of the change, from its pause, which they have.

        ``change`` is what to call it where others wait for it. Raises Refused if it takes too long to get there.
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
        """What a change in the line waits for."""
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
        """vLLM puts requests back for lack of room in the KV cache, and in an engine that is to let requests end they
        do not begin anew: it goes on with those of this process, which come first, and pauses again until none is left.
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
        """Aborts requests that are waited for, be it by the change that has the line."""
        async with self._turn():
            if await self._is_paused() and await self._is_working():
                await self._engine.in_time(engine_client.pause(self._client, "abort", is_shared=self._is_shared))

    async def _is_paused(self) -> bool:
        self._engine.check()
        is_paused = await self._engine.in_time(self._client.is_paused())
        if not is_paused and self._changes.is_paused:
            self._changes.is_paused = False  # resumed by what is no call of the client
        return bool(is_paused)

    async def _is_working(self) -> bool:
        return await self._engine.in_time(engine_client.is_working(self._client))

    async def _begun(self, pause: "asyncio.Task[Any]") -> None:
        """Returns when the engine has been told to pause; requests may still run."""
        while not pause.done() and not await self._engine.in_time(self._client.is_paused()):
            await asyncio.sleep(GLANCE / 10)

    async def _resume(self) -> None:
        """A lost engine too: what waits is refused, and waits no longer."""
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
            # an engine that is woken up in part stays paused
            self._changes.is_paused = self._changes.is_paused and await self._engine.in_time(self._client.is_paused())
            return answer


class _Patience:
    """Of one change, until it is made."""

    def __init__(self, rest: Rest, mode: str, is_gone: Look) -> None:
        self._rest, self._mode, self._is_gone = rest, mode, is_gone
        self._most = DRAIN if mode == "wait" else LINE
        self._end = time.monotonic() + self._most

    async def a_while(self, seconds: float = PAUSE) -> None:
        """A moment in the line. Raises Refused if there have been enough of them, or nobody waits for the answer."""
        await self._look()
        if time.monotonic() > self._end:
            text = BUSY.format(self._most, self._rest.obstacle()) + ("" if self._mode == "abort" else ABORT)
            raise Refused(503, "busy", text)
        await asyncio.sleep(seconds)

    async def until(self, drain: "asyncio.Task[Any]") -> None:
        """Returns when the requests that the change lets end have ended. Raises Refused, as ``a_while``."""
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
