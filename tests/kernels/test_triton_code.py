"""Compile the Triton kernels for an H100 on a CPU, with the trainer's arguments, and inspect their machine code without
running it.

The tests check how many bytes a thread loads and stores at once. They also check that no address needs a 64-bit
division and that none is computed in 32 bits.
"""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
from qerl_kernels import (  # noqa: E402
    linear_logprob,
    nvfp4_triton,
    rms_norm_triton,
    rotate_triton,
    silu_mul_triton,
    wide,
    wide_triton,
)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

pytestmark = [
    pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton compiles for no NVIDIA GPU"),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton's interpreter compiles nothing"),
]


class Hopper:
    """Answer what Triton asks a driver before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return "an H100 that is not there"  # Triton's cache key: nothing compiled here may be taken for a real GPU's.

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def code(monkeypatch):
    """Return a function that maps each kernel a call would launch to its code by stages, without launching it."""
    compiled = {}
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        assert compiled.setdefault(self.fn.__name__, kernel.asm)["ptx"] == kernel.asm["ptx"]
        return kernel

    def of(call, *arguments):
        compiled.clear()
        call(*arguments)
        assert compiled
        return dict(compiled)

    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    return of


def bytes_at_once(ptx):
    """Return the sizes in bytes of the loads and of the stores in global memory."""
    found = re.findall(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    assert len(found) == len(re.findall(r"\b(?:ld|st)\.global", ptx))
    sizes = {way: {int(n or 1) * int(bits) // 8 for which, n, bits in found if which == way} for way in ("ld", "st")}
    return sizes["ld"], sizes["st"]


def numbers(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)


def fp32(*shape):
    return numbers(*shape, dtype=torch.float32)


def dequantize(K, room):
    codes, scales = (numbers(64, K // n, dtype=torch.uint8) for n in (2, 16))
    nvfp4_triton.dequantize(codes, scales.view(torch.float8_e4m3fn), room)


def silu_mul(N):
    silu_mul_triton.forward(numbers(64, N), numbers(64, N))
    silu_mul_triton.backward(*(numbers(64, N) for _ in range(3)))


def scaled_silu_mul(N):
    silu_mul_triton.scaled_forward(numbers(64, 2 * N), fp32(64, 2))
    silu_mul_triton.scaled_backward(numbers(64, N), numbers(64, 2 * N), fp32(64, 2))


def fill(K, R, with_bias):
    used, room = wide.columns(R)
    bias = numbers(64) if with_bias else None
    wide_triton.fill(numbers(64, K + room)[:, : K + used], K, R, 0, fp32(64, 32), bias, 0.37)


def rotate(heads, D):
    rotate_triton.turn(numbers(1, 64, heads, D), fp32(1, 64, D), fp32(1, 64, D), back=False)


def rms_norm(H):
    rms_norm_triton.forward(numbers(64, H), fp32(H), 1e-6, False)
    rms_norm_triton.backward(numbers(64, H), numbers(64, H), fp32(H), fp32(64), False, True)


def logprob(V):
    logits, targets, out = fp32(882, V), numbers(882, dtype=torch.int64), fp32(3, 8192)[:, :882]
    linear_logprob.statistics_triton(logits, targets, 1.25, out)
    linear_logprob.logit_gradients_triton(logits, targets, 1.25, out[1:], fp32(3, 882), numbers(882, V))


def fused(K):
    wide_triton.silu_mul(numbers(64, K), numbers(64, K), numbers(64, K + 64)[:, : K + wide.columns(32)[0]], 32)


def quantize(K):
    nvfp4_triton.quantize(numbers(64, K), torch.tensor(1.0))


BOTH = {"_forward_kernel": ({16}, {16}), "_backward_kernel": ({16}, {16})}
SCALED = {f"_scaled{name}": ({4, 16}, {16}) for name in BOTH}  # a row's two scales are scalar loads
NORM = {"_forward_kernel": ({16}, {4, 16}), "_backward_kernel": ({4, 16}, {16})}  # 1 / rms is one scalar per row
LOGPROB = {"_statistics_kernel": ({4, 8, 16}, {4}), "_logit_gradients_kernel": ({4, 8, 16}, {16})}
CASES = [
    # 8 bytes of codes and one byte of scale become 32 bytes.
    (dequantize, (3584, 0), {"_dequantize_kernel": ({4, 8}, {16})}),
    (dequantize, (3584, 64), {"_dequantize_kernel": ({1, 8}, {16})}),
    (dequantize, (576, 64), {"_dequantize_kernel": ({1, 8}, {16})}),
    (quantize, (3584,), {"_quantize_kernel": ({4, 16}, {2, 8})}),
    (silu_mul, (18944,), BOTH),
    (scaled_silu_mul, (768,), SCALED),
    (fused, (18944,), {"_silu_mul_kernel": ({16}, {16})}),
    (fused, (1536,), {"_silu_mul_kernel": ({16}, {16})}),
    (fill, (3584, 96, True), {"_fill_kernel": ({2, 16}, {16})}),  # the bias is one scalar per row
    (fill, (576, 32, False), {"_fill_kernel": ({16}, {16})}),
    (rotate, (28, 128), {"_kernel": ({16}, {16})}),
    (rotate, (4, 128), {"_kernel": ({8, 16}, {16})}),  # the angles are loaded 8 bytes at once
    (rotate, (9, 64), {"_kernel": ({16}, {16})}),
    (rms_norm, (3584,), NORM),
    (rms_norm, (576,), NORM),
    (logprob, (152064,), LOGPROB),
]


def counted_in_32_bits(ttir):
    """Return the lines that multiply the program's or row's number, or add it to a pointer, before it is widened to 64
    bits.

    The remainder of a division by the programs per row is ignored, since it stays below the row's length.
    """
    names = set(re.findall(r"(%\S+) = tt\.get_program_id", ttir))
    assert names
    found = []
    for line in ttir.splitlines():
        read = set(re.findall(r"%[\w#]+", line.partition(" = ")[2]))
        if names & read and (step := re.search(r"(%\S+) = arith\.divsi", line)):
            names.add(step[1])
        elif names & read and re.search(r"= (arith\.(muli|addi)|tt\.(addptr|splat))", line):
            found.append(line.strip())
    return found


@pytest.mark.parametrize(("call", "sizes", "expected"), CASES, ids=lambda part: getattr(part, "__name__", None))
def test_a_thread_loads_16_bytes_at_once_of_tensors_of_any_size(code, call, sizes, expected):
    """A tensor may have more numbers than 32 bits count: an embedding of 262144 words by 8192, or logits of 16384
    tokens by 152064."""
    kernels = code(call, *sizes)
    assert {name: bytes_at_once(asm["ptx"]) for name, asm in kernels.items()} == expected
    for asm in kernels.values():
        assert not re.search(r"\b(div|rem)\.[su]64", asm["ptx"])
        assert call in (rms_norm, logprob) or counted_in_32_bits(asm["ttir"]) == []


@triton.jit
def _narrow(x, N, NUMBERS: triton.language.constexpr):
    row = triton.language.program_id(0) // 2
    triton.language.store(x + row * N + triton.language.arange(0, NUMBERS), 0)


def narrow():
    _narrow[(4,)](numbers(4, 64), 64, NUMBERS=64)


def test_a_place_that_is_counted_in_32_bits_is_seen(code):
    assert "arith.muli" in counted_in_32_bits(code(narrow)["_narrow"]["ttir"])[0]


def test_a_row_that_is_not_a_multiple_of_16_bytes_is_seen(code):
    assert bytes_at_once(code(fused, 1004)["_silu_mul_kernel"]["ptx"]) == ({2}, {2})
