"""Give back and map again the memory under vLLM's KV cache, by way of vLLM's insides as read in 0.26 to 0.32."""

from collections.abc import Iterator
from typing import Any

import torch

from qerl_vllm_plugin.wire import spans


class KVCacheMemory:
    """Hold the GPU memory under a worker's KV cache. Its addresses stay reserved while the memory is given back.

    vLLM's sleep mode allocates the KV cache from a pool of its own, which knows the handle of each allocation. Sleeping
    itself is not used: it takes everything away, weights included.
    """

    def __init__(self, worker: Any) -> None:
        """Raise ValueError if the GPU is not NVIDIA's, or the engine has no such pool."""
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            raise ValueError("only an NVIDIA GPU can give the memory of its KV cache back; leave sleep mode out here")
        from vllm.device_allocator import cumem

        self._cumem, pool = cumem, cumem.CuMemAllocator.instance
        entries = {} if pool is None else pool.pointer_to_data
        self._entries = {address: entry for address, entry in entries.items() if entry.tag == "kv_cache"}
        if not self._entries:
            raise ValueError("this engine cannot give the memory of its KV cache back; start it with enable_sleep_mode")
        storages = [tensor.untyped_storage() for tensor in _tensors(worker.model_runner.kv_caches)]
        self._storages = list({storage.data_ptr(): storage for storage in storages}.values())

    def caches(self) -> list[tuple[int, int]]:
        """Return address and bytes of each tensor of the KV cache."""
        return [(storage.data_ptr(), storage.nbytes()) for storage in self._storages]

    def allocations(self) -> list[tuple[int, int]]:
        """Return address and bytes of each allocation, which can be given back on its own."""
        return [(address, entry.handle[1]) for address, entry in self._entries.items()]

    def unmap(self, address: int) -> None:
        """Give back the memory of the allocation at ``address``, once the GPU has finished its work."""
        entry = self._entries[address]
        torch.cuda.synchronize(entry.handle[0])
        self._cumem.unmap_and_release(entry.handle)
        entry.is_asleep = True

    def map(self, address: int) -> None:
        """Put memory under ``address`` again. Raises RuntimeError if the GPU has no memory left."""
        entry = self._entries[address]
        self._cumem.create_and_map(entry.handle)
        entry.is_asleep = False

    def read(self, address: int, size: int) -> torch.Tensor:
        """Return a copy of ``size`` bytes on the host."""
        copy = torch.empty(size, dtype=torch.uint8, device="cpu")
        torch.cuda.synchronize()
        self._cumem.libcudart.cudaMemcpy(copy.data_ptr(), address, size)
        return copy

    def write(self, address: int, copy: torch.Tensor) -> None:
        self._cumem.libcudart.cudaMemcpy(address, copy.data_ptr(), len(copy))

    def clear_caches(self) -> None:
        """Zero every tensor of the KV cache."""
        for storage in self._storages:
            spans.all_bytes(storage).zero_()

    def free_bytes(self) -> int:
        """Return how many bytes can be mapped now, after torch has given back all that it had cached."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists: a layer of a hybrid model has several."""
    if isinstance(nested, torch.Tensor):
        yield nested
    else:
        for part in nested:
            yield from _tensors(part)
