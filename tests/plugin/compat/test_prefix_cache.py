"""Test promise 5: with prefix caching, no answer of one policy is computed from another policy's keys and values."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from qerl_vllm_plugin.compat import scheduler as prefix_cache
from qerl_vllm_plugin.compat.scheduler import QerlAsyncScheduler, QerlScheduler, scheduler, scheduler_here
from qerl_vllm_plugin.policy import Policy

PROMPT = [(7 * i) % 60 + 2 for i in range(100)]  # three full blocks of 32 tokens
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)


ENGINE = {"enable_prefix_caching": True, "block_size": 32}


@pytest.fixture(scope="module")
def adapters(hf, make_adapter):
    modules = ["k_proj", "v_proj", "down_proj"]
    return [make_adapter(hf, seed=seed, target_modules=modules)[:2] for seed in (1, 2)]


def ask(policy: Policy) -> tuple[dict[int, float], int]:
    """Return the log-probabilities of the next token and the number of prompt tokens that came from the cache."""
    output = policy._llm.generate([{"prompt_token_ids": PROMPT}], SAMPLING, use_tqdm=False, lora_request=policy.request)
    top = output[0].outputs[0].logprobs[0]
    return {token: value.logprob for token, value in top.items()}, output[0].num_cached_tokens


def fresh(policy: Policy) -> dict[int, float]:
    assert policy._llm.reset_prefix_cache()
    answer, cached = ask(policy)
    assert cached == 0
    return answer


def distance(ours: dict[int, float], theirs: dict[int, float]) -> float:
    return max(abs(ours.get(token, -100.0) - theirs.get(token, -100.0)) for token in ours.keys() | theirs.keys())


def test_the_cache_is_in_use(policy):
    first, _ = ask(policy)
    second, cached = ask(policy)
    assert cached == 96
    assert distance(first, second) < 1e-4


def test_promise_05_a_swap_is_answered_from_fresh_keys(policy, adapters):
    policy.swap(*adapters[0])
    ask(policy)
    policy.swap(*adapters[1])
    answer, cached = ask(policy)
    assert cached == 0
    assert distance(answer, fresh(policy)) < 1e-5


def test_promise_05_a_noise_change_is_answered_from_fresh_keys(policy):
    clean, _ = ask(policy)
    policy.set_noise(0.1, seed=1, rollout=1)
    noisy, cached = ask(policy)
    assert cached == 0
    assert distance(noisy, fresh(policy)) < 1e-5
    policy.clear_noise()
    again, cached = ask(policy)
    assert cached == 0
    assert distance(again, clean) < 1e-5


def test_promise_05_a_cache_that_cannot_be_emptied_is_an_error(policy, adapters, monkeypatch):
    before = policy.state(digest=True)
    monkeypatch.setattr(policy._llm, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(RuntimeError, match="could not empty its prefix cache"):
        policy.swap(*adapters[0])
    assert policy.state(digest=True) == before


def test_promise_05_no_block_keeps_its_hash(policy, adapters, monkeypatch):
    pool = scheduler_here(policy._llm).kv_cache_manager.block_pool
    blocks, twice = pool.blocks, [{"prompt_token_ids": prompt} for prompt in (PROMPT, PROMPT, PROMPT[::-1])]
    # all three run in one step and compute the same blocks anew, so some blocks hold the same tokens as others
    policy._llm.generate(twice, SAMPLING, use_tqdm=False, lora_request=policy.request)
    held = [block.block_id for block in blocks if block.block_hash is not None]
    seen: list[int] = []
    monkeypatch.setattr(KVCacheBlock, "reset_hash", _noting(seen, KVCacheBlock.reset_hash))
    policy.swap(*adapters[0])
    assert sorted(seen) == held and 6 <= len(held) < len(blocks)
    assert pool.blocks is blocks and all(block.block_hash is None for block in blocks)
    seen.clear()
    policy.set_noise(0.1, seed=1, rollout=1)
    assert seen == []
    assert pool.get_num_free_blocks() == len(blocks) - 1


def test_promise_05_blocks_of_the_same_tokens_are_emptied(policy, adapters):
    pool = scheduler_here(policy._llm).kv_cache_manager.block_pool
    ask(policy)
    first = next(block for block in pool.blocks if block.block_hash is not None)
    other = next(block for block in pool.blocks if block.block_hash is None and not block.is_null)
    other.set_block_hash(first.block_hash, first.block_hash_num_tokens)
    pool.cached_block_hash_to_block.insert(first.block_hash, other)
    policy.swap(*adapters[0])
    assert (first.block_hash, other.block_hash) == (None, None)
    _, cached = ask(policy)
    assert cached == 0


def test_promise_05_a_failed_emptying_leaves_all_blocks(policy, adapters, monkeypatch):
    pool = scheduler_here(policy._llm).kv_cache_manager.block_pool
    blocks = pool.blocks
    ask(policy)
    monkeypatch.setattr(pool, "get_num_free_blocks", lambda: 1)  # as if a request held the other blocks
    with pytest.raises(RuntimeError, match="could not empty its prefix cache"):
        policy.swap(*adapters[0])
    assert pool.blocks is blocks
    monkeypatch.undo()
    _, cached = ask(policy)
    assert cached == 96


def _noting(seen: list[int], reset):
    def reset_hash(block):
        seen.append(block.block_id)
        reset(block)

    return reset_hash


@pytest.fixture(scope="module")
def with_scheduler(boot, folder, carriers):
    return boot(folder, scheduler_cls="qerl_vllm_plugin.scheduler.scheduler", **ENGINE, **carriers["resident"])


@pytest.mark.parametrize("kind", [QerlScheduler, QerlAsyncScheduler])
def test_promise_05_the_scheduler_empties_the_cache(with_scheduler, kind, monkeypatch):
    """Empty the cache by vLLM's own call, as an engine in another process does. ``Policy`` cannot speed that one up."""
    own = scheduler_here(with_scheduler)
    assert type(own) is QerlScheduler
    blocks = own.kv_cache_manager.block_pool.blocks
    with_scheduler.generate([{"prompt_token_ids": PROMPT}], SAMPLING, use_tqdm=False)
    held = [block.block_id for block in blocks if block.block_hash is not None]
    seen: list[int] = []
    monkeypatch.setattr(KVCacheBlock, "reset_hash", _noting(seen, KVCacheBlock.reset_hash))
    other = object.__new__(kind)  # no engine on a CPU schedules asynchronously
    other.__dict__.update(own.__dict__)
    assert other.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    assert sorted(seen) == held and len(held) >= 3
    assert own.kv_cache_manager.block_pool.blocks is blocks
    again = with_scheduler.generate([{"prompt_token_ids": PROMPT}], SAMPLING, use_tqdm=False)
    assert again[0].num_cached_tokens == 0


