"""Test changes that several threads ask of one policy."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

TIMES = 6


@pytest.fixture(scope="module")
def folder(make_bf16, write_packed):
    return write_packed(make_bf16("qwen2"))


def test_changes_of_several_threads_follow_one_another(policy, hf, make_adapter):
    adapters = [make_adapter(hf, target_modules=["q_proj", "down_proj"], seed=seed)[:2] for seed in (1, 2)]
    served = set()
    for adapter in adapters:
        policy.swap(*adapter)
        served.add(policy.state(digest=True).adapter)
    version, interval = policy.version, sys.getswitchinterval()

    def swap(adapter):
        return [policy.swap(*adapter) for _ in range(TIMES)]

    def look():
        return [policy.state(digest=True) for _ in range(TIMES)]

    def shake():
        for rollout in range(TIMES):
            policy.set_noise(0.01, seed=1, rollout=rollout)
            policy.clear_noise()

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            swaps = [pool.submit(swap, adapter) for adapter in adapters]
            seen, shaken = pool.submit(look), pool.submit(shake)
            versions = [one for swap in swaps for one in swap.result(120)]
            states = seen.result(120)
            shaken.result(120)
    finally:
        sys.setswitchinterval(interval)
    assert sorted(versions) == list(range(version + 1, version + 1 + 2 * TIMES))
    assert policy.version == policy.state().version == version + 2 * TIMES
    assert {state.adapter for state in [*states, policy.state(digest=True)]} <= served
