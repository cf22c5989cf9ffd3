"""Check a LoRA adapter, read it from its folder, and keep it in the layers or in vLLM's LoRA slots.

Importing this package or its modules ``check`` and ``folder`` does not import vLLM, so clients can use them.
"""

from qerl_vllm_plugin.adapter.check import AdapterError as AdapterError
