"""Define NVFP4 weights and compute with them, using only torch and Triton: nothing of vLLM, TRL or files on disk."""
