"""Test Qwen3.5's text model, a hybrid of Gated DeltaNet and attention.

On a CPU vLLM's kernels of the linear attention only take BF16. The answers are therefore compared in their mean, with
transformers in float32 on the dequantized weights.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from qerl_recipes.model import loading
from qerl_recipes.model.frozen import FrozenNVFP4Linear
from qerl_vllm_plugin import noise
from qerl_vllm_plugin.policy import Policy
from qerl_vllm_plugin.weights.frozen_weights import frozen_weights

# bound of the mean; stock vLLM in BF16 differs by 0.02 from transformers in float32, and by more without AVX-512
ROUNDING = 0.055
RESIDENT = {"qerl": {"policy_adapter": {"rank": 8}}}
LINEAR_ATTENTION = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


pytestmark = pytest.mark.usefixtures("torchvision")


@pytest.fixture(scope="module")
def folder(make_nvfp4):
    return make_nvfp4("qwen3_5_text")


@pytest.fixture(scope="module")
def packed(boot, folder):
    return boot(folder, additional_config=RESIDENT)


def mean(ours, theirs):
    return float((ours - theirs).abs().mean())


def test_promise_01_quantized_at_load_has_the_packed_bytes(boot, packed, make_bf16, hf, measure):
    served = measure.engine(packed)
    assert mean(served, measure.hf(hf)) < ROUNDING
    at_load = boot(make_bf16("qwen3_5_text"), additional_config=RESIDENT)
    ours, theirs = (measure.model(llm).state_dict() for llm in (at_load, packed))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert torch.equal(measure.engine(at_load), served)


def test_the_gates_stay_in_bf16_as_in_public_checkpoints(packed, folder, make_bf16, measure):
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    gates = [f"model.layers.0.linear_attn.in_proj_{gate}" for gate in "ba"]
    assert set(ignored) == {"lm_head", *gates}
    source = load_file(make_bf16("qwen3_5_text") / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[f"{gate}.weight"], source[f"{gate}.weight"]) for gate in gates)
    layer = measure.model(packed).model.layers[0].linear_attn
    is_packed = [hasattr(part, "weight_packed") for part in (layer.in_proj_qkvz, layer.out_proj, layer.in_proj_ba)]
    assert is_packed == [True, True, False]
    # the trainer keeps the gates in BF16 too
    model = loading.load(make_bf16("qwen3_5_text"), quantization="qerl_nvfp4")
    frozen = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, FrozenNVFP4Linear)}
    assert frozen == {"in_proj_qkv", "in_proj_z", "out_proj", *ATTENTION, *MLP}


@pytest.mark.parametrize("target", ["all-linear", *LINEAR_ATTENTION])
def test_an_adapter_on_each_linear_answers_as_peft(target, packed, hf, make_adapter, measure):
    policy = Policy(packed)
    policy.swap(None)
    served, want = measure.engine(packed), measure.hf(hf)
    targets = target if target == "all-linear" else [target]
    tensors, config, peft_model = make_adapter(hf, target_modules=targets)
    policy.swap(tensors, config)
    adapted, expected = measure.engine(packed), measure.hf(peft_model)
    assert mean(adapted, expected) < ROUNDING
    assert min(mean(adapted, served), mean(expected, want)) > 10 * ROUNDING
    policy.swap(None)
    assert torch.equal(measure.engine(packed), served)


def test_noise_lies_on_the_norms_that_feed_the_linears(packed, folder, reference, measure):
    policy = Policy(packed)
    policy.swap(None)
    served, clean = measure.engine(packed), policy.state(digest=True).norms
    report = policy.set_noise(0.1, seed=1, rollout=1)
    assert (report.noisy_norms, report.swallowed) == (4, 0.0)
    noisy = reference(folder)
    with torch.no_grad():
        for name, norm in noisy.named_parameters():
            if noise.is_target(name):
                norm.copy_(noise.all_noisy({name: norm}, 0.1, 1, 1)[name])
    assert mean(measure.engine(packed), measure.hf(noisy)) < ROUNDING
    assert mean(measure.engine(packed), served) > 5 * ROUNDING
    policy.clear_noise()
    assert policy.state(digest=True).norms == clean
    assert torch.equal(measure.engine(packed), served)


def test_lora_slots_do_not_reach_every_linear(boot, folder):
    with pytest.raises(ValueError, match=r"qwen3_5_text: .*--enable-lora.*policy_adapter"):
        boot(folder, enable_lora=True, max_loras=1, max_cpu_loras=1, max_lora_rank=8)


def test_a_trainer_reads_the_linears_of_the_engine_in_place(packed, folder):
    weights = frozen_weights(packed)
    model, alone = loading.load(folder, weights=weights), loading.load(folder)
    # vLLM's CPU kernels store BF16 weights in an order of their own; which of them depends on the CPU
    assert {name.rpartition(".")[2] for name in weights.apart} in ({"in_proj_b", "in_proj_a"}, {"conv1d"})
    for name, module in alone.named_modules():
        if isinstance(module, FrozenNVFP4Linear):
            shared = model.get_submodule(name)
            assert shared.weight_packed.data_ptr() == weights.linears[name].weight.codes.data_ptr()
            assert all(torch.equal(tensor, getattr(shared, key)) for key, tensor in module.named_buffers()), name
