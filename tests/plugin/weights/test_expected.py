"""Test what a config.json and a model's tensor names say about its linears."""

import time
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_vllm_plugin.weights.expected import cache_scales, check_quantized, expected_tensors, experts, fused_with
from qerl_vllm_plugin.weights.formats import COMPRESSED, MODELOPT, Nvfp4Scheme
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError, TensorHeader

LAYER = ["mlp.down_proj", "mlp.up_proj", "mlp.gate_proj", "attn.v_proj", "attn.q_proj", "attn.k_proj", "attn.o_proj"]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("attn.k_proj", ["attn.q_proj", "attn.k_proj", "attn.v_proj"]),
        ("mlp.up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
        ("attn.o_proj", ["attn.o_proj"]),
        ("mlp.down_proj", ["mlp.down_proj"]),
    ],
)
def test_siblings_come_in_the_order_in_which_vllm_stacks_them(name, group):
    assert fused_with(name, LAYER) == group
    assert fused_with(f"model.layers.1.{name}", [f"model.layers.1.{other}" for other in LAYER] + LAYER) == [
        f"model.layers.1.{other}" for other in group
    ]


def test_a_layer_is_stacked_with_what_the_model_has():
    assert fused_with("attn.q_proj", ["attn.q_proj", "attn.kv_a_proj"]) == ["attn.q_proj"]
    assert fused_with("up_proj", ["up_proj", "gate_proj"]) == ["gate_proj", "up_proj"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_experts": 128}, "num_experts=128"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"n_routed_experts": 64, "num_experts": None}, "n_routed_experts=64"),
        ({"num_experts": 1}, ""),  # some dense models are written so
        ({}, ""),
    ],
)
def test_a_mixture_has_more_than_one_expert(config, said):
    assert experts(config) == said


