"""Test silu(gate) * up, which rounds once, and its gradient."""

import pytest
import torch
from qerl_kernels.silu_mul import scaled_silu_mul, silu_mul, silu_mul_backward_


def example(dtype):
    generator = torch.Generator().manual_seed(2)
    gate, up, dy = (4 * torch.randn(5, 7, 33, generator=generator) for _ in range(3))
    return gate.to(dtype), up.to(dtype), dy.to(dtype)


def exact(gate, up, dy):
    gate, up = gate.double().requires_grad_(), up.double().requires_grad_()
    y = torch.nn.functional.silu(gate) * up
    y.backward(dy.double())
    return y.detach(), gate.grad, up.grad


def test_the_product_is_rounded_once():
    gate, up, dy = example(torch.bfloat16)
    expected = exact(gate, up, dy)[0].bfloat16()
    assert torch.equal(silu_mul(gate, up), expected)
    assert not torch.equal(torch.nn.functional.silu(gate) * up, expected), "two roundings would pass this test too"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)], ids=str)
def test_the_gradient_is_that_of_the_definition(dtype, tolerance):
    gate, up, dy = example(dtype)
    _, *expected = exact(gate, up, dy)
    silu_mul(gate.requires_grad_(), up.requires_grad_()).backward(dy)
    for got, wanted in zip((gate.grad, up.grad), expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - wanted).norm() < tolerance * wanted.norm()


def test_the_gradient_of_gate_takes_the_place_of_that_of_the_product():
    gate, up, dy = example(torch.bfloat16)
    expected = torch.ops.qerl.silu_mul_backward(dy, gate, up)
    there = dy.clone()
    dgate, dup = silu_mul_backward_(there, gate, up)
    assert dgate is there and torch.equal(dgate, expected[0]) and torch.equal(dup, expected[1])
    torch.library.opcheck(torch.ops.qerl.silu_mul_backward_.default, (dy, gate, up))


def test_what_is_not_alike_is_refused():
    with pytest.raises(ValueError, match=r"gate is \(3,\).*up \(4,\).*must be alike"):
        silu_mul(torch.ones(3), torch.ones(4))
    with pytest.raises(ValueError, match="must be alike"):
        silu_mul(torch.ones(3), torch.ones(3).bfloat16())


def test_the_operator_passes_torch_library_checks():
    gate, up, _ = example(torch.float32)
    torch.library.opcheck(torch.ops.qerl.silu_mul.default, (gate.requires_grad_(), up.requires_grad_()))


def scaled_example(dtype):
    gate, up, dy = (tensor.reshape(35, 33) for tensor in example(dtype))
    scales = torch.rand(35, 2, generator=torch.Generator().manual_seed(3)) + 0.1
    return torch.cat([gate, up], dim=1), scales, dy


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)], ids=str)
def test_with_a_scale_for_each_half_of_a_row_it_is_the_same_and_rounded_once(dtype, tolerance):
    joined, scales, dy = scaled_example(dtype)
    gate, up = (
        half * scale for half, scale in zip(joined.double().chunk(2, 1), scales.double().split(1, 1), strict=True)
    )
    y, *gradients = exact(gate, up, dy)
    ours = scaled_silu_mul(joined.requires_grad_(), scales)
    ours.backward(dy)
    expected = torch.cat([gradient * scale for gradient, scale in zip(gradients, scales.split(1, 1), strict=True)], 1)
    assert ours.dtype == joined.grad.dtype == dtype
    if dtype == torch.bfloat16:
        assert torch.equal(ours, y.to(dtype))
    assert (ours.double() - y).norm() < tolerance * y.norm()
    assert (joined.grad.double() - expected).norm() < tolerance * expected.norm()


def test_scales_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"joined is \(2, 6\) and scales torch.float32 \(3, 2\)"):
        scaled_silu_mul(torch.ones(2, 6), torch.ones(3, 2))


def test_the_scaled_operator_passes_torch_library_checks():
    joined, scales, _ = scaled_example(torch.float32)
    torch.library.opcheck(torch.ops.qerl.scaled_silu_mul.default, (joined.requires_grad_(), scales))
