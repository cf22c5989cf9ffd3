"""vLLM's prefix cache, emptied in time by the blocks that hold something.

``reset_prefix_cache`` walks through every block there is, and takes each one's hash away: 143078 of them on an H200
beside a 7B model, which takes 6 ms, once for an adapter and once more for its noise. A rollout fills a few thousand.
What holds nothing has nothing to lose: for the time of vLLM's own emptying, which checks, counts and tells others all
that it always does, the list that it walks through is that of the blocks with a hash.

Source: ``vllm.v1.core.block_pool.BlockPool``, 0.26 to 0.32. A block gets its hash as it enters the map by which blocks
are found again, and loses it as it leaves.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


def scheduler_here(llm: Any) -> Any | None:
    """The scheduler of a ``vllm.LLM`` whose engine core runs in this process; None if it runs in another one."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return getattr(core, "scheduler", None)


@contextmanager
def without_empty_blocks(scheduler: Any | None) -> Iterator[None]:
    """Until the end of the block, which may do nothing but empty the prefix cache, that takes no time for empty blocks.

    With None, and where another cache watches the blocks of this one, it takes the time that vLLM takes.
    """
    with ExitStack() as stack:
        if scheduler is not None:
            managers = scheduler.kv_cache_manager.coordinator.single_type_managers
            for pool in dict.fromkeys(manager.block_pool for manager in managers):
                if not getattr(pool, "_reuse_watchers", None):  # since 0.31; those are looked up by their numbers
                    stack.callback(setattr, pool, "blocks", pool.blocks)
                    pool.blocks = with_hash(pool)
        yield


def with_hash(pool: Any) -> list[Any]:
    """The blocks of a pool that could be found again; one that has several hashes, as often."""
    found: list[Any] = []
    for held in pool.cached_block_hash_to_block._cache.values():
        if isinstance(held, dict):  # all blocks that hold the same tokens, by their numbers
            found.extend(held.values())
        else:
            found.append(held)
    return found
