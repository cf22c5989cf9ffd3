"""Serve the policy over HTTP: routes of vLLM's API server under /v1/qerl.

They exist where VLLM_PLUGINS names ``qerl`` and an admin token is configured.
"""
