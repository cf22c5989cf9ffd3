"""silu(gate) * up with one rounding, and its gradient."""

import pytest
import torch
from qerl_kernels.silu_mul import silu_mul


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


def test_what_is_not_alike_is_refused():
    with pytest.raises(ValueError, match=r"gate is \(3,\).*up \(4,\).*must be alike"):
        silu_mul(torch.ones(3), torch.ones(4))
    with pytest.raises(ValueError, match="must be alike"):
        silu_mul(torch.ones(3), torch.ones(3).bfloat16())


def test_the_operator_passes_torch_library_checks():
    gate, up, _ = example(torch.float32)
    torch.library.opcheck(torch.ops.qerl.silu_mul.default, (gate.requires_grad_(), up.requires_grad_()))
