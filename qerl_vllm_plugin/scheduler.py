"""Name the scheduler for vLLM's option ``--scheduler-cls``: ``qerl_vllm_plugin.scheduler.scheduler``."""

from qerl_vllm_plugin.compat.scheduler import scheduler as scheduler
