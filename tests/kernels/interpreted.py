"""Check the Triton kernels with Triton's interpreter on a CPU; test_triton_kernels.py runs all in one process."""

import os
import sys
import traceback

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when a kernel is defined

import torch
from qerl_kernels import (  # noqa: F401
    linear_logprob,
    nvfp4,
    nvfp4_triton,
    rms_norm,
    rms_norm_triton,
    rotate,
    rotate_triton,
    silu_mul,
    silu_mul_triton,
    wide,
    wide_triton,
)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def dequantize_is_exact_for_every_code_and_scale():
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).repeat(254, 1)
    scales = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    w = nvfp4_triton.dequantize(codes, scales[:, None])
    expected = torch.tensor(nvfp4.MAGNITUDES + tuple(-m for m in nvfp4.MAGNITUDES)) * scales.float()[:, None]
    assert torch.equal(w.double(), expected.double())
    assert same_bits(w, nvfp4.dequantize(codes, scales[:, None]))
    codes, scales = codes[:, :3].repeat(1, 8), scales[:, None].repeat(1, 3)  # three blocks per row
    with_room = nvfp4_triton.dequantize(codes, scales, 8)
    assert with_room.shape == (254, 56) and same_bits(with_room[:, :48], nvfp4.dequantize(codes, scales))
    codes, scales = (
        codes[:206].reshape(3, 2 * 824)[:, :1640],
        scales[:206].reshape(3, 206)[:, :205],
    )  # two programs per row
    with_room = nvfp4_triton.dequantize(codes, scales, 8)
    assert same_bits(with_room[:, :-8], nvfp4.dequantize(codes, scales))


def quantize_gives_the_bits_of_the_reference():
    generator = torch.Generator().manual_seed(0)
    for dtype, divisor in ((torch.bfloat16, None), (torch.float16, torch.tensor(7.25)), (torch.float32, None)):
        w = torch.randn(21, 208, generator=generator) * torch.rand(21, 1, generator=generator) ** 6
        w[3, :32], w[0, 5], w[5] = (
            0,
            -0.0,
            w[5] * 1e-4,
        )  # a zero block, a negative zero, and scales that are subnormal or zero
        w = w.to(dtype)
        reference, ours = nvfp4.quantize(w, divisor), nvfp4_triton.quantize(w, divisor)
        assert same_bits(reference.block_scales, ours.block_scales), dtype
        assert same_bits(reference.codes, ours.codes), dtype
    ties = torch.randint(-24, 25, (8, 64), generator=generator).bfloat16() * 0.25
    ties[:, ::16] = 6
    assert same_bits(
        nvfp4.quantize(ties, torch.tensor(448.0)).codes, nvfp4_triton.quantize(ties, torch.tensor(448.0)).codes
    )
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0, 6.0, 1e-40, 5e30])
    edges = torch.cat([edges, torch.nextafter(edges, edges * 0), torch.nextafter(edges, edges * 0 + 9)])
    w = torch.stack([edges, -edges]).flatten()[:, None].repeat(1, 16)
    w[:, 0] = 6  # scale 448 over divisor 448 is 1, so each weight is its own ratio, and 5e30 is far out of range
    assert same_bits(nvfp4.quantize(w, torch.tensor(448.0)).codes, nvfp4_triton.quantize(w, torch.tensor(448.0)).codes)
    w[:, 0], w[:, 1] = 2688, -1e-45  # the ratio is -0, whose code must have no sign
    assert same_bits(nvfp4.quantize(w, torch.tensor(1.0)).codes, nvfp4_triton.quantize(w, torch.tensor(1.0)).codes)


def logprob_kernels_agree_with_torch():
    generator = torch.Generator().manual_seed(0)
    T, V = 3, 2 * linear_logprob.COLUMNS + 77
    logits = torch.randn(T, V, generator=generator) * 4
    targets = torch.tensor([0, V - 1, 5])
    expected, actual = torch.empty(3, T), torch.full((3, T + 2), float("nan"))[:, :T]
    linear_logprob.statistics_torch(logits, targets, 0.7, expected)
    linear_logprob.statistics_triton(logits, targets, 0.7, actual)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    gradients = torch.randn(3, T, generator=generator)
    d_expected, d_actual = torch.empty(T, V), torch.full((T, V), float("nan"))
    linear_logprob.logit_gradients_torch(logits, targets, 0.7, expected[1:], gradients, d_expected)
    linear_logprob.logit_gradients_triton(logits, targets, 0.7, expected[1:], gradients, d_actual)
    torch.testing.assert_close(d_actual, d_expected, rtol=1e-4, atol=1e-7)


