"""Test that the trainer's model rounds where a compiled engine rounds, and computes the same otherwise."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl_recipes.model import rounding

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
IDS = torch.randint(2, 60, (2, 11), generator=torch.Generator().manual_seed(4))


def fresh(make_bf16, architecture="qwen2", dtype=torch.float32, **config):
    return AutoModelForCausalLM.from_pretrained(make_bf16(architecture, **config), dtype=dtype).eval()


def last_hidden(model):
    return model.model(input_ids=IDS).last_hidden_state.detach()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_fp32_nothing_changes_and_every_part_keeps_its_name(make_bf16, architecture):
    model = fresh(make_bf16, architecture)
    names, before = [name for name, _ in model.named_parameters()], last_hidden(model)
    assert rounding.replace_mlps(model) == model.config.num_hidden_layers
    assert rounding.replace_rotations(model) == 1
    assert [name for name, _ in model.named_parameters()] == names
    torch.testing.assert_close(last_hidden(model), before, rtol=1e-5, atol=1e-5)


def test_a_second_call_replaces_nothing(make_bf16):
    model = fresh(make_bf16)
    rounding.replace_mlps(model)
    rounding.replace_rotations(model)
    assert rounding.replace_mlps(model) == rounding.replace_rotations(model) == 0


def test_on_a_cpu_the_gated_product_is_the_eager_engines(make_bf16):
    model = fresh(make_bf16, dtype=torch.bfloat16)
    theirs = model.model.layers[0].mlp
    rounding.replace_mlps(model)
    x = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(model.model.layers[0].mlp(x), theirs(x))


def test_cosines_are_the_models_own_in_fp32(make_bf16):
    model = fresh(make_bf16, dtype=torch.bfloat16)
    x, positions = torch.zeros(1, 5, 8, dtype=torch.bfloat16), torch.arange(5)[None]
    before = model.model.rotary_emb(x, positions)
    rounding.replace_rotations(model)
    after = model.model.rotary_emb(x, positions)
    for rounded, number in zip(before, after, strict=True):
        assert rounded.dtype == torch.bfloat16 and number.dtype == torch.float32
        assert torch.equal(number, rounded.float())


def test_an_mlp_with_another_activation_stays_with_a_warning(make_bf16):
    model = fresh(make_bf16, hidden_act="gelu")
    before = last_hidden(model)
    with pytest.warns(UserWarning, match=r"Qwen2MLP is not down\(silu\(gate\) \* up\)"):
        assert rounding.replace_mlps(model) == 0
    assert torch.equal(last_hidden(model), before)
