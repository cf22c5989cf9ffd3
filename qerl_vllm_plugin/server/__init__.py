"""The policy over HTTP: routes of vLLM's API server under /v1/qerl, on when VLLM_PLUGINS names ``qerl``."""
