"""Test mixture-of-experts models: served from a packed checkpoint, with an adapter on attention at most."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from vllm.config import set_current_vllm_config

from qerl_recipes.convert.quantize import quantize_checkpoint
from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.compat.layers import is_fused_experts
from qerl_vllm_plugin.policy import Policy
from qerl_vllm_plugin.weights import expected as expected_tensors
from qerl_vllm_plugin.weights.experts import experts_method, share_scales
from qerl_vllm_plugin.weights.formats import COMPRESSED, NVFP4
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

TOLERANCE = 1e-4
FIXTURES = Path(__file__).parents[2] / "fixtures"
ASKED = {"additional_config": {"qerl": {"weight_only": True}}, "dtype": "float32", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def engine(boot, make_nvfp4):
    options = {"qerl": {"policy_adapter": {"rank": 8}}}
    return boot(make_nvfp4("qwen3_moe"), dtype="float32", additional_config=options)


def test_promise_02_packed_experts_equal_dequantized_reference(engine, make_nvfp4, make_bf16, reference, measure):
    served = measure.engine(engine)
    assert measure.difference(served, measure.hf(reference(make_nvfp4("qwen3_moe")))) < TOLERANCE
    assert measure.difference(served, measure.hf(reference(make_bf16("qwen3_moe")))) > 100 * TOLERANCE


def test_experts_of_a_bf16_checkpoint_are_refused(boot, make_bf16):
    with pytest.raises(ValueError, match=r"experts of a BF16 checkpoint .*qerl quantize"):
        boot(make_bf16("qwen3_moe"))


IN_BF16 = {"qerl": {"ignore": ["lm_head", "re:.*experts.*", "re:.*mlp.gate$", "re:.*self_attn.*"]}}


def test_experts_that_are_ignored_stay_in_bf16(boot, make_bf16, reference, measure):
    served = measure.engine(boot(make_bf16("qwen3_moe"), dtype="float32", additional_config=IN_BF16))
    assert measure.difference(served, measure.hf(reference(make_bf16("qwen3_moe")))) < TOLERANCE


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_a_missing_part_of_an_expert_in_bf16_is_refused(part, boot, make_bf16, edited, monkeypatch):
    monkeypatch.setattr(expected_tensors, "MODEL_TYPES", ())  # as for an architecture without a table of tensors
    lacking = f"model.layers.1.mlp.experts.2.{part}.weight"
    folder = edited(make_bf16("qwen3_moe"), lambda tensors: tensors.pop(lacking))
    with pytest.raises(CheckpointError, match=rf"layers\.1\.mlp\.experts: {part} of expert 2 .*missing"):
        boot(folder, additional_config=IN_BF16)


def test_a_missing_expert_is_refused(boot, make_nvfp4, edited, monkeypatch):
    monkeypatch.setattr(expected_tensors, "MODEL_TYPES", ())  # as for an architecture without a table of tensors

    def drop(tensors):
        expert = [name for name in tensors if "layers.1.mlp.experts.2." in name]
        assert len([tensors.pop(name) for name in expert]) == 9

    folder = edited(make_nvfp4("qwen3_moe"), drop)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts: expert 2 \(and 0 more"):
        boot(folder)


def test_slots_in_a_mixture_are_refused_on_a_cpu(boot, make_nvfp4):
    with pytest.raises(ValueError, match=r"no mixture of experts .* with --enable-lora on a CPU; .*policy_adapter"):
        boot(make_nvfp4("qwen3_moe"), enable_lora=True, max_lora_rank=8)


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


def gated(x, w13, w2, w13_divisors, w2_divisors):
    """Return the output of each expert, (E, T, H), in float64, computed with its divisors."""
    gate, up = (torch.einsum("th,enh->etn", x, w) for w in w13)
    inner = torch.nn.functional.silu(gate / w13_divisors[:, 0, None, None]) * (up / w13_divisors[:, 1, None, None])
    return torch.einsum("etn,ehn->eth", inner, w2) / w2_divisors[:, None, None]


def test_promise_02_scales_of_gate_and_up_stay_exact():
    generator = torch.Generator().manual_seed(0)
    x, *w13, w2 = (
        torch.randn(shape, generator=generator).double() for shape in ((5, 8), (3, 6, 8), (3, 6, 8), (3, 8, 6))
    )
    divisors = torch.tensor([[4.0, 4.0], [3.0, 700.0], [90.0, 0.7]]), torch.tensor([5.0, 1.3, 0.2])
    want = gated(x, w13, w2, *(d.double() for d in divisors))
    share_scales(*divisors, "experts", has_slots=False)
    assert torch.equal(divisors[0][:, 0], divisors[0][:, 1]) and divisors[1][0] == 5
    torch.testing.assert_close(gated(x, w13, w2, *(d.double() for d in divisors)), want, rtol=1e-6, atol=1e-9)


def test_tensor_scales_that_cannot_be_shared_are_refused():
    divisors = torch.tensor([[3.0, 700.0]]), torch.tensor([1.3])
    with pytest.raises(
        CheckpointError, match=r"have tensor scales of their own, .* beside --enable-lora; leave it out"
    ):
        share_scales(*divisors, "experts", has_slots=True)
    share_scales(torch.tensor([[3.0, 3.0]]), torch.tensor([1.3]), "experts", has_slots=True)
    with pytest.raises(CheckpointError, match="differ by more than vLLM's kernel can serve"):
        share_scales(torch.tensor([[1e-30, 1e30]]), torch.tensor([1.3]), "experts", has_slots=False)


def test_experts_drop_their_activation_scales(boot, measure, reference, tmp_path):
    source = FIXTURES / "llmcompressor_w4a4" / "qwen3_moe-w4a4"
    quantize_checkpoint(source, tmp_path / "weights")
    hf = reference(tmp_path / "weights")
    assert measure.difference(measure.engine(boot(source, **ASKED)), measure.hf(hf)) < TOLERANCE


def test_experts_of_modelopt_are_served_once_rewritten(boot, measure, tmp_path):
    source = FIXTURES / "modelopt" / "qwen3_moe-nvfp4"
    with pytest.raises(ValueError, match=r"experts in FP8 or in ModelOpt's layout are not read; .*qerl quantize"):
        boot(source, **ASKED)
    quantize_checkpoint(source, tmp_path / "weights")
    expected = json.loads((source / "expected.json").read_text())
    llm = boot(tmp_path / "weights", **ASKED)
    assert measure.difference(measure.engine(llm), torch.tensor(expected["logprobs"])) < TOLERANCE


def test_a_config_in_another_process_reads_the_same_experts(engine, measure):
    """Worker processes receive a copy of the config. With such copies two ranks once refused the experts of `qerl
    quantize`."""
    config = pickle.loads(pickle.dumps(engine.llm_engine.vllm_config.quant_config))
    assert config.scheme.format is not COMPRESSED  # the format is a copy, too
    (layer,) = [m for name, m in measure.model(engine).named_modules() if name == "model.layers.0.mlp.experts"]
    routed = next(m for m in layer.modules() if is_fused_experts(m))
    with set_current_vllm_config(engine.llm_engine.vllm_config):
        assert type(experts_method(routed, "experts", config.scheme, {NVFP4})) is type(routed.quant_method)
