"""A limit for what may never end: an engine whose worker hangs does not answer, and vLLM waits for ever."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 300.0  # seconds for an engine's answer to a change; one takes less than one second
SILENT = "the engine has not answered for {:g} s, and whether it has changed nobody knows; restart it"


def in_time(call: Callable[[], T], seconds: float) -> T:
    """What ``call`` returns or raises, called in a thread of its own. Raises TimeoutError after ``seconds``, when the
    thread is left to itself: what it waits for cannot be taken back."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="qerl-call", daemon=True)  # the program may end while it waits
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(SILENT.format(seconds))
    return returned[0]
