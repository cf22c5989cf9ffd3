"""Build what a client sends for an adapter: a safetensors file, or a description of GPU memory."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qerl_vllm_plugin.adapter.check import joined, plain_config
from qerl_vllm_plugin.wire import gpu_memory, shared_file
from qerl_vllm_plugin.wire.checksum import checksums
from qerl_vllm_plugin.wire.safetensors_file import Tensors, header_bytes

PIECE = 256 << 10


def body(tensors: Tensors, config: Any, norms: Tensors | None = None) -> bytes:
    """Return an adapter as one safetensors file in PEFT's names, with its config in the metadata.

    ``config`` is the content of ``adapter_config.json`` or PEFT's LoraConfig. ``norms`` are trained norms by their
    checkpoint names. A set of module names, as PEFT holds them, becomes a list. Raises AdapterError for a name that
    is in both ``tensors`` and ``norms``, and for another kind of config.
    """
    return b"".join(pieces(joined(tensors, norms), config))


def pieces(tensors: Tensors, config: Any) -> Iterator[memoryview]:
    """Yield the body in order, in pieces of at most PIECE bytes after the header.

    The pieces are small because httpcore copies the rest of a piece with every write.
    """
    layout = ((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    yield memoryview(header_bytes(layout, metadata(config)))
    for tensor in tensors.values():
        left = memoryview(shared_file.content(tensor).numpy())
        while left:
            yield left[:PIECE]
            left = left[PIECE:]


@contextmanager
def gpu_body(tensors: Tensors, config: Any) -> Iterator[bytes]:
    """Yield the body that describes tensors on a GPU of the server's machine; valid inside the ``with`` block.

    The body names a file as proof that the caller runs on the server's machine as the server's user. Raises
    CudaIPCError if the GPU memory cannot be shared.
    """
    with gpu_memory.described(tensors) as (text, memory):
        listed = [json.loads(text)["tensors"], checksums([memory])]
        given = {"memory": text, "checksum": hashlib.sha256(json.dumps(listed).encode()).hexdigest()}
        with shared_file.proof(hashlib.sha256(text.encode()).digest()) as ticket:
            yield json.dumps({**given, "proof": ticket, "adapter_config": plain_config(config)}).encode()


def metadata(config: Any) -> dict[str, str]:
    """Return the metadata of the safetensors file: the adapter's config as JSON."""
    return {"adapter_config": json.dumps(plain_config(config))}
