"""A limit for what may never end: an engine whose worker hangs does not answer, and vLLM waits for ever."""

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 300.0  # seconds for an engine's answer to a change; one takes less than one second
DRAIN = 600.0  # seconds that a server waits for running requests where it was asked to ("wait")
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


def in_time(answer: futures.Future[T], seconds: float) -> T:
    """What comes. Raises TimeoutError after ``seconds``, and then nobody waits any more: what was asked cannot be taken
    back."""
    if not answer.done() and not futures.wait([answer], seconds).done:
        raise TimeoutError(SILENT.format(seconds))
    return answer.result()
