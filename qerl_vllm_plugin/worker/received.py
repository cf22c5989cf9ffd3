"""Read what the driver has sent to a worker: the adapter and the norms, together or apart."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from qerl_vllm_plugin.adapter.check import PREFIX
from qerl_vllm_plugin.wire.receiver import MappedFile, decoded
from qerl_vllm_plugin.wire.safetensors_file import Tensors
from qerl_vllm_plugin.wire.spans import Fetch

Given = tuple[Tensors | None, Tensors | None, Fetch | None]  # adapter, norms, and the fetch function


@contextmanager
def received(tensors: Any, norms: Any, device: torch.device, file: MappedFile) -> Iterator[Given]:
    """Yield the adapter, the norms and the adapter's fetch function, valid inside the ``with`` block.

    ``tensors`` and ``norms`` are in any form that ``qerl_swap`` (methods.py) takes. ``file`` holds the adapter's file
    that this worker has mapped. If both are the same, the tensors without the adapter's prefix are the norms. The fetch
    function copies tensors, or rows or columns of them, to a device. The norms' values are always read here.

    Raises what ``decoded`` does.
    """
    is_one = tensors is norms or (isinstance(tensors, str | bytes) and tensors == norms)
    with ExitStack() as stack:
        adapter, fetch = stack.enter_context(decoded(tensors, device, file))
        apart = MappedFile()  # ``file`` holds one file at a time, and ``fetch`` reads the adapter's
        trained, fetch_norms = (adapter, fetch) if is_one else stack.enter_context(decoded(norms, device, apart))
        if is_one and adapter is not None and trained is not None:
            trained = {name: tensor for name, tensor in trained.items() if not name.startswith(PREFIX)}
            adapter = {name: tensor for name, tensor in adapter.items() if name.startswith(PREFIX)}
        if trained and fetch_norms is not None and any(tensor.is_meta for tensor in trained.values()):
            values = fetch_norms(list(trained.values()), device).tensors()
            trained = dict(zip(trained, values, strict=True))
        yield adapter, trained, fetch
