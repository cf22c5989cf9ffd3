"""Test emptying the prefix cache on a GPU, where there are many blocks and scheduling is asynchronous."""

import pytest

pytestmark = pytest.mark.gpu

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 500 + 2 for i in range(400)]} for j in range(16)]
OURS = "qerl_vllm_plugin.scheduler.scheduler"


@pytest.mark.parametrize("scheduler_cls", [None, OURS])
def test_promise_05_a_change_empties_all_that_holds_something(start_engine, checkpoints, record, scheduler_cls):
    from vllm import SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from qerl_vllm_plugin.compat.scheduler import QerlAsyncScheduler, scheduler_here
    from qerl_vllm_plugin.policy import Policy

    room = {"policy_adapter": {"rank": 16}}
    options = {"kv_cache_memory_bytes": 1 << 30, "additional_config": {"qerl": room}}
    llm = start_engine(checkpoints[1], scheduler_cls=scheduler_cls, **options)
    policy, scheduler = Policy(llm), scheduler_here(llm)
    assert type(scheduler) is (QerlAsyncScheduler if scheduler_cls else AsyncScheduler)
    pool = scheduler.kv_cache_manager.block_pool
    blocks, sampling = pool.blocks, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)

    def cached():
        return sum(output.num_cached_tokens for output in llm.generate(PROMPTS, sampling, use_tqdm=False))

    cached()
    assert cached() > 0
    held = sum(block.block_hash is not None for block in blocks)
    policy.set_noise(0.01, seed=0, rollout=1)
    record(
        f"emptying {held} of {len(blocks)} blocks, scheduler {scheduler_cls}, ms", f"{1e3 * policy.parts['empty']:.2f}"
    )
    assert pool.blocks is blocks and all(block.block_hash is None for block in blocks)
    assert cached() == 0
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert pool.blocks is blocks and cached() == 0
    llm.llm_engine.engine_core.shutdown()
