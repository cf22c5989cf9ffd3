"""One at a time, among the tasks of all processes of this machine."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

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