def silu_mul_agrees_with_the_reference():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        gate, up, dy = ((4 * torch.randn(2, 1000, generator=generator)).to(dtype) for _ in range(3))
        torch.testing.assert_close(silu_mul_triton.forward(gate, up), torch.ops.qerl.silu_mul(gate, up))
        expected = torch.ops.qerl.silu_mul_backward(dy, gate, up)
        for ours, reference in zip(silu_mul_triton.backward(dy, gate, up), expected, strict=True):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, reference)
        there = dy.clone()
        in_place = silu_mul_triton.backward(there, gate, up, dgate=there)
        assert in_place[0] is there and all(map(torch.equal, in_place, silu_mul_triton.backward(dy, gate, up)))


def wide_operands_are_those_of_the_reference():
    generator = torch.Generator().manual_seed(0)
    for T, K, R in ((2, 1000, 32), (1, 1024, 6), (1, 40, 96)):
        gate, up = (4 * torch.randn(T, K, generator=generator) for _ in range(2))
        expected = wide.widen_silu_mul(gate, up, R)
        ours = torch.full((T, K + 200), float("nan"))[:, : expected.shape[1]]
        wide_triton.silu_mul(gate, up, ours, R)
        torch.testing.assert_close(ours[:, :K], expected[:, :K])
        assert same_bits(ours[:, K + R :], expected[:, K + R :])
    for N, R, r, first, factor, dtype in (
        (37, 96, 32, 64, 0.37, torch.float16),
        (5, 32, 32, 0, 3.0, torch.float32),
        (16, 6, 4, 2, 1e-3, torch.float32),
    ):
        K, (used, room) = 24, wide.columns(R)
        B = torch.randn(N, r, generator=generator)
        for bias in (None, (9 * torch.randn(N, generator=generator)).to(dtype)):
            expected, ours = (torch.full((N, K + room), 7.0, dtype=dtype) for _ in range(2))
            wide.fill(expected[:, : K + used], K, R, first, B, bias, factor)
            wide_triton.fill(ours[:, : K + used], K, R, first, B, bias, factor)
            assert torch.equal(ours, expected) and (ours[:, K + used :] == 7).all()


def scaled_silu_mul_agrees_with_the_reference():
    generator = torch.Generator().manual_seed(0)
    for N in (300, silu_mul_triton.NUMBERS + 76):
        joined, dy = 4 * torch.randn(3, 2 * N, generator=generator), torch.randn(3, N, generator=generator)
        scales = torch.rand(3, 2, generator=generator)
        expected = torch.ops.qerl.scaled_silu_mul(joined, scales)
        torch.testing.assert_close(silu_mul_triton.scaled_forward(joined, scales), expected)
        expected = torch.ops.qerl.scaled_silu_mul_backward(dy, joined, scales)
        torch.testing.assert_close(silu_mul_triton.scaled_backward(dy, joined, scales), expected)


def rotate_agrees_with_the_reference():
    generator = torch.Generator().manual_seed(0)
    for heads, D, dtype in ((3, 12, torch.float32), (1, 64, torch.float32), (2, 16, torch.float16)):
        x = torch.randn(1, 5, heads, D, generator=generator).to(dtype)
        cosine, sine = torch.rand(2, 1, 5, D, generator=generator)
        for back, operator in ((False, torch.ops.qerl.rotate), (True, torch.ops.qerl.rotate_backward)):
            torch.testing.assert_close(rotate_triton.turn(x, cosine, sine, back=back), operator(x, cosine, sine))


def rms_norm_agrees_with_the_reference():
    generator = torch.Generator().manual_seed(0)
    rms_norm_triton.PROGRAMS, rms_norm_triton.PROGRAMS_WITH_W = 4, 3  # the cases below have more rows than programs
    for rows, H, dtype in ((2, 96, torch.float32), (11, 80, torch.float16)):
        x, dy = ((3 * torch.randn(rows, H, generator=generator)).to(dtype) for _ in range(2))
        w = 1 + torch.randn(H, generator=generator)
        for rounded in (False, True):
            y, inverse = rms_norm_triton.forward(x, w, 1e-6, rounded)
            expected_y, expected_inverse = torch.ops.qerl.rms_norm(x, w, 1e-6, rounded)
            torch.testing.assert_close(inverse, expected_inverse)
            torch.testing.assert_close(y, expected_y, rtol=2**-10 if dtype == torch.float16 else 1e-5, atol=1e-5)
            for with_w in (False, True):
                arguments = (dy, x, w, expected_inverse, rounded, with_w)
                for ours, reference in zip(
                    rms_norm_triton.backward(*arguments), torch.ops.qerl.rms_norm_backward(*arguments), strict=True
                ):
                    assert ours.dtype == reference.dtype
                    tolerance = 2**-10 if ours.dtype == torch.float16 else 1e-4
                    torch.testing.assert_close(ours, reference, rtol=tolerance, atol=1e-4)


if __name__ == "__main__":
    for check in sys.argv[1:]:  # run each check even if an earlier one failed
        print(f"== {check}", flush=True)
        try:
            globals()[check]()
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        else:
            print("passed")
