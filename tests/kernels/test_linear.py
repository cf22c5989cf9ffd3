"""Test the frozen linear layer against fp64: its output, its gradient, its operators under torch.compile, and its
refusals.
"""

import pytest
import torch
from qerl_kernels import linear as of_linear
from qerl_kernels import naive, nvfp4
from qerl_kernels.linear import expand, linear, linear_backward
from qerl_kernels.nvfp4 import dequantize, quantize

N, K = 24, 48


def example(seed, rows, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    weight = quantize(torch.randn(N, K, generator=generator).bfloat16())
    row_scale = 1 / weight.divisor
    if rows:
        row_scale = row_scale * torch.rand(N, generator=generator) + 1e-3
    x = torch.randn(2, 5, K, generator=generator).to(dtype)
    bias = torch.randn(N, generator=generator).to(dtype)
    return x, weight.codes, weight.block_scales, row_scale, bias


@pytest.mark.parametrize("rows", [False, True], ids=["one tensor scale", "a scale for each row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_forward_is_within_one_rounding_of_fp64(rows, dtype):
    x, codes, block_scales, row_scale, bias = example(0, rows, dtype)
    w = dequantize(codes, block_scales).double() * row_scale.double().reshape(-1, 1)
    expected = x.double() @ w.t() + bias.double()
    actual = linear(x, codes, block_scales, row_scale, bias)
    assert actual.dtype == dtype and actual.shape == (2, 5, N) and actual.is_contiguous()
    half_step = torch.finfo(dtype).eps / 2
    assert ((actual.double() - expected).abs() <= half_step * expected.abs() + 1e-5).all()


@pytest.mark.parametrize("rows", [False, True], ids=["one tensor scale", "a scale for each row"])
def test_backward_is_the_gradient_of_the_dense_layer(rows):
    x, codes, block_scales, row_scale, bias = example(1, rows, torch.float32)
    w = (dequantize(codes, block_scales).float() * row_scale.reshape(-1, 1)).contiguous()
    dy = torch.randn(2, 5, N)
    x.requires_grad_()
    linear(x, codes, block_scales, row_scale, bias).backward(dy)
    torch.testing.assert_close(x.grad, dy @ w)
    assert torch.equal(x.grad, linear_backward(dy, codes, block_scales, row_scale))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_operators_pass_torch_library_checks(bias):
    x, codes, block_scales, row_scale, b = example(3, True)
    torch.library.opcheck(  # test_schema has no float8 arithmetic to compare with
        torch.ops.qerl.nvfp4_linear.default,
        (x.requires_grad_(), codes, block_scales, row_scale, b if bias else None),
        test_utils=("test_autograd_registration", "test_faketensor"),
    )
    torch.library.opcheck(  # test_schema has no float8 arithmetic to compare with
        torch.ops.qerl.nvfp4_linear_backward.default,
        (torch.randn(3, N), codes, block_scales, row_scale),
        test_utils=("test_faketensor",),
    )


@pytest.mark.parametrize("known", [False, True], ids=["scales on the device", "a scale that is known"])
@pytest.mark.parametrize("rows", [False, True], ids=["one tensor scale", "a scale for each row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_a_gpu_is_given_to_do_is_the_product_of_the_dense_weight_rounded_once(dtype, rows, known, monkeypatch):
    """Run the GPU's steps with the CPU's own products. Only the matrix product with fp32 sums is replaced."""
    asked = []
    monkeypatch.setattr(
        of_linear, "_matmul_fp32", lambda a, b: asked.append((a.dtype, b.dtype)) or a.float() @ b.float()
    )
    x, codes, block_scales, row_scale, bias = example(7, rows, dtype)
    row_scale = row_scale * 3
    if rows and known:
        row_scale = row_scale.amax().expand(N).clone()
    w = dequantize(codes, block_scales).double() * row_scale.double().reshape(-1, 1)
    dy = torch.randn(2, 5, N).to(dtype)
    scale = float(row_scale.amax()) if known else None
    step = torch.finfo(dtype).eps
    for added in (None, bias):
        y = of_linear._expanded(x, codes, block_scales, row_scale, added, scale)
        expected = x.double() @ w.t() + (0 if added is None else added.double())
        assert y.dtype == dtype and y.shape == (2, 5, N)
        assert ((y.double() - expected).abs() <= step * expected.abs() + 1e-4).all()
    dx = of_linear._expanded_backward(dy, codes, block_scales, row_scale, scale)
    expected, terms = dy.double() @ w, dy.double().abs() @ w.abs()
    assert dx.dtype == dtype and dx.shape == (2, 5, K)
    rounded_before = step * terms if rows and not known else 0  # dy is rounded once more, before the sum
    assert ((dx.double() - expected).abs() <= step * expected.abs() + rounded_before + 1e-4).all()
    assert asked == ([] if known else [(dtype, dtype)] * 3), "operands of the matrix unit"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [False, True], ids=["one tensor scale", "a scale for each row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_gpu_agrees_with_the_naive_reference(rows, dtype):
    x, codes, block_scales, row_scale, bias = (t.cuda() for t in example(5, rows, dtype))
    dy = torch.randn(2, 5, N, device="cuda").to(dtype)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-4}
    torch.testing.assert_close(
        linear(x, codes, block_scales, row_scale, bias),
        naive.linear(x, codes, block_scales, row_scale, bias),
        **tolerance,
    )
    # With unequal row scales dy is rounded once more before the sum.
    tolerance["atol"] = max(1e-4, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(
        linear_backward(dy, codes, block_scales, row_scale),
        naive.linear_backward(dy, codes, block_scales, row_scale),
        **tolerance,
    )


@pytest.mark.gpu
def test_the_operator_runs_inside_a_cuda_graph():
    x, codes, block_scales, row_scale, bias = (t.cuda() for t in example(6, True))
    expected = linear(x, codes, block_scales, row_scale, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, codes, block_scales, row_scale, bias)
    graph.replay()
    assert torch.equal(y, expected)


def test_shapes_that_do_not_fit_are_refused():
    x, codes, block_scales, row_scale, bias = example(4, True)
    with pytest.raises(ValueError, match="x has 47 columns, but the packed weight has 48"):
        linear(x[..., :-1], codes, block_scales, row_scale)
    with pytest.raises(ValueError, match=r"do not fit block scales"):
        linear(x, codes, block_scales[:, :-1], row_scale)
    # 40 columns are not a whole number of 16-column blocks
    with pytest.raises(ValueError, match=r"do not fit block scales"):
        linear(x[..., :40], codes[:, :20], block_scales[:, :2], row_scale)
    with pytest.raises(ValueError, match=r"row_scale is torch\.bfloat16"):
        linear(x, codes, block_scales, row_scale.bfloat16())
    with pytest.raises(ValueError, match="not uint8 and float8_e4m3fn"):
        linear(x, codes, block_scales.float(), row_scale)
    with pytest.raises(ValueError, match="bias has shape"):
        linear(x, codes, block_scales, row_scale, bias[:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_scale_that_is_a_factor_of_the_product_rounds_no_more_than_one_that_is_applied_to_it(dtype, has_bias):
    x, codes, block_scales, row_scale, bias = (t.cuda() for t in example(6, False, dtype))
    bias = bias if has_bias else None
    dy = torch.randn(2, 5, N, device="cuda").to(dtype)
    results = []
    for scale in (float(row_scale), None):
        leaf = x.clone().requires_grad_()
        y = linear(leaf, codes, block_scales, row_scale, bias, scale)
        y.backward(dy)
        results.append((y.detach().float(), leaf.grad.float()))
    exact = naive.linear(x.float(), codes, block_scales, row_scale, None if bias is None else bias.float())
    exact_dx = naive.linear_backward(dy.float(), codes, block_scales, row_scale)
    for factor, separate, true in zip(*results, (exact, exact_dx), strict=True):
        step = max(torch.finfo(dtype).eps, 1e-6)
        assert ((factor - true).abs() <= step * true.abs() + 1e-4).all()
        assert float((factor - true).abs().mean()) <= 1.05 * float((separate - true).abs().mean()) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_expanded_operand_times_its_factor_is_exact_and_small_in_float16(dtype):
    """Expand all 16 codes under every positive scale. In float16 the expanded operand stays below 1, so its sums stay
    in range wherever those of W do.
    """
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    w, factor = expand(codes, scales, dtype)
    assert w.dtype == dtype
    assert torch.equal(w.double() * factor, nvfp4.dequantize(codes, scales).double())
    assert dtype != torch.float16 or w.abs().amax() < 1
