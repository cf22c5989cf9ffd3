"""vLLM's own schedulers, which find out sooner what they must know in each step (``block_room``), and with a prefix
cache that is emptied in time by what it holds, also where the engine has a process of its own and ``Policy`` and the
server cannot reach the blocks (in this process they do). What is scheduled, and when, is what vLLM would schedule.

    vllm serve MODEL --quantization qerl_nvfp4 --scheduler-cls qerl_vllm_plugin.scheduler.scheduler
    LLM(MODEL, quantization="qerl_nvfp4", scheduler_cls="qerl_vllm_plugin.scheduler.scheduler")
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from qerl_vllm_plugin.block_room import quick_where_there_is_room
from qerl_vllm_plugin.prefix_cache import without_empty_blocks

NAME = "qerl_vllm_plugin.scheduler.scheduler"  # what vLLM's option ``scheduler_cls`` is given


class _Quicker:
    """What both have, ahead of vLLM's own."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.kv_cache_manager: Any = quick_where_there_is_room(self.kv_cache_manager)

    def reset_prefix_cache(self, *args: Any, **keywords: Any) -> bool:
        with without_empty_blocks(self):
            return super().reset_prefix_cache(*args, **keywords)  # type: ignore[misc]


class QerlScheduler(_Quicker, Scheduler):
    """vLLM's."""


class QerlAsyncScheduler(_Quicker, AsyncScheduler):
    """vLLM's for asynchronous scheduling."""


def scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """What vLLM asks of its option ``scheduler_cls``: the scheduler of an engine, of the kind that it would have."""
    kind = QerlAsyncScheduler if vllm_config.scheduler_config.async_scheduling else QerlScheduler
    return kind(vllm_config=vllm_config, **options)
