"""vLLM's manager of the KV cache's blocks, with a short answer for the sequences that need none.

A decode step asks for room for one token of each sequence, and 15 times of 16 there is room in the block that it has.
vLLM finds that out by way of three layers that know of sliding windows, lookahead and other memory, 4 us a sequence of
a step for which the GPU may wait. Here it is found out by comparing two numbers, where full attention is all there is;
every other question, and every other model's, goes to vLLM's own manager.

Source: ``vllm.v1.core.kv_cache_manager.KVCacheManager`` (``allocate_slots``, ``cache_blocks``), 0.26 to 0.32.
"""

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus


def quick_where_there_is_room(manager: Any) -> Any:
    """``manager``, a KVCacheManager, behind a ``BlockRoom`` where that applies, and otherwise itself."""
    kinds = manager.coordinator.single_type_managers
    if len(kinds) != 1 or type(kinds[0]) is not FullAttentionManager:
        return manager
    if kinds[0].block_size != kinds[0].block_pool.hash_block_size:  # then parts of a block are cached, too
        return manager
    return BlockRoom(manager, kinds[0])


class BlockRoom:
    """All that a KVCacheManager is, and two of its methods quicker where they have nothing to do."""

    def __init__(self, manager: Any, kind: FullAttentionManager) -> None:
        self._manager, self._kind, self._none = manager, kind, manager.empty_kv_cache_blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def allocate_slots(self, request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **more: Any) -> Any:
        """As vLLM's; ``more`` comes with sequences that do not run yet."""
        if not more and request.status is RequestStatus.RUNNING:
            kind, name = self._kind, request.request_id
            tokens = request.num_computed_tokens + num_new_tokens
            room = len(kind.req_to_blocks.get(name, ())) * kind.block_size
            if (
                num_new_tokens > 0
                and tokens + num_lookahead_tokens <= room
                and name not in kind._partial_hit_reqs  # its last block is to be copied
                and self._are_cached(request, min(tokens, request.num_tokens))
            ):
                return self._none
        return self._manager.allocate_slots(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """As vLLM's."""
        if not self._are_cached(request, num_computed_tokens):
            self._manager.cache_blocks(request, num_computed_tokens)

    def _are_cached(self, request: Any, tokens: int) -> bool:
        """Whether of the first so many tokens every full block can be found again, if that is wanted at all."""
        kind = self._kind
        if not kind.enable_caching:
            return True
        return tokens // kind.block_size <= kind.num_cached_block.get(request.request_id, 0)
