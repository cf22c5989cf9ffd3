"""Stop tools, and the methods of environments that TRL calls, when their time is up."""

import asyncio
import contextlib
import functools
import inspect
import signal
import threading
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn, TypeVar

Instance = TypeVar("Instance")


class ToolTimeout(BaseException):
    """Report that a tool was stopped; no Exception, so that a tool that catches those is stopped as well."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(f"took longer than {seconds:g} s (max_tool_seconds) and was stopped")


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise ToolTimeout in the block after ``seconds``; only the main thread can be stopped so."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> NoReturn:
        raise ToolTimeout(seconds)

    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


async def wait_for(coroutine: Coroutine[Any, Any, Any], seconds: float | None) -> Any:
    """Return what ``coroutine`` returns; raise ToolTimeout after ``seconds``, even if it holds on to its task."""
    task = asyncio.ensure_future(coroutine)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if done:
        return task.result()
    task.cancel()
    raise ToolTimeout(seconds)


def watched(environment: Instance, path: str, seconds: float | None) -> Instance:
    """Give ``reset`` and ``get_reward`` of the environment at ``path`` a limit of ``seconds``, and return it.

    If one takes longer or fails, a ValueError names it and ends the run: without a reward the policy would learn wrong.
    """
    for name in ("reset", "get_reward"):
        if inspect.isfunction(function := getattr(type(environment), name, None)):
            method = types.MethodType(_watched(function, f"environment {path}: {name}", seconds), environment)
            with contextlib.suppress(AttributeError):  # the class has slots
                setattr(environment, name, method)
    return environment


def _watched(function: Callable[..., Any], where: str, seconds: float | None) -> Callable[..., Any]:
    @contextlib.contextmanager
    def named() -> Iterator[None]:
        try:
            yield
        except ToolTimeout as error:
            way_out = "raise max_tool_seconds, or set environment_python, with which a process that hangs is replaced"
            raise ValueError(f"{where} {error}; {way_out}") from error
        except (Exception, SystemExit) as error:
            failure = f"{where} failed ({type(error).__name__}: {error})"
            raise ValueError(f"{failure}; catch in it what may happen in a run") from error

    @functools.wraps(function)
    def called(*args: Any, **arguments: Any) -> Any:
        with named(), time_limit(seconds):
            return function(*args, **arguments)

    @functools.wraps(function)
    async def awaited(*args: Any, **arguments: Any) -> Any:
        with named():
            return await wait_for(function(*args, **arguments), seconds)

    return awaited if inspect.iscoroutinefunction(function) else called
