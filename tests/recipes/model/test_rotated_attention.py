"""Attention whose rotation is one kernel: the numbers of transformers' own, and only where that is known."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from qerl_recipes.model import engine_rounding, packed_attention, rotated_attention
from qerl_recipes.model.rotated_attention import RotatedAttention

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
IDS = torch.randint(2, 60, (1, 12), generator=torch.Generator().manual_seed(4))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def prepared(folder, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.set_attn_implementation(packed_attention.NAME)
    engine_rounding.replace_rotations(model)
    return model


@pytest.fixture
def random(building):
    def make(kind, **sizes):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **SIZES, **sizes)
        with building(config):
            return AutoModelForCausalLM.from_config(config)

    return make


def hidden_and_gradient(model):
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    out = model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    out.float().square().sum().backward()
    return out.detach(), embeddings.grad


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_fp32_nothing_changes_and_every_part_keeps_its_name(make_bf16, architecture):
    model = prepared(make_bf16(architecture))
    names, before = [name for name, _ in model.named_parameters()], hidden_and_gradient(model)
    assert rotated_attention.replace_attentions(model) == model.config.num_hidden_layers
    assert [name for name, _ in model.named_parameters()] == names
    for mine, theirs in zip(hidden_and_gradient(model), before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert rotated_attention.replace_attentions(model) == 0


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_in_bf16_it_rounds_where_the_unrounded_rotation_did(make_bf16, architecture):
    model = prepared(make_bf16(architecture), torch.bfloat16)
    before = hidden_and_gradient(model)[0]
    rotated_attention.replace_attentions(model)
    assert torch.equal(hidden_and_gradient(model)[0], before)


def test_with_a_cache_or_another_attention_the_models_own_way_is_taken(make_bf16, monkeypatch):
    model = prepared(make_bf16("qwen2"))
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False)
    rotated_attention.replace_attentions(model)
    rotations = []
    inner = rotated_attention.rotate
    monkeypatch.setattr(rotated_attention, "rotate", lambda *a: rotations.append(a) or inner(*a))
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), expected)
    model.set_attn_implementation("eager")
    model(IDS, use_cache=False)
    assert not rotations
    model.set_attn_implementation(packed_attention.NAME)
    model(IDS, use_cache=False)
    assert len(rotations) == 2 * model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("gemma3_text", 4), ("granite", 4), ("smollm3", 3), ("gemma2", 0), ("glm4", 0), ("olmo2", 0), ("phi3", 0)],
)
def test_what_computes_something_else_is_left_alone(kind, expected, random):
    """SmolLM3's fourth layer does not rotate; Gemma 2 caps its scores; GLM-4 rotates a part; OLMo 2 norms a row."""
    model = random(kind, **({"head_dim": 16} if kind in ("gemma3_text", "gemma2", "glm4") else {}))
    assert rotated_attention.replace_attentions(model) == expected
    layers = [module for module in model.modules() if isinstance(module, RotatedAttention)]
    assert [layer.layer_idx for layer in layers] == list(range(expected))


def test_a_layer_that_asks_its_attention_for_something_else_is_left_alone(random):
    model = random("qwen2")
    kind = type(model.model.layers[0].self_attn)

    class Scaled(kind):
        def forward(self, *args, **kwargs):
            return super().forward(*args, softcap=30.0, **kwargs)

    class Shifted(kind):
        def forward(self, hidden_states, *args, **kwargs):
            out, answer = super().forward(hidden_states, *args, **kwargs)
            return out + 0.01, answer

    model.model.layers[0].self_attn.__class__ = Scaled
    model.model.layers[1].self_attn.__class__ = Shifted
    assert rotated_attention.replace_attentions(model) == 2
    assert [isinstance(layer.self_attn, RotatedAttention) for layer in model.model.layers] == [False, False, True, True]
