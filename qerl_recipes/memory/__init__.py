"""The plan of GPU memory, made before anything loads."""
