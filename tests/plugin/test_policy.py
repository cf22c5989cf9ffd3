"""Test the policy adapter in a real engine: it is exact, all or nothing, and leaves the caller's tensors unchanged."""

import json
import shutil

import pytest
import torch
from vllm import SamplingParams

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.adapter.folder import base_hash
from qerl_vllm_plugin.policy import Policy

TOLERANCE = 1e-4  # float32 engine against float32 PEFT; measured about 1e-5
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(make_bf16, write_packed):
    return write_packed(make_bf16("qwen2"))


def served(policy, measure):
    return measure.engine(policy._llm, policy.request)


@pytest.mark.parametrize("module", MODULES)
def test_promise_04_each_module_alone_equals_peft(policy, hf, make_adapter, measure, module):
    layer = MODULES.index(module) % 2
    tensors, config, peft_model = make_adapter(hf, target_modules=[module], layers_to_transform=[layer])
    assert len(tensors) == 2
    base = measure.hf(hf)
    expected = measure.hf(peft_model)
    assert measure.difference(expected, base) > 100 * TOLERANCE, "this adapter changes too little to prove anything"
    policy.swap(tensors, config)
    assert measure.difference(served(policy, measure), expected) < TOLERANCE
    policy.swap(None)
    assert measure.difference(served(policy, measure), base) < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": list(MODULES), "r": 8, "lora_alpha": 16},
        {"target_modules": list(MODULES), "r": 3, "lora_alpha": 1},
        {"target_modules": list(MODULES), "use_rslora": True},
        {"target_modules": r".*layers\.1\.(self_attn\.[kv]|mlp\.up)_proj"},
    ],
    ids=["rank_8", "rank_3", "rank_stabilized", "expression"],
)
def test_promise_04_a_swapped_adapter_equals_peft_and_merged(policy, hf, make_adapter, measure, options):
    tensors, config, peft_model = make_adapter(hf, **options)
    version = policy.version
    assert policy.swap(tensors, config) == version + 1 == policy.version == policy.state().version
    ours = served(policy, measure)
    assert measure.difference(ours, measure.hf(peft_model)) < TOLERANCE
    assert measure.difference(ours, measure.hf(peft_model.merge_and_unload())) < TOLERANCE


def test_promise_04_modules_of_the_last_adapter_are_zeroed(policy, hf, make_adapter, measure):
    policy.swap(*make_adapter(hf, target_modules=list(MODULES))[:2])
    tensors, config, peft_model = make_adapter(hf, target_modules=["v_proj"], seed=9)
    policy.swap(tensors, config)
    assert measure.difference(served(policy, measure), measure.hf(peft_model)) < TOLERANCE


