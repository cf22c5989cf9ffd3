"""Use the insides of vLLM's engine clients, as read in 0.26 to 0.32.

These are the asynchronous client of a server, and the client of ``vllm.LLM``.
"""

import asyncio
import atexit
import functools
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

BREATH = 0.2  # seconds; a running engine makes several steps in this time
LAST_OUTPUTS = 0.02  # seconds to wait for last outputs, as vLLM does


def is_engine_death(error: BaseException) -> bool:
    """Return True if an engine client raised ``error`` because its engine has died."""
    return isinstance(error, EngineDeadError)


def has_died(llm: Any) -> bool:
    """Return True if a ``vllm.LLM`` has its engine core in another process, and the core has died."""
    resources = getattr(llm.llm_engine.engine_core, "resources", None)
    return bool(getattr(resources, "engine_dead", False))


def fail_at_exit() -> None:
    """Make this process exit with code 1: a server of vLLM whose engine core has died exits with 0."""

    def fail() -> None:
        atexit.unregister(fail)
        atexit._run_exitfuncs()  # runs all other exit functions, which os._exit would skip
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    atexit.register(fail)


def end_calls(engine: Any) -> None:
    """End with an error the calls sent to a core that has died, which vLLM leaves waiting for ever."""
    for answer in list(engine.engine_core.utility_results.values()):
        if not answer.done():
            answer.set_exception(EngineDeadError())


async def pause(engine: Any, mode: str, *, is_shared: bool) -> None:
    """Pause an engine as its client's ``pause_generation`` does, but keep its caches.

    ``is_shared``: requests may come through other processes, too.

    vLLM's own method sleeps for 20 ms at its end, so that the last outputs of requests that it has ended are out. This
    one sleeps only if there may be such outputs: "keep" ends no request, and without running requests none ends.
    """
    may_end = mode != "keep" and (is_shared or bool(engine.output_processor.request_states))
    await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
    if may_end:
        await asyncio.sleep(LAST_OUTPUTS)


async def resume(engine: Any) -> None:
    """Resume a paused engine, as its client's ``resume_generation`` does."""
    await engine.engine_core.resume_scheduler_async()


Around = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


def watch_pauses(engine: Any, pausing: Around, resuming: Around) -> None:
    """Wrap the engine client's own methods that pause and resume, which /pause, /resume, /sleep and /wake_up call.

    From now on, whoever calls them gets the result of ``pausing`` or ``resuming``, which are handed the call. This
    module's ``pause`` and ``resume`` do not pass through the wrappers.
    """

    def watched(call: Callable[..., Awaitable[Any]], around: Around) -> Callable[..., Awaitable[Any]]:
        async def asked(*args: Any, **keywords: Any) -> Any:
            return await around(functools.partial(call, *args, **keywords))

        return asked

    for name, around in {
        "pause_generation": pausing,
        "sleep": pausing,
        "resume_generation": resuming,
        "wake_up": resuming,
    }.items():
        setattr(engine, name, watched(getattr(engine, name), around))


async def have_begun(engine: Any) -> bool:
    """Return True if an engine at rest holds begun requests of this process that do not end within ``BREATH``."""
    end = time.monotonic() + BREATH
    while any(not state.is_prefilling for state in engine.output_processor.request_states.values()):
        if time.monotonic() > end:
            return True
        await asyncio.sleep(BREATH / 10)  # last outputs may still be on their way
    return False


async def is_working(engine: Any) -> bool:
    """Return True if a paused engine still computes, as in mode "wait" until begun requests have ended."""
    return bool(await engine.engine_core.call_utility_async("has_work"))


def refuse_requests(engine: Any, reason: str) -> None:
    """Make an engine client answer no further request, and its server's /health return 503."""

    async def check_health() -> None:
        raise EngineDeadError(reason)

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        raise EngineDeadError(reason)
        yield

    engine.check_health, engine.generate = check_health, generate


def watch_sequences(engine: Any, note: Callable[[Any, Callable[[], bool]], None]) -> None:
    """Make an engine client call ``note`` for each further sequence it is asked for, including each of ``n``.

    ``note`` runs in the context of the request. Its first argument has ``first_token_ts`` and ``last_token_ts``, which
    vLLM keeps up to date, or is None if vLLM keeps no statistics. Its second argument returns True while the sequence
    is being computed. (An output of several sequences has the times of only one of them.)
    """
    processor = engine.output_processor
    add_request = processor.add_request

    def noting(request: Any, *args: Any, **keywords: Any) -> None:
        add_request(request, *args, **keywords)
        if (state := processor.request_states.get(request.request_id)) is not None:
            note(state.stats, lambda: processor.request_states.get(request.request_id) is state)

    processor.add_request = noting


def end_requests(engine: Any, reason: str) -> None:
    """End with an error every request that an engine client is waiting for, whatever its engine does."""
    engine.output_processor.propagate_error(EngineDeadError(reason))
