"""The path that vLLM's option ``--scheduler-cls`` is given: ``qerl_vllm_plugin.scheduler.scheduler``."""

from qerl_vllm_plugin.compat.scheduler import scheduler as scheduler
