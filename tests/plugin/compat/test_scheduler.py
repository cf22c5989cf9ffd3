"""Test that the plugin's scheduler schedules as vLLM's does, step by step and block by block. It only calls the KV
cache manager less often."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from qerl_vllm_plugin.compat.scheduler import (
    BlockRoom,
    QerlAsyncScheduler,
    QerlScheduler,
    quick_where_there_is_room,
    scheduler_here,
)

BLOCK = 32
HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)  # only once, because vLLM 0.26 draws this hash at random


@pytest.fixture(scope="module")
def engine(boot, make_nvfp4):
    return boot(make_nvfp4("qwen2"), block_size=BLOCK, dtype="float32", max_model_len=256)


def requests(caching):
    """Return requests of many lengths. Three share their first block and a half. One ends early, and some end on a
    block boundary."""
    found = []
    for row in range(12):
        prompt = [(5 * i) % 50 + 2 for i in range(48 if row < 3 else 0)] + [row + 2] * (9 * row + 7 if row < 9 else 10)
        params = SamplingParams(max_tokens=20 + 11 * row if row < 9 else 45 + row, stop_token_ids=[17])
        params.update_from_generation_config({}, eos_token_id=None)
        hasher = get_request_block_hasher(BLOCK, HASH) if caching else None
        found.append(Request(f"r{row}", prompt, params, None, block_hasher=hasher))
    return found


def drive(kind, engine, monkeypatch, *, caching, blocks):
    """Run a scheduler over all requests. Return what each step schedules, what the prefix cache holds at the end, and
    how often vLLM's manager was asked for slots. An asynchronous scheduler runs one step ahead of the sampled
    tokens."""
    asked: list[str] = []
    allocate = KVCacheManager.allocate_slots

    def note(self, request, *more, **keywords):
        asked.append(request.request_id)
        return allocate(self, request, *more, **keywords)

    config = copy.deepcopy(engine.llm_engine.vllm_config)
    config.cache_config.enable_prefix_caching = caching
    config.cache_config.num_gpu_blocks = blocks
    running = scheduler_here(engine)
    cache = copy.deepcopy(running.kv_cache_config)
    cache.num_blocks = blocks
    with monkeypatch.context() as patch:
        patch.setattr(KVCacheManager, "allocate_slots", note)
        options = {"kv_cache_config": cache, "structured_output_manager": running.structured_output_manager}
        scheduler = kind(vllm_config=config, block_size=BLOCK, hash_block_size=BLOCK, **options)
        for request in requests(caching):
            scheduler.add_request(request)
        seen: list[Any] = []
        waiting: list[Any] = []
        for step in range(400):
            if scheduler.has_requests():
                output = scheduler.schedule()
                cached = output.scheduled_cached_reqs
                new = [(one.req_id, one.block_ids, one.num_computed_tokens) for one in output.scheduled_new_reqs]
                seen.append((new, cached.req_ids, cached.new_block_ids, cached.num_computed_tokens))
                seen.append((dict(output.num_scheduled_tokens), sorted(output.finished_req_ids)))
                seen.append(sorted(output.preempted_req_ids or ()))
                waiting.append(output)
            if waiting and (step or kind.__mro__.count(AsyncScheduler) == 0):
                _answer(scheduler, waiting.pop(0))
            if not scheduler.has_requests() and not waiting:
                break
    assert not scheduler.has_requests()
    pool = scheduler.kv_cache_manager.block_pool
    held = {block.block_id: block.block_hash for block in pool.blocks}
    assert pool.get_num_free_blocks() == blocks - 1  # one block is vLLM's null block
    return [*seen, held], len(asked)


def _answer(scheduler, output):
    names = list(output.num_scheduled_tokens)
    tokens = []
    for name in names:
        request = scheduler.requests.get(name)
        count = 0 if request is None else request.num_output_tokens
        is_prompt = request is not None and request.is_prefill_chunk
        tokens.append([] if is_prompt else [17 if name == "r5" and count == 12 else 20 + count % 7])
    places = {name: place for place, name in enumerate(names)}
    empty = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
    scheduler.update_from_output(output, ModelRunnerOutput(names, places, tokens, **empty))


@pytest.mark.parametrize("blocks", [64, 9])  # 64 blocks hold all requests, 9 hardly two of them
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("theirs", "ours"), [(Scheduler, QerlScheduler), (AsyncScheduler, QerlAsyncScheduler)])
def test_the_same_is_scheduled_with_fewer_questions(engine, monkeypatch, theirs, ours, caching, blocks):
    expected, often = drive(theirs, engine, monkeypatch, caching=caching, blocks=blocks)
    found, seldom = drive(ours, engine, monkeypatch, caching=caching, blocks=blocks)
    assert found == expected
    assert any(step for step in expected[2:-1:3]) == (blocks == 9)  # some requests were preempted for others
    assert any(expected[-1].values()) == caching
    assert seldom < often / (5 if blocks == 64 else 2)  # a request that waits for blocks asks in every step


def test_another_kind_of_attention_keeps_vllm_s_manager(engine):
    manager = scheduler_here(engine).kv_cache_manager
    assert type(manager) is KVCacheManager and type(quick_where_there_is_room(manager)) is BlockRoom
    (full,) = manager.coordinator.single_type_managers

    def of(kinds):
        return SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=kinds))

    for other in (of([full, full]), of([]), of([object.__new__(type("Sliding", (type(full),), {}))])):
        assert quick_where_there_is_room(other) is other
    parts = copy.copy(full)
    parts.block_pool = SimpleNamespace(hash_block_size=BLOCK // 2)
    assert quick_where_there_is_room(of([parts])).coordinator
    assert not isinstance(quick_where_there_is_room(of([parts])), BlockRoom)


@pytest.mark.parametrize(
    ("changes", "is_quick"),
    [
        ({}, True),
        ({"lookahead": 11}, True),  # up to the last slot of its two blocks
        ({"lookahead": 12}, False),
        ({"new": 0}, False),
        ({"computed": 31, "tokens": 32}, False),  # its second block is full now and must enter the prefix cache
        ({"computed": 31, "tokens": 31}, True),  # a token that is not known yet fills no block
        ({"computed": 31, "tokens": 32, "caching": False}, True),
        ({"computed": 32, "tokens": 33, "caching": False}, False),
        ({"status": RequestStatus.PREEMPTED}, False),
        ({"partial": {"a"}}, False),
        ({"name": "b"}, False),  # this request has no blocks
        ({"more": {"delay_cache_blocks": True}}, False),
    ],
    ids=str,
)
def test_only_a_running_sequence_with_room_is_quick(changes, is_quick):
    """Give the request two blocks of 16, one of them cached, and 20 computed tokens."""
    given = {"new": 1, "computed": 20, "tokens": 21, "lookahead": 0, "more": {}, "caching": True} | changes
    asked: list[Any] = []
    manager = SimpleNamespace(
        empty_kv_cache_blocks="none", allocate_slots=lambda *a, **more: asked.append((a, more)) or "theirs", other=5
    )
    kind = SimpleNamespace(
        req_to_blocks={"a": [1, 2]},
        block_size=16,
        _partial_hit_reqs=given.get("partial", set()),
        enable_caching=given["caching"],
        num_cached_block={"a": 1},
    )
    request = SimpleNamespace(
        request_id=given.get("name", "a"),
        status=given.get("status", RequestStatus.RUNNING),
        num_computed_tokens=given["computed"],
        num_tokens=given["tokens"],
    )
    room = BlockRoom(manager, kind)
    found = room.allocate_slots(request, given["new"], num_lookahead_tokens=given["lookahead"], **given["more"])
    assert found == ("none" if is_quick else "theirs") and room.other == 5
    as_asked = ((request, given["new"]), {"num_lookahead_tokens": given["lookahead"], **given["more"]})
    assert asked == ([] if is_quick else [as_asked])


def test_blocks_are_cached_when_one_more_is_full():
    asked: list[Any] = []
    manager = SimpleNamespace(empty_kv_cache_blocks=(), cache_blocks=lambda request, tokens: asked.append(tokens))
    kind = SimpleNamespace(block_size=16, enable_caching=True, num_cached_block={"a": 1})
    for tokens in (16, 31, 32, 40):
        BlockRoom(manager, kind).cache_blocks(SimpleNamespace(request_id="a"), tokens)
    assert asked == [32, 40]
