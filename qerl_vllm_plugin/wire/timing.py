"""Limit a wait that may never end, and time the parts of a change.

An engine whose worker hangs does not answer, and vLLM waits for ever.
"""

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 300.0  # seconds to wait for an engine's answer to a change, which takes less than one second
DRAIN = 600.0  # seconds that a server waits for running requests if it was asked to ("wait")
LOOK = 1.0  # seconds between two checks that an engine core lives
DEAD = "the engine core has died, and its policy with it; start the engine again, its log says why"
SILENT = "the engine has not answered for {:g} s, and whether it has changed nobody knows; restart it"


def begun(call: Callable[[], T]) -> futures.Future[T]:
    """Start ``call`` in a thread of its own; return the future of what it will return or raise."""
    answer: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="qerl-call", daemon=True).start()  # the program may end while the call waits
    return answer


def in_time(answer: futures.Future[T], seconds: float, is_dead: Callable[[], bool] = lambda: False) -> T:
    """Return the result of ``answer``, or raise its error.

    Raises TimeoutError after ``seconds``, or once ``is_dead`` returns True; the call itself cannot be taken back.
    """
    end = time.monotonic() + seconds
    while not answer.done():
        if is_dead():
            raise TimeoutError(DEAD)
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError(SILENT.format(seconds))
        futures.wait([answer], min(left, LOOK))
    return answer.result()


class Timer:
    """Time the parts of a change; ``seconds`` has them in the order in which they first ended.

    A part that ends again adds to its time. The times are the host's: GPU work that nobody has waited for counts in no
    part, or in a later one.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """Count the time since the last part ended for ``part``."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
