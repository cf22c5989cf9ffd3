"""Test that the frozen linear layer on Marlin's tensors gives the checkpoint layout's bits, and what its backward
keeps.
"""

import pytest
import torch
from marlin_packing import repack, store_scales
from qerl_kernels import linear_marlin
from qerl_kernels.linear import linear
from qerl_kernels.marlin_layout import MarlinWeight
from qerl_kernels.nvfp4 import NVFP4Weight, quantize

N, K = 80, 96


def example(dtype=torch.bfloat16):
    """Return x, the checkpoint's weight, the same in Marlin's layout (some columns of a larger one), and a bias."""
    generator = torch.Generator().manual_seed(0)
    whole = quantize(torch.randn(192, K, generator=generator).bfloat16())
    packed = NVFP4Weight(whole.codes[64 : 64 + N], whole.block_scales[64 : 64 + N], whole.divisor)
    words, scales = repack(whole.codes)[:, 128:384], store_scales(whole.block_scales, 0)[:, 64:192]
    marlin = MarlinWeight(words, scales, 1 / whole.divisor, 0, N, K)
    return torch.randn(2, 5, K, generator=generator).to(dtype), packed, marlin, torch.randn(N).to(dtype)


def test_the_checkpoints_bits_come_back():
    _, packed, marlin, _ = example()
    codes, block_scales = marlin.canonical()
    assert torch.equal(codes, packed.codes)
    assert torch.equal(block_scales.view(torch.uint8), packed.block_scales.view(torch.uint8))


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_product_and_gradient_are_those_of_the_checkpoints_layout_bit_for_bit(dtype, has_bias):
    x, packed, marlin, bias = example(dtype)
    added, scale = bias if has_bias else None, float(marlin.scale)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = linear_marlin.linear(ours, marlin, added, scale)
    expected = linear(theirs, packed.codes, packed.block_scales, 1 / packed.divisor, added, scale)
    dy = torch.randn(2, 5, N).to(dtype)
    y.backward(dy)
    expected.backward(dy)
    assert y.dtype == dtype and torch.equal(y, expected) and torch.equal(ours.grad, theirs.grad)


def test_the_backward_keeps_marlins_tensors_alone():
    x, _, marlin, bias = example()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_marlin.linear(x.requires_grad_(), marlin, bias, float(marlin.scale))
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (marlin.words, marlin.scales, marlin.scale)]


def test_the_operators_have_the_shapes_and_the_gradient_that_they_declare():
    x, _, marlin, bias = example(torch.float32)
    weight = marlin.words, marlin.scales, marlin.scale, marlin.exponent, N, K
    forward, backward = torch.ops.qerl.nvfp4_linear_marlin.default, torch.ops.qerl.nvfp4_linear_marlin_backward.default
    torch.library.opcheck(forward, (x.requires_grad_(), *weight, bias, float(marlin.scale)))
    torch.library.opcheck(backward, (torch.randn(3, N), *weight, None))


def test_shapes_that_do_not_fit_are_refused():
    x, _, marlin, bias = example()
    with pytest.raises(ValueError, match=r"the weight is \(80, 96\)"):
        linear_marlin.linear(x[..., :32], marlin)
    with pytest.raises(ValueError, match=r"\(79,\)"):
        linear_marlin.linear(x, marlin, bias[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_gpu_gives_the_bits_of_its_product_on_the_checkpoints_layout(dtype):
    x, packed, marlin, bias = example(dtype)
    scale, x, bias = float(marlin.scale), x.cuda(), bias.cuda()
    whole = MarlinWeight(marlin.words.cuda(), marlin.scales.cuda(), marlin.scale.cuda(), marlin.exponent, N, K)
    parts = packed.codes.cuda(), packed.block_scales.cuda(), (1 / packed.divisor).cuda()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = linear_marlin.linear(ours, whole, bias, scale), linear(theirs, *parts, bias, scale)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    assert torch.equal(y, expected) and torch.equal(ours.grad, theirs.grad)
