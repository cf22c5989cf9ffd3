"""Mixture of experts: served from a packed checkpoint, with an adapter on attention at most."""

import pytest

from qerl_vllm_plugin.adapter import AdapterError
from qerl_vllm_plugin.policy import Policy

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine(boot, make_nvfp4):
    options = {"qerl": {"policy_adapter": {"rank": 8}}}
    return boot(make_nvfp4("qwen3_moe"), dtype="float32", additional_config=options)


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


def test_resident_adapter_reaches_attention_and_refuses_experts(engine, make_nvfp4, reference, make_adapter, measure):
    policy = Policy(engine)
    hf = reference(make_nvfp4("qwen3_moe"))
    tensors, config, peft_model = make_adapter(hf, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    policy.swap(tensors, config)
    assert measure.difference(measure.engine(engine), measure.hf(peft_model)) < TOLERANCE
    with pytest.raises(AdapterError, match="'gate_proj'"):
        policy.swap(tensors, {**config, "target_modules": ["q_proj", "gate_proj"]})
    policy.swap(None)
    assert measure.difference(measure.engine(engine), measure.hf(hf)) < TOLERANCE
