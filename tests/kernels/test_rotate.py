"""Test rotary position embedding, which rounds once, and its gradient."""

import pytest
import torch
from qerl_kernels.rotate import rotate


def example(dtype):
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(2, 7, 3, 16, generator=generator).to(dtype) for _ in range(2))
    angles = torch.rand(2, 7, 16, generator=generator) * 6  # the two halves differ, as some models' do
    return x, angles.cos(), angles.sin(), dy


def exact(x, cosine, sine, dy):
    x = x.double().requires_grad_()
    first, second = x.chunk(2, dim=-1)
    y = x * cosine.double()[:, :, None] + torch.cat([-second, first], dim=-1) * sine.double()[:, :, None]
    y.backward(dy.double())
    return y.detach(), x.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)], ids=str)
def test_it_is_the_definition_rounded_once(dtype, tolerance):
    x, cosine, sine, dy = example(dtype)
    expected, gradient = exact(x, cosine, sine, dy)
    y = rotate(x.requires_grad_(), cosine, sine)
    y.backward(dy)
    assert y.dtype == x.grad.dtype == dtype
    if dtype == torch.bfloat16:
        assert (y.detach() == expected.to(dtype)).float().mean() > 0.999  # fp32 may round a tie the other way
    assert (y.detach().double() - expected).norm() < tolerance * expected.norm()
    assert (x.grad.double() - gradient).norm() < tolerance * gradient.norm()


@pytest.mark.parametrize("what", ["angles of another shape", "16-bit angles", "an odd head"])
def test_what_does_not_fit_is_refused(what):
    x, cosine, sine, _ = example(torch.float32)
    if what == "angles of another shape":
        sine = sine[:, :-1]
    elif what == "16-bit angles":
        cosine = cosine.bfloat16()
    else:
        x, cosine, sine = (t[..., :-1] for t in (x, cosine, sine))
    with pytest.raises(ValueError, match=r"must be \(..., T, heads, D\)"):
        rotate(x, cosine, sine)


def test_the_operator_passes_torch_library_checks():
    x, cosine, sine, _ = example(torch.float32)
    torch.library.opcheck(torch.ops.qerl.rotate.default, (x.requires_grad_(), cosine, sine))