REFUSED = {
    "nan": lambda t, c, n: next(iter(t.values())).view(-1)[0].fill_(float("nan")),
    "missing": lambda t, c, n: t.pop(sorted(t)[-1]),
    "another_base": lambda t, c, n: t.update({sorted(t)[0]: torch.ones(4, 128)}),
    "extra": lambda t, c, n: t.update({"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}),
    "rank": lambda t, c, n: c.update(r=16),
    "dora": lambda t, c, n: c.update(use_dora=True),
    "broken_expression": lambda t, c, n: c.update(target_modules="("),
    "overflow": lambda t, c, n: [c.update(lora_alpha=1e30), t[sorted(t)[1]].fill_(1e30)],
    "norm_of_another_model": lambda t, c, n: n.update({"model.layers.9.input_layernorm.weight": torch.ones(64)}),
    "norm_shape": lambda t, c, n: n.update({"model.norm.weight": torch.ones(1)}),
    "norm_nan": lambda t, c, n: n.update({"model.norm.weight": torch.full((64,), float("nan"))}),
}


def test_promise_04_a_refused_adapter_changes_nothing(policy, hf, make_adapter, measure):
    policy.swap(*make_adapter(hf, seed=1)[:2], norms={"model.norm.weight": torch.linspace(0.5, 1.5, 64)})
    policy.set_noise(0.05, seed=1, rollout=1)
    before, answers, version = policy.state(digest=True), served(policy, measure), policy.version
    good, plain, _ = make_adapter(hf, seed=2)
    for case, spoil in REFUSED.items():
        tensors, config, norms = {name: tensor.clone() for name, tensor in good.items()}, dict(plain), {}
        spoil(tensors, config, norms)
        with pytest.raises(AdapterError):
            policy.swap(tensors, config, norms=norms)
        assert policy.version == version and policy.state(digest=True) == before, case
    assert torch.equal(served(policy, measure), answers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_promise_07_callers_tensors_are_never_modified(policy, hf, make_adapter, measure, dtype):
    tensors, config, _ = make_adapter(hf, r=4, lora_alpha=16, target_modules=list(MODULES))
    # float32 is the engine's own dtype, so no conversion copies the tensors
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    norms = {"model.layers.0.input_layernorm.weight": torch.rand(64), "model.norm.weight": torch.rand(64)}
    given = {**tensors, **norms}
    before = {name: tensor.clone() for name, tensor in given.items()}
    config_before = json.dumps(config, default=str)
    for i in range(4):
        policy.swap(tensors, config, norms=norms)
        policy.set_noise(0.1, seed=i, rollout=0)
        served(policy, measure)
    assert [name for name in given if not torch.equal(given[name], before[name])] == []
    assert json.dumps(config, default=str) == config_before


def test_trained_norms_come_and_go_with_the_swap(policy, hf, reference, folder, make_adapter, measure):
    tensors, config, _ = make_adapter(hf)
    clean = policy.state(digest=True).norms
    norms = {
        "model.norm.weight": torch.rand(64) + 0.5,
        "model.layers.1.post_attention_layernorm.weight": torch.rand(64) + 0.5,
    }
    changed = reference(folder)
    changed.load_state_dict(norms, strict=False)
    policy.swap(tensors, config, norms=norms)
    assert measure.difference(served(policy, measure), measure.hf(make_adapter(changed)[2])) < TOLERANCE
    policy.swap(tensors, config)
    assert policy.state(digest=True).norms == clean


def test_an_engine_with_a_request_in_it_is_left_alone(policy, hf, make_adapter, measure):
    before = policy.state(digest=True)
    tensors, config, _ = make_adapter(hf)
    core = policy._llm.llm_engine
    core.add_request("waiting", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4))
    try:
        for change in (
            lambda: policy.swap(tensors, config),
            lambda: policy.set_noise(0.1, seed=0, rollout=0),
            policy.clear_noise,
        ):
            with pytest.raises(RuntimeError, match="requests are running"):
                change()
        assert policy.state(digest=True) == before
    finally:
        while core.has_unfinished_requests():
            core.step()
    policy.swap(tensors, config)


def test_a_second_policy_object_continues_the_count(policy, hf, make_adapter):
    version = policy.swap(*make_adapter(hf)[:2])
    assert Policy(policy._llm).version == version


def test_folder_that_peft_saved_equals_peft_and_stock_vllm(
    policy, hf, make_adapter, measure, boot, folder, carriers, tmp_path
):
    from vllm.lora.request import LoRARequest

    _, _, peft_model = make_adapter(hf, target_modules=list(MODULES))
    peft_model.save_pretrained(tmp_path)
    policy.swap_folder(tmp_path)
    ours = served(policy, measure)
    assert measure.difference(ours, measure.hf(peft_model)) < TOLERANCE
    stock = boot(folder, **carriers["lora"])
    assert measure.difference(ours, measure.engine(stock, LoRARequest("tuned", 5, str(tmp_path)))) < TOLERANCE


def test_folders_that_cannot_be_read_are_refused(policy, hf, make_adapter, tmp_path):
    good = tmp_path / "good"
    make_adapter(hf)[2].save_pretrained(good)
    version = policy.swap_folder(good)
    before = policy.state(digest=True)
    file, config = "adapter_model.safetensors", "adapter_config.json"
    damage = {
        "truncated": lambda f: (f / file).write_bytes((good / file).read_bytes()[:-40]),
        "no_config": lambda f: (f / config).unlink(),
        "config_is_a_list": lambda f: (f / config).write_text("[1]"),
    }
    for name, spoil in damage.items():
        bad = tmp_path / name
        shutil.copytree(good, bad)
        spoil(bad)
        with pytest.raises(AdapterError, match=name if name.startswith("no_") else None):
            policy.swap_folder(bad)
        assert policy.version == version
        assert policy.state(digest=True) == before


def test_stock_bf16_weights_carry_the_policy_too(boot, make_bf16, reference, make_adapter, carriers, measure):
    folder = make_bf16("qwen2")
    policy = Policy(boot(folder, quantization=None, **carriers["lora"]))
    tensors, config, peft_model = make_adapter(reference(folder), target_modules=list(MODULES))
    policy.swap(tensors, config)
    assert measure.difference(served(policy, measure), measure.hf(peft_model)) < TOLERANCE


def test_pefts_own_config_object_is_taken_like_its_dict(policy, hf, make_adapter, measure):
    import peft

    _, _, peft_model = make_adapter(hf, target_modules=list(MODULES), use_rslora=True)
    policy.swap(peft.get_peft_model_state_dict(peft_model), peft_model.peft_config["default"])
    assert measure.difference(served(policy, measure), measure.hf(peft_model)) < TOLERANCE
    with pytest.raises(AdapterError, match="config is list; give a dict or PEFT's LoraConfig"):
        policy.swap(make_adapter(hf)[0], ["q_proj"])
    with pytest.raises(AdapterError, match="needs its config"):
        policy.swap(make_adapter(hf)[0])


def test_an_adapter_of_another_base_is_refused_by_its_hash(policy, hf, make_adapter, folder, tmp_path):
    make_adapter(hf)[2].save_pretrained(tmp_path)
    state = tmp_path / "qerl_state.json"
    state.write_text(json.dumps({"base": "/models/served", "base_hash": base_hash(folder)}))
    version = policy.swap_folder(tmp_path)
    before = policy.state(digest=True)
    state.write_text(json.dumps({"base": "/models/another", "base_hash": "0" * 64}))
    with pytest.raises(AdapterError, match=r"trained on another base \(/models/another\)"):
        policy.swap_folder(tmp_path)
    assert policy.version == version
    assert policy.state(digest=True) == before
