"""Read what the driver has sent to a worker: tensors as they are, a safetensors file, or a piece of GPU memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qerl_vllm_plugin.adapter.check import PREFIX, AdapterError, Fetch
from qerl_vllm_plugin.wire import gpu_memory
from qerl_vllm_plugin.wire.mapped_file import MappedFile
from qerl_vllm_plugin.wire.safetensors_file import Tensors
from qerl_vllm_plugin.wire.shared_file import PATH

Given = tuple[Tensors | None, Tensors | None, Fetch | None]  # adapter, norms, and the fetch function


@contextmanager
def received(tensors: Any, norms: Any, device: torch.device, file: MappedFile) -> Iterator[Given]:
    """Yield the adapter, the norms and the fetch function, valid inside the ``with`` block.

    ``tensors`` and ``norms`` are in any form that ``qerl_swap`` (methods.py) takes. ``file`` holds the file that this
    worker has mapped. The fetch function copies tensors, or rows or columns of them, to a device. It comes with a file
    that is mapped for a GPU, and with another process's GPU memory, where the adapter's tensors are on the meta device.
    Otherwise it is None. The norms' values are always read here.

    Raises SafetensorError for what is no safetensors file, and ValueError for a damaged description of GPU memory.
    Raises CudaIPCError for memory that this worker cannot read, and AdapterError for two different descriptions.
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
    """Return the adapter and the norms apart.

    ``is_one`` says that both came as one: tensors without the adapter's prefix are then the norms.
    """
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
