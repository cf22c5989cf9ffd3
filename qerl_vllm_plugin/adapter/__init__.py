"""A LoRA adapter: checked, read from its folder, and kept in the layers or in vLLM's LoRA slots.

Nothing here needs vLLM before an engine does, so that clients can use it.
"""

from qerl_vllm_plugin.adapter.check import AdapterError as AdapterError
