"""What a config.json and a model's names say of its linears."""

import time
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_vllm_plugin.expected_tensors import expected_tensors, experts, fused_with
from qerl_vllm_plugin.packed_tensors import check_quantized
from qerl_vllm_plugin.safetensors_header import TensorHeader
from qerl_vllm_plugin.scheme import Nvfp4Scheme

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
def test_siblings_come_in_the_order_in_which_vllm_stacks_them(name: str, group: list[str]) -> None:
    assert fused_with(name, LAYER) == group
    assert fused_with(f"model.layers.1.{name}", [f"model.layers.1.{other}" for other in LAYER] + LAYER) == [
        f"model.layers.1.{other}" for other in group
    ]


def test_a_layer_is_stacked_with_what_the_model_has() -> None:
    assert fused_with("attn.q_proj", ["attn.q_proj", "attn.kv_a_proj"]) == ["attn.q_proj"]
    assert fused_with("up_proj", ["up_proj", "gate_proj"]) == ["gate_proj", "up_proj"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_experts": 128}, "num_experts=128"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"n_routed_experts": 64, "num_experts": None}, "n_routed_experts=64"),
        ({"num_experts": 1}, ""),  # as a dense model is sometimes written
        ({}, ""),
    ],
)
def test_a_mixture_has_more_than_one_expert(config: dict[str, int], said: str) -> None:
    assert experts(config) == said


@pytest.mark.parametrize(("family", "head"), [("qwen3", 128), ("qwen3_moe", 16), ("llama", 16)])
def test_a_config_without_a_head_dim_means_what_transformers_takes_it_for(family: str, head: int) -> None:
    sizes = dict.fromkeys(("vocab_size", "intermediate_size", "moe_intermediate_size"), 32)
    sizes |= {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    built = AutoConfig.for_model(family, **sizes, num_experts=2)
    model = AutoModelForCausalLM.from_config(built)
    tensors = expected_tensors({**sizes, "model_type": family, "num_experts": 2})
    assert tensors is not None
    name = "model.layers.0.self_attn.q_proj.weight"
    assert tensors[name].shape == tuple(model.get_parameter(name).shape) == (4 * head, 64)


def test_the_experts_of_a_large_mixture_are_checked_in_seconds() -> None:
    """18,432 linears, as Qwen3-30B-A3B has: with work that grows with their square it took 25 s."""
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
