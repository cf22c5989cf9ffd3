"""Mixture of experts: served from a packed checkpoint, without an adapter."""

import pytest

from qerl_vllm_plugin.policy import Policy

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine(boot, make_nvfp4):
    return boot(make_nvfp4("qwen3_moe"), dtype="float32")


def test_promise_2_packed_experts_equal_dequantized_reference(engine, make_nvfp4, make_bf16, reference, measure):
    served = measure.engine(engine)
    assert measure.difference(served, measure.hf(reference(make_nvfp4("qwen3_moe")))) < TOLERANCE
    assert measure.difference(served, measure.hf(reference(make_bf16("qwen3_moe")))) > 100 * TOLERANCE


def test_noise_reaches_the_norms_of_a_mixture_of_experts(engine, measure):
    policy = Policy(engine)
    clean = measure.engine(engine)
    assert policy.set_noise(0.1, seed=1, rollout=1).touched == 4
    assert measure.difference(measure.engine(engine), clean) > 100 * TOLERANCE
    policy.clear_noise()
    assert measure.difference(measure.engine(engine), clean) == 0


def test_experts_of_a_bf16_checkpoint_are_refused(boot, make_bf16):
    with pytest.raises(ValueError, match=r"experts of a BF16 checkpoint .* qerl quantize"):
        boot(make_bf16("qwen3_moe"))
