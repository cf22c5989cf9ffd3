"""Release the memory of the engine's KV cache while the trainer works, and allocate it again before generation.

The addresses stay reserved, because CUDA graphs hold them. Weights, adapter and norms stay where they are, and the
trainer may go on reading them. Whatever else lies in the same allocations is kept on the host meanwhile. A resumed
cache is all zeros.

Each weight, adapter tensor and norm is checksummed before and after. Only the engine may write them, but a trainer
that reads them in place could do so by mistake.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qerl_vllm_plugin.compat import worker as vllm_worker
from qerl_vllm_plugin.compat.kv_cache_memory import KVCacheMemory
from qerl_vllm_plugin.wire.checksum import Checksum, checksums
from qerl_vllm_plugin.worker.policy import policy_of

RELEASED = "the memory of this engine's KV cache has been given back; call Policy.resume_kv_cache() first"

Span = tuple[int, int]  # address, bytes


class KVCacheError(RuntimeError):
    """Report that the KV cache cannot be released, resumed or used; the message says why."""


@dataclass(frozen=True)
class Released:
    """Hold everything that is needed to resume a released KV cache.

    ``pieces`` are the released allocations. ``kept`` holds what else lay in them, by address. ``checksums`` are the
    addresses and checksums of all tensors that must not change. ``allow`` lets the worker run again.
    """

    memory: KVCacheMemory
    pieces: list[Span]
    kept: dict[int, torch.Tensor]
    checksums: dict[str, tuple[int, Checksum]]
    allow: Callable[[], None]


def release(worker: Any, memory: KVCacheMemory) -> int:
    """Release what holds the KV cache of an engine at rest; return its bytes. Raise KVCacheError if it is released."""
    policy = policy_of(worker)
    if policy.released is not None:
        raise KVCacheError("the memory of this engine's KV cache has been given back already")
    caches = memory.caches()
    others = {piece: remainders(piece, caches) for piece in memory.allocations()}
    pieces = [piece for piece, spans in others.items() if sum(size for _, size in spans) < piece[1]]
    before = _checksums(worker)
    kept = {address: memory.read(address, size) for piece in pieces for address, size in others[piece]}
    allow = vllm_worker.refuse_to_run(worker, lambda: KVCacheError(RELEASED))
    policy.released = Released(memory, pieces, kept, before, allow)
    for address, _ in pieces:
        memory.unmap(address)
    return sum(size for _, size in pieces)


def resume(worker: Any) -> None:
    """Allocate the memory again and fill the KV cache with zeros.

    Raises KVCacheError, and changes nothing, in three cases: nothing was released, a weight, the adapter or a norm has
    changed since, or the GPU has too little free memory.
    """
    policy = policy_of(worker)
    released: Released | None = policy.released
    if released is None:
        raise KVCacheError("the KV cache of this engine has its memory; there is nothing to resume")
    check_unchanged(worker)
    memory, needed, free = released.memory, sum(size for _, size in released.pieces), released.memory.free_bytes()
    if needed > free:
        raise KVCacheError(_no_room(needed, f"the GPU has {free / 2**30:.2f} GiB left"))
    mapped: list[int] = []
    try:
        for address, _ in released.pieces:
            memory.map(address)
            mapped.append(address)
    except RuntimeError as error:
        for address in mapped:
            memory.unmap(address)
        raise KVCacheError(_no_room(needed, str(error))) from error
    memory.clear_caches()
    for address, copy in released.kept.items():
        memory.write(address, copy)
    released.allow()
    policy.released = None


def remainders(piece: Span, caches: list[Span]) -> list[Span]:
    """Return the parts of ``piece`` that lie in none of ``caches``, in ascending order."""
    first, size = piece
    remaining, last = [], first + size
    for address, length in sorted(caches):
        if address + length <= first or address >= last:
            continue
        if address > first:
            remaining.append((first, address - first))
        first = min(address + length, last)
    if first < last:
        remaining.append((first, last - first))
    return remaining


def _no_room(needed: int, reason: str) -> str:
    return (
        f"out of memory: the KV cache needs its {needed / 2**30:.2f} GiB again: {reason}. Lower "
        "gpu_memory_utilization, or what the trainer keeps between steps"
    )


def _checksums(worker: Any) -> dict[str, tuple[int, Checksum]]:
    """Return by name the address and checksum of every tensor that serves requests, except the KV cache."""
    tensors = _tensors(worker)
    return {
        name: (tensor.data_ptr(), checksum)
        for (name, tensor), checksum in zip(tensors.items(), checksums(tensors.values()), strict=True)
    }


def _tensors(worker: Any) -> dict[str, torch.Tensor]:
    """Return each storage once: weights, buffers, and the norms in service, without noise and as loaded."""
    model, policy = vllm_worker.model_of(worker), policy_of(worker)
    named = [*model.named_parameters(), *model.named_buffers()]
    if policy.carrier is not None:
        named += [(f"buffer {i} of the adapter", buffer) for i, buffer in enumerate(policy.carrier.buffers())]
    for kind, norms in (("as loaded", policy.checkpoint_norms), ("without noise", policy.base_norms)):
        named += [(f"{name} {kind}", norm) for name, norm in norms.items()]
    once: dict[tuple[torch.device, int], tuple[str, torch.Tensor]] = {}
    for name, tensor in named:
        once.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), (name, tensor))
    return dict(once.values())


def check_unchanged(worker: Any) -> None:
    """Raise KVCacheError if a tensor has changed since the KV cache was released; do nothing if it is not released."""
    released: Released | None = policy_of(worker).released
    if released is None or (before := released.checksums) == (now := _checksums(worker)):
        return
    name = next(name for name in (*before, *now) if before.get(name) != now.get(name))
    moved = name not in before or name not in now or before[name][0] != now[name][0]
    raise KVCacheError(
        f"{name} {'was replaced' if moved else 'has changed'} while the KV cache was released, when only the engine "
        "may write it. Nothing that was computed since can be trusted: restart from the last checkpoint, with "
        "share_weights: false if this happens again"
    )
