"""What the driver has sent a worker, as tensors: given as they are, as a safetensors file, or as memory of a GPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from qerl_vllm_plugin.adapter.check import PREFIX, AdapterError, Fetch
from qerl_vllm_plugin.wire import gpu_memory
from qerl_vllm_plugin.wire.mapped_file import MappedFile
from qerl_vllm_plugin.wire.shared_file import PATH

Tensors = Mapping[str, torch.Tensor]
Given = tuple[Tensors | None, Tensors | None, Fetch | None]  # adapter, norms, and what reads tensors without memory


@contextmanager
def received(tensors: Any, norms: Any, device: torch.device, file: MappedFile) -> Iterator[Given]:
    """Adapter and norms as ``worker.qerl_swap`` takes them, until the end of the block; norms are always read. ``file``
    is what this worker has mapped.

    Raises SafetensorError for a file that is none, ValueError for a damaged description of GPU memory, CudaIPCError for
    memory that this worker cannot read, and AdapterError for two descriptions.
    """
    sent = norms if tensors is None else tensors
    if not isinstance(sent, str) or not sent.startswith("{"):
        is_one = tensors is norms or (isinstance(tensors, str | bytes) and tensors == norms)
        given = _unpack(tensors, device, file)
        is_file = isinstance(tensors, str) and bool(PATH.fullmatch(tensors))
        fetch = file.fetch if is_file and file.is_whole and device.type == "cuda" else None
        yield (*_split(given, given if is_one else _unpack(norms, device, file), is_one=is_one), fetch)
        return
    if tensors is not None and norms is not None and tensors != norms:
        raise AdapterError("an adapter and its norms lie in one piece of GPU memory, and have one description")
    with gpu_memory.mapped(sent, device) as found:
        given, trained = (found.tensors if part is not None else None for part in (tensors, norms))
        adapter, others = _split(given, trained, is_one=given is trained)
        if others is not None:
            others = dict(zip(others, found.fetch(list(others.values()), device).tensors(), strict=True))
        yield adapter, others, found.fetch


def _split(given: Tensors | None, trained: Tensors | None, *, is_one: bool) -> tuple[Tensors | None, Tensors | None]:
    """``is_one``: they are the same, of which what is no part of an adapter is a norm."""
    if not is_one or given is None or trained is None:
        return given, trained
    norms = {name: tensor for name, tensor in trained.items() if not name.startswith(PREFIX)}
    return {name: tensor for name, tensor in given.items() if name.startswith(PREFIX)}, norms


def _unpack(tensors: Any, device: torch.device, file: MappedFile) -> Tensors | None:
    from safetensors.torch import load, load_file

    if isinstance(tensors, str) and PATH.fullmatch(tensors):
        return file.open(tensors, device)
    if isinstance(tensors, bytes | bytearray | memoryview):
        return load(bytes(tensors))
    return load_file(tensors) if isinstance(tensors, str) else tensors
