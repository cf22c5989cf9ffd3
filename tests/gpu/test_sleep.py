"""Test vLLM's sleep mode, level 1, with a policy: changes are refused during sleep, and answers are the same
afterwards.
"""

import pytest

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.policy import Policy

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + 3 * j) % 500 + 2 for j in range(40 + i)] for i in range(8)]


def answer(llm):
    """Return greedy tokens, computed from an empty prefix cache."""
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]


def test_a_sleeping_engine_refuses_changes_and_has_its_policy_when_it_wakes(start_engine, checkpoints):
    room = {"qerl": {"policy_adapter": {"rank": 16}}}
    llm = start_engine(checkpoints[1], enable_sleep_mode=True, additional_config=room)
    policy = Policy(llm)
    clean = answer(llm)
    policy.set_noise(0.3, seed=1, rollout=2)
    noisy = answer(llm)
    assert noisy != clean
    llm.sleep(level=1)
    for change in (policy.clear_noise, lambda: policy.swap(None)):
        with pytest.raises(AdapterError, match="this engine sleeps"):
            change()
    llm.wake_up()
    assert answer(llm) == noisy
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    policy.clear_noise()
    llm.wake_up(tags=["kv_cache"])
    assert answer(llm) == clean
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(AdapterError, match="sleep at level 1"):
        policy.swap(None)
    llm.llm_engine.engine_core.shutdown()
