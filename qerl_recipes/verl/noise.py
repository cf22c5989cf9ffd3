"""Name verl's agent loop manager by its earlier path, which configurations still hold."""

from qerl_vllm_plugin.verl.noise import NoisyAgentLoopManager as NoisyAgentLoopManager
