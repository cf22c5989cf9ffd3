"""Test RMSNorm as an operator: its values equal the reference definition, and its gradient is right."""

import pytest
import torch
from qerl_kernels import naive
from qerl_kernels.rms_norm import rms_norm


def example(dtype):
    generator = torch.Generator().manual_seed(3)
    x, dy = (3 * torch.randn(4, 6, 40, generator=generator) for _ in range(2))
    return x.to(dtype), 1 + torch.randn(40, generator=generator), dy.to(dtype)


def twice_rounded(x, w, epsilon):
    """Compute RMSNorm as transformers does, with two roundings."""
    x32 = x.float()
    return w.to(x.dtype) * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_values_are_those_of_the_definition_bit_for_bit(dtype):
    x, w, _ = example(dtype)
    assert torch.equal(rms_norm(x, w, 1e-5), naive.rms_norm(x, w, 1e-5))
    assert torch.equal(rms_norm(x, w, 1e-5, rounded=True), twice_rounded(x, w, 1e-5))
    if dtype == torch.bfloat16:
        assert not torch.equal(rms_norm(x, w, 1e-5), rms_norm(x, w, 1e-5, rounded=True)), "the two would be one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_definition_is_within_one_rounding_of_fp64(dtype):
    x, w, _ = example(dtype)
    for size in (1.0, 1e-3):  # the smaller one has a mean square near epsilon
        x = (x.float() * size).to(dtype)
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
        y = naive.rms_norm(x, w, 1e-5)
        assert y.dtype == dtype
        half_step = torch.finfo(dtype).eps / 2
        assert ((y.double() - exact).abs() <= (half_step + 3e-7) * exact.abs() + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("rounded", [False, True], ids=["one rounding", "rounded"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)], ids=str)
def test_the_gradients_are_those_of_the_definition(dtype, tolerance, rounded):
    x, w, dy = example(dtype)
    exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
    exact_y = exact_x * torch.rsqrt(exact_x.square().mean(-1, keepdim=True) + 1e-5) * exact_w
    exact_y.backward(dy.double())
    rms_norm(x.requires_grad_(), w.requires_grad_(), 1e-5, rounded=rounded).backward(dy)
    assert x.grad.dtype == dtype and w.grad.dtype == torch.float32
    for got, wanted in ((x.grad, exact_x.grad), (w.grad, exact_w.grad)):
        assert (got.double() - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize("rounded", [False, True], ids=["one rounding", "rounded"])
def test_a_gradient_goes_through_what_was_multiplied_rounded_or_not(rounded):
    x, w, dy = example(torch.bfloat16)
    rms_norm(x.requires_grad_(), w.requires_grad_(), 1e-5, rounded=rounded).backward(dy)
    there = x.detach().double()
    n = there * torch.rsqrt(there.square().mean(-1, keepdim=True) + 1e-5)
    multiplied = n.bfloat16().double() if rounded else n
    torch.testing.assert_close(w.grad.double(), (dy.double() * multiplied).sum((0, 1)), rtol=1e-6, atol=1e-5)
    exact = there.requires_grad_()
    factor = w.detach().bfloat16().double() if rounded else w.detach().double()
    (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * factor).backward(dy.double())
    assert (x.grad == exact.grad.bfloat16()).double().mean() > 0.99, "one rounding, of the right number"


def test_a_frozen_weight_gets_no_gradient():
    x, w, dy = example(torch.float32)
    rms_norm(x.requires_grad_(), w, 1e-5).backward(dy)
    assert x.grad is not None and w.grad is None


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"x is \(2, 8\) and w \(7,\).*must be \(8,\) in fp32"):
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="bfloat16; w must be"):
        rms_norm(torch.ones(2, 8), torch.ones(8).bfloat16(), 1e-6)


def test_the_operator_passes_torch_library_checks():
    x, w, _ = example(torch.float32)
    arguments = (x.requires_grad_(), w.requires_grad_(), 1e-5, True)
    torch.library.opcheck(torch.ops.qerl.rms_norm.default, arguments)
