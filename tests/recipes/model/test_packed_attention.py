"""One attention call for all sequences of a packed row, against one for each."""

import pytest
import torch

from qerl_recipes.model import packed_attention
from qerl_recipes.model.packing import pack

P, C = 7, 9  # columns of prompts and of completions


def batch():
    """Three completions of one prompt and two of prompts of their own, of different lengths."""
    ids = torch.randint(2, 64, (5, P + C), generator=torch.Generator().manual_seed(3))
    ids[:3, :P] = ids[0, :P]
    mask = torch.ones_like(ids)
    for row, (padding, length) in enumerate([(2, C), (2, 1), (2, 4), (0, 2), (P - 1, C)]):
        mask[row, :padding] = 0
        mask[row, P + length :] = 0
    return ids, mask


def naive_varlen(query, key, value, starts, key_starts, longest, longest_key, *, scale, window_size, **grouped):
    """What flash attention computes: (T, heads, D), the causal mask aligned with the last key of each sequence."""
    assert grouped == packed_attention.GROUPED
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
    spans = packed_attention.Spans.of(row.segments, torch.device("cpu"))
    T, generator = row.tokens.shape[1], torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    leaves = [
        torch.randn(1, heads, T, 8, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2)
    ]  # queries, keys, values
    weights = torch.randn(1, T, 4, 8, generator=generator).bfloat16()
    calls = []
    monkeypatch.setattr(packed_attention, "varlen_attn", lambda *a, **k: calls.append(a) or naive_varlen(*a, **k))
    results = []
    for at_once in (None, spans):
        options = {"segments": row.segments, "spans": at_once, "sliding_window": window, "scaling": 0.3}
        out, nothing = packed_attention.attention(module, *leaves, None, **options)
        assert out.shape == (1, T, 4, 8) and nothing is None
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)])
    assert len(calls) == 1
    for what, one, each in zip(("out", "dq", "dk", "dv"), results[1], results[0], strict=True):
        torch.testing.assert_close(one.float(), each.float(), rtol=0.03, atol=0.03, msg=what)
    with_dropout = {"segments": row.segments, "spans": spans, "dropout": 0.5}
    packed_attention.attention(module, *leaves, None, **with_dropout)
    packed_attention.attention(module, *(leaf.float() for leaf in leaves), None, segments=row.segments, spans=spans)
    assert len(calls) == 1  # flash attention takes neither: a call for each
