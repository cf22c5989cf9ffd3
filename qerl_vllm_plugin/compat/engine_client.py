"""What depends on the insides of vLLM's engine clients, the asynchronous one of a server and that of ``vllm.LLM``, for
0.26 to 0.32."""

import asyncio
import atexit
import functools
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any

BREATH = 0.2  # seconds; an engine that goes on makes several steps meanwhile
LAST_OUTPUTS = 0.02  # seconds, in vLLM too


def is_engine_death(error: BaseException) -> bool:
    """Whether an engine client raised because its engine has died."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def has_died(llm: Any) -> bool:
    """Whether the engine core of a ``vllm.LLM``, in another process, has died."""
    resources = getattr(llm.llm_engine.engine_core, "resources", None)
    return bool(getattr(resources, "engine_dead", False))


def fail_at_exit() -> None:
    """Let this process end with code 1 whenever it ends: vLLM's server ends with 0 when its engine core has died."""

    def fail() -> None:
        atexit.unregister(fail)
        atexit._run_exitfuncs()  # all others, which os._exit would leave out
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    atexit.register(fail)


def end_calls(engine: Any) -> None:
    """Ends with an error every call that an engine client has sent to a core that has died.

    vLLM ends the requests under way then, and refuses what comes later; it leaves the calls waiting for ever.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    for answer in list(engine.engine_core.utility_results.values()):
        if not answer.done():
            answer.set_exception(EngineDeadError())


async def pause(engine: Any, mode: str, *, is_shared: bool) -> None:
    """Pauses an engine, as its client's ``pause_generation`` does; the caches stay as they are. ``is_shared``: requests
    may come through other processes, too.

    vLLM's own sleeps for 20 ms at its end, so that the last outputs of requests that it has ended are out. Here it does
    where there may be such: "keep" ends none, and where no request is under way none ends.
    """
    may_end = mode != "keep" and (is_shared or bool(engine.output_processor.request_states))
    await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
    if may_end:
        await asyncio.sleep(LAST_OUTPUTS)


async def resume(engine: Any) -> None:
    """Lets a paused engine go on, as its client's ``resume_generation`` does."""
    await engine.engine_core.resume_scheduler_async()


Around = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


def watch_pauses(engine: Any, pausing: Around, resuming: Around) -> None:
    """From now on whoever pauses or resumes an engine by its client's own methods, as the routes /pause, /resume,
    /sleep and /wake_up do, gets what ``pausing`` or ``resuming`` makes of the call; ``pause`` and ``resume`` here do
    not pass there."""

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
    """Whether requests of this process have tokens already and do not end, in an engine that has come to rest."""
    end = time.monotonic() + BREATH
    while any(not state.is_prefilling for state in engine.output_processor.request_states.values()):
        if time.monotonic() > end:
            return True
        await asyncio.sleep(BREATH / 10)  # last outputs may be on their way
    return False


async def is_working(engine: Any) -> bool:
    """Whether a paused engine computes: it is to let the requests that have begun end ("wait"), and they have not."""
    return bool(await engine.engine_core.call_utility_async("has_work"))


def refuse_requests(engine: Any, reason: str) -> None:
    """From now on an engine client answers no request, and its server's /health says 503."""
    from vllm.v1.engine.exceptions import EngineDeadError

    async def check_health() -> None:
        raise EngineDeadError(reason)

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        raise EngineDeadError(reason)
        yield

    engine.check_health, engine.generate = check_health, generate


def watch_sequences(engine: Any, note: Callable[[Any, Callable[[], bool]], None]) -> None:
    """From now on an engine client calls ``note`` for each sequence that it is asked for, also each of ``n``, in the
    context of the request: with its ``first_token_ts`` and ``last_token_ts``, which vLLM keeps up to date, or None
    where it keeps no statistics, and with what tells whether it is still being computed. (An output of several
    sequences has the times of one of them alone.)"""
    processor = engine.output_processor
    add_request = processor.add_request

    def noting(request: Any, *args: Any, **keywords: Any) -> None:
        add_request(request, *args, **keywords)
        if (state := processor.request_states.get(request.request_id)) is not None:
            note(state.stats, lambda: processor.request_states.get(request.request_id) is state)

    processor.add_request = noting


def end_requests(engine: Any, reason: str) -> None:
    """Every request that an engine client is waiting for an answer to ends with an error, whatever its engine does."""
    from vllm.v1.engine.exceptions import EngineDeadError

    engine.output_processor.propagate_error(EngineDeadError(reason))


def asked(llm: Any, method: str, *args: Any) -> Future[Any] | None:
    """Asks the engine core of a ``vllm.LLM`` in another process -> its answer, which is not waited for: it does what it
    is asked in that order. None, and nothing is asked, where the core runs in this process.

    What vLLM's own client does for each of its methods (``call_utility``), all of which wait.
    """
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core_client import SyncMPClient

    client = llm.llm_engine.engine_core
    if not isinstance(client, SyncMPClient):
        return None
    number, answer = uuid.uuid1().int >> 64, Future[Any]()
    client.utility_results[number] = answer
    client._send_input(EngineCoreRequestType.UTILITY, (0, number, method, args))
    return answer
