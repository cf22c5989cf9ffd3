"""Test the grouped product of sorted rows with packed experts, and its gradient for the input."""

import pytest
import torch
from qerl_kernels import nvfp4
from qerl_kernels.experts import grouped_linear

E, N, K = 5, 24, 32
COUNTS = (3, 0, 4, 1, 0)


def example(dtype):
    generator = torch.Generator().manual_seed(0)
    packed = [nvfp4.quantize(torch.randn(N, K, generator=generator)) for _ in range(E)]
    codes, scales = torch.stack([p.codes for p in packed]), torch.stack([p.block_scales for p in packed])
    ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    x, dy = (torch.randn(sum(COUNTS), width, generator=generator).to(dtype) for width in (K, N))
    return x, ends, codes, scales, dy


def exact(x, codes, scales, dy):
    """Compute the product and its input gradient in fp64 with a dense weight for each row."""
    owner = torch.repeat_interleave(torch.arange(E), torch.tensor(COUNTS))
    w = torch.stack([nvfp4.dequantize(codes[e], scales[e]).double() for e in owner])
    return torch.einsum("snk,sk->sn", w, x.double()), torch.einsum("snk,sn->sk", w, dy.double())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)], ids=str)
def test_each_row_is_multiplied_by_its_expert_and_so_is_its_gradient(dtype, tolerance):
    x, ends, codes, scales, dy = example(dtype)
    y, dx = exact(x, codes, scales, dy)
    ours = grouped_linear(x.requires_grad_(), ends, codes, scales)
    ours.backward(dy)
    assert ours.dtype == x.grad.dtype == dtype
    assert (ours.double() - y).norm() < tolerance * y.norm()
    assert (x.grad.double() - dx).norm() < tolerance * dx.norm()


def test_an_expert_without_rows_costs_nothing_and_no_rows_give_none():
    x, ends, codes, scales, _ = example(torch.float32)
    unused = scales.clone()
    unused.view(torch.uint8)[torch.tensor(COUNTS) == 0] = 0x7F  # NaN
    assert torch.equal(grouped_linear(x, ends, codes, unused), grouped_linear(x, ends, codes, scales))
    assert grouped_linear(x[:0], ends * 0, codes, scales).shape == (0, N)


def test_under_autocast_the_given_dtype_counts():
    x, ends, codes, scales, _ = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        under = grouped_linear(x, ends, codes, scales)
    assert torch.equal(under, grouped_linear(x, ends, codes, scales))


def test_what_does_not_fit_is_refused():
    x, ends, codes, scales, _ = example(torch.float32)
    with pytest.raises(ValueError, match=r"x is torch\.float16"):
        grouped_linear(x.half(), ends, codes, scales)
    with pytest.raises(ValueError, match=r"x has shape \(8, 16\).* 32 columns"):
        grouped_linear(x[:, :16], ends, codes, scales)
    with pytest.raises(ValueError, match="do not fit block scales"):
        grouped_linear(x, ends, codes, scales[:-1])
    # 24 columns are not a whole number of 16-column blocks
    with pytest.raises(ValueError, match="do not fit block scales"):
        grouped_linear(x[:, :24], ends, codes[..., :12], scales[..., :1])
    with pytest.raises(ValueError, match=r"ends is torch.int64 \(5,\)"):
        grouped_linear(x, ends.long(), codes, scales)


def test_the_operator_passes_torch_library_checks():
    x, ends, codes, scales, _ = example(torch.float32)
    torch.library.opcheck(  # test_schema has no float8 arithmetic to compare with
        torch.ops.qerl.nvfp4_grouped_linear.default,
        (x.requires_grad_(), ends, codes, scales),
        test_utils=("test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(40, 0, 300, 1, 171, 0, 0, 512), (0, 0, 0, 0, 0, 0, 0, 1)], ids=str)
def test_on_a_gpu_one_grouped_product_does_all_experts(counts):
    """Compare the grouped product, and the scaled activation between two products, with the reference on a GPU."""
    from qerl_kernels.silu_mul import scaled_silu_mul

    generator = torch.Generator().manual_seed(0)
    packed = [nvfp4.quantize(torch.randn(256, 384, generator=generator)) for _ in counts]
    codes, scales = (torch.stack([getattr(p, name) for p in packed]).cuda() for name in ("codes", "block_scales"))
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).cuda()
    x = torch.randn(sum(counts), 384, generator=generator).bfloat16().cuda().requires_grad_()
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).cuda()
    factors = (torch.rand(sum(counts), 2, generator=generator) + 0.5).cuda()
    dy = torch.randn(sum(counts), 128, generator=generator).bfloat16().cuda()
    y = scaled_silu_mul(grouped_linear(x, ends, codes, scales), factors)
    y.backward(dy)

    dense = torch.stack([nvfp4.dequantize(c, s).float() for c, s in zip(codes, scales, strict=True)])
    rows = x.detach().float().requires_grad_()
    joined = torch.cat([rows[owner == e] @ dense[e].t() for e in range(len(counts))])
    gate, up = joined.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate * factors[:, :1]) * (up * factors[:, 1:])
    expected.backward(dy.float())
    assert (y.float() - expected).norm() < 0.01 * expected.norm()
    assert (x.grad.float() - rows.grad).norm() < 0.01 * rows.grad.norm()
