"""Limit a wait that may never end, and time the parts of a change.

An engine whose worker hangs does not answer, and vLLM waits for ever.
"""

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 300.0  # seconds for an engine's answer to a change; one takes less than one second
DRAIN = 600.0  # seconds that a server waits for running requests where it was asked to ("wait")
LOOK = 1.0  # seconds between two looks at whether an engine core lives
DEAD = "the engine core has died, and its policy with it; start the engine again, its log says why"
SILENT = "the engine has not answered for {:g} s, and whether it has changed nobody knows; restart it"


def begun(call: Callable[[], T]) -> futures.Future[T]:
    """What ``call`` will return or raise, called in a thread of its own."""
    answer: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="qerl-call", daemon=True).start()  # the program may end while it waits
    return answer


def in_time(answer: futures.Future[T], seconds: float, is_dead: Callable[[], bool] = lambda: False) -> T:
    """Return what comes. Raises TimeoutError after ``seconds``, or once ``is_dead``: what was asked cannot be taken
    back."""
    end = time.monotonic() + seconds
    while not answer.done():
        if is_dead():
            raise TimeoutError(DEAD)
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError(SILENT.format(seconds))
        futures.wait([answer], min(left, LOOK))
    return answer.result()


class Laps:
    """``seconds`` by part, in the order in which they ended; a part that ends again goes on.

    They are the host's: what a GPU has been asked to do and nobody has waited for is in no part, or in a later one.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """What has passed since the end of the part before belongs to this one."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
