"""Test the policy in LoRA slots beside adapters of the user: neither ever answers for the other."""

import pytest
from vllm.lora.request import LoRARequest

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.policy import Policy

TOLERANCE = 1e-4
POLICYS_ID = 2147483647


@pytest.fixture(scope="module")
def theirs(hf, make_adapter, tmp_path_factory):
    """Save an adapter of the user. Return its folder and its PEFT model."""
    folder = tmp_path_factory.mktemp("theirs")
    peft_model = make_adapter(hf, seed=5)[2]
    peft_model.save_pretrained(folder)
    return str(folder), peft_model


@pytest.mark.parametrize("user_comes_first", [True, False])
def test_the_first_id_that_vllm_gives_is_the_users(
    boot, make_nvfp4, hf, theirs, make_adapter, carriers, measure, user_comes_first
):
    engine = boot(make_nvfp4("qwen2"), **{**carriers["lora"], "max_loras": 2, "max_cpu_loras": 2})
    request = LoRARequest("theirs", 1, theirs[0])
    expected = measure.hf(theirs[1])
    if user_comes_first:
        assert measure.difference(measure.engine(engine, request), expected) < TOLERANCE
    policy = Policy(engine)
    tensors, config, peft_model = make_adapter(hf, seed=6)
    policy.swap(tensors, config)
    ours = measure.hf(peft_model)
    for _ in range(2):
        assert measure.difference(measure.engine(engine, request), expected) < TOLERANCE
        assert measure.difference(measure.engine(engine, policy.request), ours) < TOLERANCE
    assert measure.difference(ours, expected) > 100 * TOLERANCE
    assert measure.difference(measure.engine(engine), measure.hf(hf)) < TOLERANCE


@pytest.fixture(scope="module")
def engine_of_the_policy(boot, make_nvfp4, hf, make_adapter, carriers):
    engine = boot(make_nvfp4("qwen2"), **carriers["lora"])
    Policy(engine).swap(*make_adapter(hf, seed=6)[:2])
    return engine


def test_an_adapter_without_a_slot_is_refused(engine_of_the_policy, theirs, measure):
    engine = engine_of_the_policy
    before = measure.engine(engine, Policy(engine).request)
    with pytest.raises(AdapterError, match="'theirs' has none; start the engine with max_loras=2"):
        engine.llm_engine.add_lora(LoRARequest("theirs", 1, theirs[0]))
    assert (measure.engine(engine, Policy(engine).request) == before).all()


def test_a_foreign_request_under_the_policys_id_is_refused(engine_of_the_policy, theirs, measure):
    with pytest.raises(AdapterError, match=f"LoRA id {POLICYS_ID} belongs to the policy.*'theirs'"):
        measure.engine(engine_of_the_policy, LoRARequest("theirs", POLICYS_ID, theirs[0]))
