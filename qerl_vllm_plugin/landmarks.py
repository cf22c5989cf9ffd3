"""Whether an engine that has slept still has its frozen weights.

vLLM's sleep mode throws weights away at level 2, for a trainer that loads all of them again. Frozen ones nobody loads:
such an engine wakes up, and answers by whatever its memory holds. Memory comes and goes in pages of 2 MiB, so one word
of each page tells.
"""

from collections.abc import Iterable

import torch

from qerl_vllm_plugin import spans

PAGE = 2 << 20  # bytes of GPU memory that CUDA maps at least
GONE = (
    "the frozen weights of this engine are no longer those that it has loaded: sleep(level=2) throws them away, and "
    "nothing loads them again. Whatever it has answered since is wrong; restart it, and sleep at level 1"
)


@torch.no_grad()
def landmarks(parameters: Iterable[torch.Tensor], changing: Iterable[torch.Tensor]) -> torch.Tensor:
    """The first word of each page of ``parameters``, on the CPU, but for those among ``changing``: norms."""
    ours = {tensor.untyped_storage().data_ptr() for tensor in changing}
    once = {tensor.untyped_storage().data_ptr(): tensor for tensor in parameters}
    found: dict[torch.device, list[torch.Tensor]] = {}
    for address, tensor in once.items():
        if address not in ours:
            words = spans.as_type(spans.all_bytes(tensor.untyped_storage()), torch.int64)
            found.setdefault(tensor.device, []).append(words[:: PAGE // 8])
    return torch.cat([torch.cat(parts).cpu() for parts in found.values()])
