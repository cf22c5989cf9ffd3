"""One at a time, among processes of this machine."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PAUSE = 0.005  # seconds between two tries


@asynccontextmanager
async def turn(name: str) -> AsyncIterator[None]:
    """Waits until no other process is in such a block of this name, and keeps all others out until its end.

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
            await asyncio.sleep(PAUSE)
        yield