@pytest.mark.parametrize(("family", "head"), [("qwen3", 128), ("qwen3_moe", 16), ("llama", 16)])
def test_a_missing_head_dim_means_what_transformers_means(family, head):
    sizes = dict.fromkeys(("vocab_size", "intermediate_size", "moe_intermediate_size"), 32)
    sizes |= {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    built = AutoConfig.for_model(family, **sizes, num_experts=2)
    model = AutoModelForCausalLM.from_config(built)
    tensors = expected_tensors({**sizes, "model_type": family, "num_experts": 2})
    assert tensors is not None
    name = "model.layers.0.self_attn.q_proj.weight"
    assert tensors[name].shape == tuple(model.get_parameter(name).shape) == (4 * head, 64)


def refused(scheme, **tensors):
    """Return the refusal of a checkpoint with these tensors, or "" if it is accepted. ``__`` in a name stands for a
    dot."""
    named = {name.replace("__", "."): what for name, what in tensors.items()}
    headers = {name: TensorHeader(name, Path("x"), dtype, shape, 0, 0) for name, (dtype, shape) in named.items()}
    try:
        check_quantized(headers, scheme)
    except CheckpointError as error:
        return str(error)
    return ""


CODES, SCALES, FP8_CODES = ("U8", (8, 16)), ("F8_E4M3", (8, 2)), ("F8_E4M3", (8, 32))
SCALAR, ONE, ROWS, BF16_SCALAR = ("F32", ()), ("F32", (1,)), ("F32", (8, 1)), ("BF16", ())
OURS, MODELOPTS = Nvfp4Scheme(), Nvfp4Scheme(format=MODELOPT)


def test_a_packed_layer_has_the_tensors_of_its_format():
    packed = {"a__weight_packed": CODES, "a__weight_scale": SCALES}
    assert not refused(OURS, **packed, a__weight_global_scale=ONE)
    assert "a.weight_global_scale is F32 [], but" in refused(OURS, **packed, a__weight_global_scale=SCALAR)
    theirs = {"a__weight": CODES, "a__weight_scale": SCALES}
    assert not refused(MODELOPTS, **theirs, a__weight_scale_2=SCALAR)
    assert not refused(MODELOPTS, **theirs, a__weight_scale_2=ONE)
    assert "a.weight_scale_2 is F32 [8, 1], but" in refused(MODELOPTS, **theirs, a__weight_scale_2=ROWS)


def test_activation_scales_need_a_scheme_and_may_be_absent():
    packed = {"a__weight_packed": CODES, "a__weight_scale": SCALES, "a__weight_global_scale": ONE}
    w4a4 = Nvfp4Scheme(activations="4-bit activations")
    assert not refused(w4a4, **packed) and not refused(w4a4, **packed, a__input_global_scale=ONE)
    assert "a.input_global_scale belongs to W4A4" in refused(OURS, **packed, a__input_global_scale=ONE)


@pytest.mark.parametrize(
    ("names", "scale", "is_right"),
    [
        (COMPRESSED, ROWS, True),
        (COMPRESSED, ONE, True),
        (COMPRESSED, BF16_SCALAR, True),
        (COMPRESSED, ("F32", (8, 2)), False),
        (COMPRESSED, ("F32", (1, 8)), False),
        (COMPRESSED, ("F16", (8, 1)), False),
        (MODELOPT, SCALAR, True),
        (MODELOPT, ONE, True),
        (MODELOPT, ROWS, False),
    ],
)
def test_scales_of_fp8_layers(names, scale, is_right):
    scheme = Nvfp4Scheme(fp8=("a",), format=names)
    said = refused(scheme, a__weight=FP8_CODES, a__weight_scale=scale)
    assert not said if is_right else "tensor a.weight_scale is" in said
    assert not refused(scheme, a__weight=FP8_CODES, a__weight_scale=ONE, a__input_scale=SCALAR)
    assert "a.weight_scale (F32 or BF16" in refused(scheme, a__weight=FP8_CODES)


def test_an_fp8_cache_has_both_scales_and_is_declared():
    declared = Nvfp4Scheme(kv_cache=True)
    assert not refused(declared, attn__k_scale=ONE, attn__v_scale=SCALAR)
    assert not refused(declared, attn__k_proj__k_scale=BF16_SCALAR, attn__v_proj__v_scale=ONE)
    assert "tensor attn.v_scale (F32 or BF16" in refused(declared, attn__k_scale=ONE)
    assert "tensor attn.k_scale (F32 or BF16" in refused(declared, attn__v_scale=ONE)
    assert "tensor attn.v_proj.v_scale (F32" in refused(declared, attn__k_proj__k_scale=ONE)
    assert "attn.k_scale is F32 [8, 1]" in refused(declared, attn__k_scale=ROWS, attn__v_scale=ONE)
    assert "a scale of q_scale is not supported" in refused(declared, attn__q_scale=ONE)
    assert "declares an FP8 KV cache, but no tensor ends with k_scale" in refused(declared, norm__weight=("BF16", (8,)))
    names = ["attn.k_scale", "attn.k_proj.weight_scale", "attn.v_proj.v_scale", "attn.k_scale.weight"]
    headers = {name: TensorHeader(name, Path("x"), *ONE, 0, 0) for name in names}
    assert list(cache_scales(headers)) == ["attn.k_scale", "attn.v_proj.v_scale"]
    for scheme, way_out in ((OURS, "write its weights alone"), (None, "download or quantize")):
        said = refused(scheme, attn__k_scale=ONE, attn__v_scale=ONE)
        assert "belongs to an FP8 KV cache, which config.json does not declare" in said and way_out in said


def test_the_experts_of_a_large_mixture_are_checked_in_seconds():
    """Check 18,432 linears, as many as Qwen3-30B-A3B has. A check with quadratic work took 25 s."""
    tensors = {}
    for expert in range(18_432):
        name = f"model.layers.{expert // 384}.mlp.experts.{expert % 384}.up_proj"
        leaves = (("packed", "U8", (32, 32)), ("scale", "F8_E4M3", (32, 4)), ("global_scale", "F32", (1,)))
        for leaf, dtype, shape in leaves:
            tensor = f"{name}.weight_{leaf}"
            tensors[tensor] = TensorHeader(tensor, Path("x"), dtype, shape, 0, 0)
    ignored = ("lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(48)))
    began = time.process_time()
    check_quantized(tensors, Nvfp4Scheme(ignore=ignored))
    assert time.process_time() - began < 8
