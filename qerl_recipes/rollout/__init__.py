"""Run rollout engines for the trainer: vLLM in its process, or a running server."""