def test_the_scheduler_is_of_the_kind_that_vllm_would_have(monkeypatch):
    for kind in (QerlScheduler, QerlAsyncScheduler):
        monkeypatch.setattr(kind, "__init__", lambda self, **options: None)
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=kind is QerlAsyncScheduler))
        assert type(scheduler(config, kv_cache_config=None)) is kind


def test_the_list_of_blocks_is_short_in_the_block_alone():
    held, twice = object(), object()

    class Pool:
        pass

    def pool(**more):
        found = Pool()
        vars(found).update(blocks=["all", "of", "them"], **more)
        found.cached_block_hash_to_block = SimpleNamespace(_cache={"a": held, "b": {1: held, 2: twice}})
        return found

    plain, watched, unwatched = pool(), pool(_reuse_watchers=["another cache"]), pool(_reuse_watchers=[])
    managers = [SimpleNamespace(block_pool=of) for of in (plain, plain, watched, unwatched)]
    coordinator = SimpleNamespace(single_type_managers=managers)
    scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(coordinator=coordinator))
    with pytest.raises(KeyError), prefix_cache.without_empty_blocks(scheduler):
        assert plain.blocks == unwatched.blocks == [held, held, twice]
        assert len(watched.blocks) == 3, "those are looked up by their numbers"
        assert watched.blocks[0] == "all"
        raise KeyError
    assert plain.blocks == watched.blocks == unwatched.blocks == ["all", "of", "them"]
    with prefix_cache.without_empty_blocks(None):
        pass
