"""Schedule as vLLM does, with two of its slow steps made quick.

    vllm serve MODEL --quantization qerl_nvfp4 --scheduler-cls qerl_vllm_plugin.scheduler.scheduler
    LLM(MODEL, quantization="qerl_nvfp4", scheduler_cls="qerl_vllm_plugin.scheduler.scheduler")

The schedule itself is the one that vLLM would make.

**Room for the next token.** A decode step asks for room for one token of each sequence, and 15 times of 16 the
sequence's last block has it. vLLM finds that out through three layers that handle sliding windows, lookahead and other
memory. This takes 4 us a sequence, in a step for which the GPU may wait. ``BlockRoom`` compares two numbers if there is
only full attention, and leaves every other question to vLLM's manager. Source:
``vllm.v1.core.kv_cache_manager.KVCacheManager`` (``allocate_slots``, ``cache_blocks``).

**Emptying the prefix cache.** vLLM's ``reset_prefix_cache`` removes the hash of every block there is. On an H200 with a
7B model these are 143078 blocks and 6 ms, once for an adapter and once more for its noise. A rollout fills a few
thousand blocks, and an empty block has no hash to lose. So vLLM's own method is given only the blocks with a hash; it
checks, counts and reports as always. This also serves engines in a process of their own, whose blocks ``Policy`` cannot
reach. Source: ``vllm.v1.core.block_pool.BlockPool``. A block has its hash while it is in the map that finds blocks
again.

Both were read in 0.26 to 0.32.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

NAME = "qerl_vllm_plugin.scheduler.scheduler"  # the value for vLLM's option ``scheduler_cls``


class _Quicker:
    """Add the two quick steps to a scheduler of vLLM's; it comes first among the base classes."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.kv_cache_manager: Any = quick_where_there_is_room(self.kv_cache_manager)

    def reset_prefix_cache(self, *args: Any, **keywords: Any) -> bool:
        with without_empty_blocks(self):
            return super().reset_prefix_cache(*args, **keywords)  # type: ignore[misc]


class QerlScheduler(_Quicker, Scheduler):
    """Schedule as vLLM's synchronous scheduler does, with the quick steps."""


class QerlAsyncScheduler(_Quicker, AsyncScheduler):
    """Schedule as vLLM's asynchronous scheduler does, with the quick steps."""


def scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """Make an engine's scheduler, of the kind that vLLM would choose; its option ``scheduler_cls`` names this."""
    kind = QerlAsyncScheduler if vllm_config.scheduler_config.async_scheduling else QerlScheduler
    return kind(vllm_config=vllm_config, **options)


def quick_where_there_is_room(manager: Any) -> Any:
    """Wrap ``manager``, a KVCacheManager, in a ``BlockRoom`` if that applies; otherwise return it as it is."""
    kinds = manager.coordinator.single_type_managers
    if len(kinds) != 1 or type(kinds[0]) is not FullAttentionManager:
        return manager
    if kinds[0].block_size != kinds[0].block_pool.hash_block_size:  # vLLM then caches parts of a block, too
        return manager
    return BlockRoom(manager, kinds[0])


class BlockRoom:
    """Wrap a KVCacheManager, and answer two of its methods quickly when they have nothing to do."""

    def __init__(self, manager: Any, kind: FullAttentionManager) -> None:
        self._manager, self._kind, self._none = manager, kind, manager.empty_kv_cache_blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def allocate_slots(self, request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **more: Any) -> Any:
        """Allocate slots as vLLM does, but return at once if a running sequence has room in its last block.

        ``more`` is only passed for sequences that do not run yet; they go to vLLM's manager.
        """
        if not more and request.status is RequestStatus.RUNNING:
            kind, name = self._kind, request.request_id
            tokens = request.num_computed_tokens + num_new_tokens
            room = len(kind.req_to_blocks.get(name, ())) * kind.block_size
            if (
                num_new_tokens > 0
                and tokens + num_lookahead_tokens <= room
                and name not in kind._partial_hit_reqs  # its last block must be copied first
                and self._are_cached(request, min(tokens, request.num_tokens))
            ):
                return self._none
        return self._manager.allocate_slots(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Cache the full blocks as vLLM does, but return at once if all of them are cached."""
        if not self._are_cached(request, num_computed_tokens):
            self._manager.cache_blocks(request, num_computed_tokens)

    def _are_cached(self, request: Any, tokens: int) -> bool:
        """Return True if all full blocks of the first ``tokens`` tokens are in the prefix cache, or it is off."""
        kind = self._kind
        if not kind.enable_caching:
            return True
        return tokens // kind.block_size <= kind.num_cached_block.get(request.request_id, 0)


def scheduler_here(llm: Any) -> Any | None:
    """Return the scheduler of a ``vllm.LLM`` whose engine core runs in this process, or None if it does not."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return getattr(core, "scheduler", None)


@contextmanager
def without_empty_blocks(scheduler: Any | None) -> Iterator[None]:
    """Hide KV-cache blocks without a hash from the scheduler's block pools for the ``with`` block.

    Emptying the prefix cache then takes no time for them, and nothing else may be done meanwhile. Nothing is hidden if
    ``scheduler`` is None, or from a pool whose blocks another cache watches: emptying then takes as long as in vLLM.
    """
    with ExitStack() as stack:
        if scheduler is not None:
            managers = scheduler.kv_cache_manager.coordinator.single_type_managers
            for pool in dict.fromkeys(manager.block_pool for manager in managers):
                if not getattr(pool, "_reuse_watchers", None):  # since 0.31; watchers look blocks up by their numbers
                    stack.callback(setattr, pool, "blocks", pool.blocks)
                    pool.blocks = with_hash(pool)
        yield


def with_hash(pool: Any) -> list[Any]:
    """Return the blocks of a pool that have a hash; a block with several hashes is listed once for each."""
    found: list[Any] = []
    for held in pool.cached_block_hash_to_block._cache.values():
        if isinstance(held, dict):  # all blocks that hold the same tokens, by their block numbers
            found.extend(held.values())
        else:
            found.append(held)
    return found
