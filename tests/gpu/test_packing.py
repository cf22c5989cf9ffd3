"""Test packed rows on a GPU: each sequence gets the numbers it gets alone, nothing waits for the GPU, and no logits are
stored.
"""

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from qerl_kernels import linear_logprob as kernel
from qerl_kernels import nvfp4_triton, tiles

from qerl_recipes.model import attention, logprobs, lora
from qerl_recipes.model import loading as model
from qerl_recipes.model.frozen import FrozenNVFP4Linear, FrozenTiledLinear
from qerl_recipes.model.packing import pack

pytestmark = pytest.mark.gpu

P, C = 96, 160


def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 512, (12, P + C), generator=generator)
    ids[:, :P] = ids[:3, :P].repeat_interleave(4, dim=0)
    mask = torch.zeros_like(ids)
    for row in range(len(ids)):
        mask[row, 7 * (row // 4) : P + 1 + 13 * row] = 1
    return ids, mask


def policy(folder, dtype, implementation=None):
    loaded = model.load(folder, dtype, attn_implementation=implementation)
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    adapted = get_peft_model(loaded, adapter).cuda()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return adapted


def score(adapted, pack_tokens, autocast=contextlib.nullcontext):
    ids, mask = batch()
    rows = pack(ids, mask, C, pack_tokens, share_prompts=logprobs.shares_prompts(adapted))
    return logprobs.completion_logprobs(adapted, adapted, rows, (len(ids), C), 1.0, autocast)


def autocast():
    return torch.autocast("cuda", torch.bfloat16)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_rows_give_the_numbers_of_each_sequence_alone(implementation, checkpoints):
    adapted = policy(checkpoints[1], torch.float32, implementation)
    ids, mask = batch()
    expected = torch.zeros(len(ids), C, device="cuda")
    for row in range(len(ids)):
        tokens = ids[row][mask[row].bool()].cuda()
        own = int(mask[row, P:].sum())
        log_p = torch.log_softmax(adapted(input_ids=tokens[None]).logits[0, -own - 1 : -1].float(), dim=-1)
        expected[row, :own] = log_p.gather(1, tokens[-own:, None])[:, 0]
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).cuda()
    (expected * weights).sum().backward()
    gradients = {n: w.grad.clone() for n, w in adapted.named_parameters() if w.requires_grad}
    adapted.zero_grad()
    assert logprobs.prepare(adapted) is None
    actual = score(adapted, 700)[0]
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-3, atol=1e-3)
    (actual * weights).sum().backward()
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            largest = float(gradients[name].abs().max())
            torch.testing.assert_close(weight.grad, gradients[name], rtol=0, atol=5e-3 * largest, msg=name)


def test_one_attention_call_for_a_row_gives_the_numbers_of_a_call_for_each_sequence(checkpoints, monkeypatch, record):
    adapted = policy(checkpoints[1], torch.bfloat16)
    logprobs.prepare(adapted)
    calls, inner, results = [], attention.varlen_attn, []
    monkeypatch.setattr(attention, "varlen_attn", lambda *a, **k: calls.append(a) or inner(*a, **k))
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(attention.Spans, "of", lambda *arguments: None)
        logp = score(adapted, 4096, autocast)[0]
        logp.sum().backward()
        of_a, of_b = (
            torch.cat([w.grad.flatten() for name, w in adapted.named_parameters() if part in name])
            for part in ("lora_A", "lora_B")
        )
        results.append([logp.detach(), of_a, of_b])
        adapted.zero_grad()
    assert len(calls) == 4  # one call per layer
    difference = float((results[0][0] - results[1][0]).abs().sum() / (results[1][0] != 0).sum())
    record("packed rows: log p, one attention call to one a sequence, mean difference", f"{difference:.4f}")
    assert difference < 0.02
    for mine, theirs in zip(results[0][1:], results[1][1:], strict=True):
        assert (mine - theirs).norm() < 0.05 * theirs.norm()


def test_the_adapted_linear_is_that_of_peft(checkpoints):
    adapted = policy(checkpoints[1], torch.bfloat16)
    results = []
    for installed in (False, True):
        if installed:
            assert lora.install(adapted, "default") == 28
        with autocast():
            ids = batch()[0][:2].cuda()
            logits = adapted(input_ids=ids).logits
        logits.float().log_softmax(-1)[..., 3].sum().backward()
        gradients = [w.grad.flatten() for w in adapted.parameters() if w.requires_grad]
        results.append([logits.detach().float(), torch.cat(gradients)])
        adapted.zero_grad()
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert (mine - theirs).norm() < 0.03 * theirs.norm()


@pytest.mark.parametrize("kind", ["checkpoint", "tiles"])
def test_an_adapted_linear_rounds_its_output_once(kind, record):
    """Check that the output is rounded once, as in the engine's kernel.

    A plain cuBLAS product would be rounded before the addition.
    """
    N, K = 2048, 3584
    packed = nvfp4_triton.quantize(torch.randn(N, K, device="cuda").bfloat16())
    scale, bias = (1 / packed.divisor).float(), 3 * torch.randn(N, device="cuda").bfloat16()
    if kind == "tiles":
        weight = tiles.tile_weight(packed.codes, packed.block_scales, scale.expand(N).contiguous())
        base = FrozenTiledLinear(weight, bias, torch.bfloat16)
    else:
        base = FrozenNVFP4Linear(packed.codes, packed.block_scales, packed.divisor, bias, torch.bfloat16)
    adapter = LoraConfig(r=32, lora_alpha=64, target_modules=["part"])
    holder = get_peft_model(torch.nn.ModuleDict({"part": base}), adapter).cuda()
    layer = holder.base_model.model["part"]
    A, B = layer.lora_A.default.weight, layer.lora_B.default.weight
    torch.nn.init.normal_(B, std=0.02)
    assert lora.install(holder, "default") == 1
    x = torch.randn(4096, K, device="cuda").bfloat16()
    with autocast():
        y = layer(x)
    s = (2 * x.double() @ A.bfloat16().double().t()).bfloat16().double()
    w = nvfp4_triton.dequantize(packed.codes, packed.block_scales).double() * scale.double()
    exact = x.double() @ w.t() + s @ B.double().t() + bias.double()
    error, least = ((values.double() - exact).square().mean() for values in (y, exact.bfloat16()))
    record(f"adapted linear ({kind}): mean squared error to that of one rounding", f"{float(error / least):.3f}")
    assert error < 1.1 * least


def test_nothing_waits_for_the_gpu_and_no_logits_are_kept(checkpoints, monkeypatch, record):
    adapted = policy(checkpoints[1], torch.bfloat16)
    adapted.gradient_checkpointing_enable({"use_reentrant": False})
    adapted.enable_input_require_grads()
    adapted.train()
    logprobs.prepare(adapted)
    lora.install(adapted, "default")
    score(adapted, 700, autocast)[0].sum().backward()  # warms up whatever compiles at first use
    monkeypatch.setattr(kernel, "CHUNK_BYTES", 4 * 512 * 64)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logp, entropy = score(adapted, 700, autocast)
        (logp.sum() + entropy.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(entropy.detach().max()) > 0
    record("packed rows: waits for the GPU in forward and backward", 0)
