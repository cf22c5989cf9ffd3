"""Plan the GPU memory of a run before anything loads."""
