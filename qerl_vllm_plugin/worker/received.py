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
    that this worker has mapped. If both are the same, the tensors that are named
    as no part of an adapter are the norms. The fetch
    function copies tensors, or rows or columns of them, to a device. The norms' values are always read here.

    Raises what ``decoded`` does.
    """
    is_one = tensors is norms or (isinstance(tensors, str | bytes) and tensors == norms)
    with ExitStack() as stack:
        adapter, fetch = stack.enter_context(decoded(tensors, device, file))
        apart = MappedFile()  # ``file`` holds one file at a time, and ``fetch`` reads the adapter's
        trained, fetch_norms = (adapter, fetch) if is_one else stack.enter_context(decoded(norms, device, apart))
        if is_one and adapter is not None and trained is not None:
            both, adapter, trained = adapter, {}, {}
            for name, tensor in both.items():
                (adapter if name.startswith(PREFIX) or ".lora_" in name else trained)[name] = tensor
        if trained and fetch_norms is not None and any(tensor.is_meta for tensor in trained.values()):
            values = fetch_norms(list(trained.values()), device).tensors()
            trained = dict(zip(trained, values, strict=True))
        yield adapter, trained, fetch
