"""Processes of Python that work beside this one, and end with it at the latest; each is talked to through a pipe."""

import multiprocessing
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

CONTEXT = multiprocessing.get_context("spawn")


def child(work: Callable[..., None], *arguments: object) -> tuple[SpawnProcess, Connection]:
    """A process, started, that calls ``work`` with ``arguments`` and its end of the pipe, and this end."""
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=work, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()  # a process that has died is then seen by its end
    return process, mine


def kill(processes: Iterable[SpawnProcess]) -> None:
    """Whatever they do; waits until they have ended."""
    for process in processes:
        process.kill()
        process.join()
