"""Test attention over packed rows, and its rotation by one kernel, against transformers' own."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from qerl_recipes.model import attention, rounding
from qerl_recipes.model.attention import RotatedAttention
from qerl_recipes.model.packing import pack

P, C = 7, 9  # columns of prompts and of completions


def batch():
    """Return three completions of one prompt and two with prompts of their own, of different lengths."""
    ids = torch.randint(2, 64, (5, P + C), generator=torch.Generator().manual_seed(3))
    ids[:3, :P] = ids[0, :P]
    mask = torch.ones_like(ids)
    for row, (padding, length) in enumerate([(2, C), (2, 1), (2, 4), (0, 2), (P - 1, C)]):
        mask[row, :padding] = 0
        mask[row, P + length :] = 0
    return ids, mask


def naive_varlen(query, key, value, starts, key_starts, longest, longest_key, *, scale, window_size, **grouped):
    """Compute flash attention naively on (T, heads, D), with the causal mask aligned to each sequence's last key."""
    assert grouped == attention.GROUPED
    assert starts.dtype == key_starts.dtype == torch.int32
    assert (longest, longest_key) == (int(starts.diff().max()), int(key_starts.diff().max()))
    out = []
    for q, k, v in zip(
        query.split(starts.diff().tolist()),
        key.split(key_starts.diff().tolist()),
        value.split(key_starts.diff().tolist()),
        strict=True,
    ):
        k, v = (states.repeat_interleave(q.shape[1] // states.shape[1], dim=1) for states in (k, v))
        behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        seen = (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0)) & (window_size[1] == 0)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.double()))
    return torch.cat(out).to(query.dtype)


@pytest.mark.parametrize("window", [None, 4], ids=["all", "window"])
@pytest.mark.parametrize("share", [True, False], ids=["shared prompts", "prompts of their own"])
def test_one_call_for_all_sequences_is_a_call_for_each(share, window, monkeypatch):
    (row,) = pack(*batch(), C, 500, share_prompts=share)
    spans = attention.Spans.of(row.segments, torch.device("cpu"))
    T, generator = row.tokens.shape[1], torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    leaves = [
        torch.randn(1, heads, T, 8, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2)
    ]  # queries, keys, values
    weights = torch.randn(1, T, 4, 8, generator=generator).bfloat16()
    calls = []
    monkeypatch.setattr(attention, "varlen_attn", lambda *a, **k: calls.append(a) or naive_varlen(*a, **k))
    results = []
    for at_once in (None, spans):
        options = {"segments": row.segments, "spans": at_once, "sliding_window": window, "scaling": 0.3}
        out, nothing = attention.attention(module, *leaves, None, **options)
        assert out.shape == (1, T, 4, 8) and nothing is None
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)])
    assert len(calls) == 1
    for what, one, each in zip(("out", "dq", "dk", "dv"), results[1], results[0], strict=True):
        torch.testing.assert_close(one.float(), each.float(), rtol=0.03, atol=0.03, msg=what)
    with_dropout = {"segments": row.segments, "spans": spans, "dropout": 0.5}
    attention.attention(module, *leaves, None, **with_dropout)
    attention.attention(module, *(leaf.float() for leaf in leaves), None, segments=row.segments, spans=spans)
    assert len(calls) == 1  # flash attention takes neither dropout nor fp32


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
    model.set_attn_implementation(attention.NAME)
    rounding.replace_rotations(model)
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
    assert attention.replace_attentions(model) == model.config.num_hidden_layers
    assert [name for name, _ in model.named_parameters()] == names
    for mine, theirs in zip(hidden_and_gradient(model), before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert attention.replace_attentions(model) == 0


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_in_bf16_it_rounds_where_the_unrounded_rotation_did(make_bf16, architecture):
    model = prepared(make_bf16(architecture), torch.bfloat16)
    before = hidden_and_gradient(model)[0]
    attention.replace_attentions(model)
    assert torch.equal(hidden_and_gradient(model)[0], before)


def test_a_cache_or_another_attention_runs_the_models_own_way(make_bf16, monkeypatch):
    model = prepared(make_bf16("qwen2"))
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False)
    attention.replace_attentions(model)
    rotations = []
    inner = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda *a: rotations.append(a) or inner(*a))
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), expected)
    model.set_attn_implementation("eager")
    model(IDS, use_cache=False)
    assert not rotations
    model.set_attn_implementation(attention.NAME)
    model(IDS, use_cache=False)
    assert len(rotations) == 2 * model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("gemma3_text", 4), ("granite", 4), ("smollm3", 3), ("gemma2", 0), ("glm4", 0), ("olmo2", 0), ("phi3", 0)],
)
def test_what_computes_something_else_is_left_alone(kind, expected, random):
    """SmolLM3's fourth layer does not rotate; Gemma 2 caps its scores; GLM-4 rotates a part; OLMo 2 norms a row."""
    model = random(kind, **({"head_dim": 16} if kind in ("gemma3_text", "gemma2", "glm4") else {}))
    assert attention.replace_attentions(model) == expected
    layers = [module for module in model.modules() if isinstance(module, RotatedAttention)]
    assert [layer.layer_idx for layer in layers] == list(range(expected))


def test_a_layer_with_other_attention_options_is_left_alone(random):
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
    assert attention.replace_attentions(model) == 2
    assert [isinstance(layer.self_attn, RotatedAttention) for layer in model.model.layers] == [False, False, True, True]
