"""The engine as a server's policy sees it: asked in time or given up, and then for every API server process."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm.logger import init_logger

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.compat import engine_client
from qerl_vllm_plugin.server.body import Refused
from qerl_vllm_plugin.wire.timing import SILENT
from qerl_vllm_plugin.worker.answers import PolicyLostError, check_answers
from qerl_vllm_plugin.worker.change_log import ChangeLog

logger = init_logger("vllm.qerl")
T = TypeVar("T")

LOOK = 1.0  # seconds between two looks at the engine core, and at what other API server processes have found out
LOST_TO_OTHERS = "the engine was given up, or holds half of a policy: another API server's log says why; restart it"


class Engine:
    """``client`` is vLLM's engine client, which has ``patience`` seconds for an answer, unless it waits for requests.

    ``changes`` is what all processes of this engine share, once it has been opened; ``lost`` says why it was given up.
    """

    def __init__(self, client: Any, patience: float) -> None:
        self.client, self._patience = client, patience
        self.changes: ChangeLog | None = None
        self.lost: str | None = None
        self.is_silent = False

    def watch(self) -> asyncio.Task[None]:
        """As long as the task goes on, calls end when the engine core dies, and what another API server process of this
        engine finds out holds for this one."""
        return asyncio.create_task(self._watch())

    async def rpc(self, method: str, *args: Any) -> dict[str, Any]:
        """The first rank's answer. Raises Refused if a rank refused."""
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
        """Raises Refused if the engine was given up."""
        if self.lost is not None:
            raise Refused(503, "lost", self.lost)

    async def in_time(self, answer: Coroutine[Any, Any, T]) -> T:
        """What the engine answers. Raises Refused if it does not: that engine is lost, for its answers no longer belong
        to the questions."""
        try:
            return await asyncio.wait_for(answer, self._patience)
        except asyncio.TimeoutError:
            self.is_silent = True
            self.lose(SILENT.format(self._patience))
            engine_client.end_requests(self.client, str(self.lost))
            raise Refused(503, "lost", str(self.lost)) from None

    def lose(self, reason: str) -> None:
        """From now on it answers no request, in no process."""
        self.lost = reason
        logger.error("%s", reason)
        engine_client.refuse_requests(self.client, reason)
        if self.changes is not None:
            self.changes.lose()

    async def _watch(self) -> None:
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
