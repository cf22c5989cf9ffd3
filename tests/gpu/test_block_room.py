"""Test on a GPU, where steps are scheduled ahead of the tokens, that vLLM's scheduler and the trainer's give the same
completions.
"""

from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SHARED = [(7 * i) % 500 + 2 for i in range(40)]
PROMPTS = [(SHARED if row % 3 else []) + [row + 2] * (5 * row + 3) for row in range(24)]


@pytest.mark.parametrize("blocks", [None, 60])  # 60 blocks do not hold all 16 requests at once
def test_completions_are_those_of_vllm_to_the_bit(start_engine, checkpoints, blocks):
    from vllm import SamplingParams

    from qerl_recipes.rollout import sampling as completions
    from qerl_vllm_plugin.compat.scheduler import NAME, BlockRoom, QerlAsyncScheduler, scheduler_here

    llm = start_engine(
        checkpoints[1],
        scheduler_cls=NAME,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=1 << 30,
    )
    scheduler = scheduler_here(llm)
    assert type(scheduler) is QerlAsyncScheduler
    room = scheduler.kv_cache_manager
    assert type(room) is BlockRoom

    def sampling():
        how: dict[str, Any] = {"logprobs": 0, "flat_logprobs": True, "detokenize": False, "ignore_eos": True}
        return [SamplingParams(max_tokens=20 + 7 * row, seed=row, **how) for row in range(len(PROMPTS))]

    found = []
    for manager in (room._manager, room):
        assert llm.reset_prefix_cache()
        scheduler.kv_cache_manager = manager
        if manager is room:
            found.append([tuple(answer) for answer in completions.generate(llm, PROMPTS, sampling(), None)])
        else:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling(), use_tqdm=False)
            parts = [output.outputs[0] for output in outputs]
            found.append([(list(part.token_ids), list(part.logprobs.logprobs)) for part in parts])
    llm.llm_engine.engine_core.shutdown()
    assert found[0] == found[1]
    assert [len(ids) for ids, _ in found[0]] == [20 + 7 * row for row in range(len(PROMPTS))]
