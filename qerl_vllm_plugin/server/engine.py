"""Call the engine from a server's policy, and give it up if it does not answer in time.

An engine that one API server process has given up is lost to all of them.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from vllm.logger import init_logger

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.compat import engine_client
from qerl_vllm_plugin.wire.body import Refused
from qerl_vllm_plugin.wire.timing import SILENT
from qerl_vllm_plugin.worker.change import PolicyLostError, check_answers
from qerl_vllm_plugin.worker.change_log import ChangeLog

logger = init_logger("vllm.qerl")
T = TypeVar("T")

LOOK = 1.0  # seconds between two checks of the engine core, and of what other API server processes have found
LOST_TO_OTHERS = "the engine was given up, or holds half of a policy: another API server's log says why; restart it"


class Engine:
    """Call the engine of one API server process through vLLM's engine client.

    An answer may take ``patience`` seconds, except for a pause that waits for requests. ``changes`` is the log that all
    processes of this engine share, None until the engine is opened. ``lost`` says why the engine was given up.
    ``is_silent`` is True if that was for want of an answer.
    """

    def __init__(self, client: Any, patience: float) -> None:
        self.client, self._patience = client, patience
        self.changes: ChangeLog | None = None
        self.lost: str | None = None
        self.is_silent = False

    async def rpc(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a worker method on all ranks and return the first rank's answer. Raises Refused if a rank refused."""
        self.check()
        results = await self.in_time(self.client.collective_rpc(method, args=args))
        try:
            check_answers(results)
        except AdapterError as error:
            if any(result.get("stale") for result in results):
                raise Refused(409, "stale_version", str(error)) from error
            unreachable = any(result.get("unreachable") for result in results)
            raise Refused(422, "unreachable" if unreachable else "refused", str(error)) from error
        except PolicyLostError as error:
            self.lose(str(error))
            raise Refused(503, "lost", str(error)) from error
        return dict(results[0])

    def check(self) -> None:
        """Raise Refused if the engine was given up."""
        if self.lost is not None:
            raise Refused(503, "lost", self.lost)

    async def in_time(self, answer: Awaitable[T]) -> T:
        """Wait for the engine's answer and return it. Raises Refused if none comes in time.

        Such an engine is lost, because later answers would no longer belong to the calls that wait for them.
        """
        try:
            return await asyncio.wait_for(answer, self._patience)
        except asyncio.TimeoutError:
            self.is_silent = True
            self.lose(SILENT.format(self._patience))
            engine_client.end_requests(self.client, str(self.lost))
            raise Refused(503, "lost", str(self.lost)) from None

    def lose(self, reason: str) -> None:
        """Give the engine up: it answers no request any more, in any API server process."""
        self.lost = reason
        logger.error("%s", reason)
        engine_client.refuse_requests(self.client, reason)
        if self.changes is not None:
            self.changes.lose()

    async def watch(self) -> None:
        """End this process's calls when the core dies; give the engine up when another API server process does."""
        is_dead = False
        while True:
            await asyncio.sleep(LOOK)
            if self.client.errored:
                if not is_dead:
                    engine_client.fail_at_exit()
                is_dead = True
                engine_client.end_calls(self.client)
            if self.changes is not None and self.changes.is_lost and self.lost is None:
                self.lose(LOST_TO_OTHERS)
                engine_client.end_requests(self.client, LOST_TO_OTHERS)
