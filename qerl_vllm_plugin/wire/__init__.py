"""Carry tensors from one process to another: in shared memory, in GPU memory, or in a request's body."""
