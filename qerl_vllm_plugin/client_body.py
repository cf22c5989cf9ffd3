"""What a client sends for an adapter, wherever its tensors lie."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qerl_vllm_plugin.adapter.check import Tensors, joined, plain_config
from qerl_vllm_plugin.wire import gpu_memory, shared_file
from qerl_vllm_plugin.wire.checksum import checksums
from qerl_vllm_plugin.wire.safetensors_file import header_bytes

PIECE = 256 << 10


def body(tensors: Tensors, config: Any, norms: Tensors | None = None) -> bytes:
    """What is sent for an adapter: one safetensors file in PEFT's names, with its config in the metadata.

    ``config`` is the content of ``adapter_config.json`` or PEFT's LoraConfig; ``norms`` are trained norms by their
    checkpoint names. A set of module names, as PEFT holds them, becomes a list. Raises AdapterError for a name that is
    in both, and for another kind of config.
    """
    return b"".join(pieces(joined(tensors, norms), config))


def pieces(tensors: Tensors, config: Any) -> Iterator[memoryview]:
    """The body from its beginning to its end. Small ones: httpcore copies what is left of a piece with every write."""
    layout = ((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    yield memoryview(header_bytes(layout, metadata(config)))
    for tensor in tensors.values():
        left = memoryview(shared_file.content(tensor).numpy())
        while left:
            yield left[:PIECE]
            left = left[PIECE:]


@contextmanager
def gpu_body(tensors: Tensors, config: Any) -> Iterator[bytes]:
    """What is sent for tensors on a GPU of the server's machine, which it may read until the end of the block.

    The file whose ticket is the proof shows that the caller is a process of the server's user on its machine. Raises
    CudaIPCError.
    """
    with gpu_memory.described(tensors) as (text, memory):
        listed = [json.loads(text)["tensors"], checksums([memory])]
        given = {"memory": text, "checksum": hashlib.sha256(json.dumps(listed).encode()).hexdigest()}
        with shared_file.proof(hashlib.sha256(text.encode()).digest()) as ticket:
            yield json.dumps({**given, "proof": ticket, "adapter_config": plain_config(config)}).encode()


def metadata(config: Any) -> dict[str, str]:
    """What stands beside the tensors in their file."""
    return {"adapter_config": json.dumps(plain_config(config))}
