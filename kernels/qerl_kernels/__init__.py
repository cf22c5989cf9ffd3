"""NVFP4 weights and the arithmetic on them: torch and Triton only, nothing of vLLM, TRL or files on disk."""
