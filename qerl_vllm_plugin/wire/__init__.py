"""Carry tensors from one process to another: in GPU memory, in shared memory, or in the message itself.

``sender.Sender.deliver(tensors, send)`` encodes tensors and sends them; ``receiver.decoded(sent, device, file)`` reads
them. The ways: GPU memory (gpu_memory.py over cuda_ipc.py), a file in shared memory (shared_segment.py over
shared_file.py), and a request's body (body.py).
"""
