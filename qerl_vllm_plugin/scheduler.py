"""vLLM's own schedulers with a prefix cache that is emptied in time by what it holds: for an engine in a process of its
own, where ``Policy`` and the server cannot reach the blocks (in this process they do, and need no such scheduler).

    vllm serve MODEL --quantization qerl_nvfp4 --scheduler-cls qerl_vllm_plugin.scheduler.scheduler
    LLM(MODEL, quantization="qerl_nvfp4", scheduler_cls="qerl_vllm_plugin.scheduler.scheduler")
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from qerl_vllm_plugin.prefix_cache import without_empty_blocks


class QerlScheduler(Scheduler):
    """vLLM's, but for the emptying."""

    def reset_prefix_cache(self, *args: Any, **keywords: Any) -> bool:
        with without_empty_blocks(self):
            return super().reset_prefix_cache(*args, **keywords)


class QerlAsyncScheduler(AsyncScheduler):
    """vLLM's for asynchronous scheduling, but for the emptying."""

    def reset_prefix_cache(self, *args: Any, **keywords: Any) -> bool:
        with without_empty_blocks(self):
            return super().reset_prefix_cache(*args, **keywords)


def scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """What vLLM asks of its option ``scheduler_cls``: the scheduler of an engine, of the kind that it would have."""
    kind = QerlAsyncScheduler if vllm_config.scheduler_config.async_scheduling else QerlScheduler
    return kind(vllm_config=vllm_config, **options)
