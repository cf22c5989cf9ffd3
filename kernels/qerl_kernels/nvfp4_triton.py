"""Quantize and dequantize on a GPU as ``nvfp4.py`` does, bit for bit, in one pass over memory.

A weight in the checkpoint's layout is a row of blocks without gaps, so both kernels see one dimension. A block has 16
weights, 8 bytes of codes and one scale. The arithmetic is integer and fp32 only, exact or rounded as the reference
rounds, divisions included. So Triton's interpreter runs the same code on a CPU.

A code placed at fp32's bits [31 | 24:22] is ``code * 2^-126``, and an E4M3 byte at bits [26:20] is ``scale * 2^-120``,
subnormal ones included. Dequantizing multiplies the two and the powers of two that remain, exactly.
"""

import torch
import triton
import triton.language as tl

from qerl_kernels.nvfp4 import GROUP_SIZE, NVFP4Weight, divisor_from_amax

BLOCKS = 512  # blocks that one program expands
BLOCKS_TO_QUANTIZE = 256  # blocks that one program quantizes, in 64 registers a thread on Hopper; 512 take 128
BLOCKS_OF_A_ROW = 128  # blocks that one program expands where rows lie apart; rows have 224 to 1728 of them


@triton.jit
def _dequantize_kernel(codes, scales, w, per_row, stride, BLOCKS: tl.constexpr):
    """Expand 8 bytes of codes to 8 words of two BF16 numbers; the even column is the low half of its word.

    Rows of ``per_row`` blocks lie ``stride`` words apart. A program has BLOCKS blocks of one row, so that no number
    needs a division to find its row.
    """
    pieces = tl.cdiv(per_row, BLOCKS)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    first = row * per_row + piece.to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)[:, None]
    at = block * 8 + tl.arange(0, 8)[None, :]
    inside = block < per_row - piece * BLOCKS
    byte = tl.load(codes + first * 8 + at, mask=inside, other=0).to(tl.int32)
    scale = (tl.load(scales + first + block, mask=inside, other=0).to(tl.int32) << 20).to(tl.uint32)
    sign = (scale & 0x08000000) << 4  # a good checkpoint has no negative scale, but the reference keeps its sign
    scale = ((scale & 0x07F00000) | sign).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    scale = scale * 3.32306998946229e35  # 2^118
    even = (((byte & 0x7) << 22) | ((byte & 0x8) << 28)).to(tl.float32, bitcast=True) * scale * 256.0
    odd = (((byte & 0x70) << 18) | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True) * scale * 256.0
    low = even.to(tl.uint32, bitcast=True) >> 16
    high = odd.to(tl.uint32, bitcast=True) & 0xFFFF0000
    to = w + row * stride + piece.to(tl.int64) * BLOCKS * 8
    tl.store(to + at, (low | high).to(tl.int32, bitcast=True), mask=inside)


def dequantize(codes: torch.Tensor, block_scales: torch.Tensor, room: int = 0) -> torch.Tensor:
    """Expand the exact BF16 operand ``value(code) * block_scale`` -> (N, K + room) bfloat16.

    The first K columns are those of ``nvfp4.dequantize``. The last ``room``, an even number, are not written.
    """
    N, half = codes.shape
    codes, block_scales = codes.contiguous(), block_scales.contiguous()
    w = torch.empty(N, 2 * half + room, dtype=torch.bfloat16, device=codes.device)
    if codes.numel():
        # Without room all blocks form one row.
        rows, per_row, blocks = (N, half // 8, BLOCKS_OF_A_ROW) if room else (1, block_scales.numel(), BLOCKS)
        grid = (rows * triton.cdiv(per_row, blocks),)
        with torch.cuda.device_of(codes):
            tensors = codes, block_scales.view(torch.uint8), w.view(torch.int32)
            _dequantize_kernel[grid](*tensors, per_row, half + room // 2, BLOCKS=blocks)
    return w


@triton.jit
def _round_to_e4m3(x):
    """Return the nearest E4M3 byte of 0 <= x <= 448, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((x * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)  # adding 1.5 * 2^23 rounds to an integer
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def _e4m3_value(byte):
    """Return the fp32 value of an E4M3 byte whose sign bit is zero."""
    normal = ((byte << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _round_to_code(a):
    """Return the code of ``a`` >= 0 as nvfp4.round_to_codes does.

    1.5 * 2^22, 2^23 and 2^24 have steps of 0.5, 1 and 2, so the bits of a sum count the steps. The least of the three
    counts is right.
    """
    halves = (a + 6291456.0).to(tl.int32, bitcast=True) - 0x4AC00000
    ones = (a + 12582912.0).to(tl.int32, bitcast=True) - (0x4B400000 - 2)
    twos = (a + 25165824.0).to(tl.int32, bitcast=True) - (0x4BC00000 - 4)
    return tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 7))


@triton.jit
def _quantize_kernel(w, divisor, codes, scales, count, BLOCKS: tl.constexpr):
    """Quantize blocks of 16 weights to 8 bytes of codes and one scale."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < count
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    stored = tl.load(w + at, mask=inside[:, None], other=0.0)
    x = stored.to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)
    by_divisor = tl.load(divisor)
    sixth = tl.div_rn(amax, tl.full([BLOCKS], 6.0, tl.float32))
    if stored.dtype == tl.bfloat16:  # rounded in integers, since Triton's interpreter truncates where a GPU rounds
        bits = sixth.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        sixth = bits.to(tl.float32, bitcast=True)
    else:
        sixth = sixth.to(stored.dtype).to(tl.float32)
    scale = _round_to_e4m3(tl.minimum(sixth * by_divisor, 448.0))
    scale = tl.where(scale == 0, 0x20, scale)  # 0.125: nvfp4.ZERO_BLOCK_SCALE
    step = tl.div_rn(_e4m3_value(scale), tl.zeros([BLOCKS], tl.float32) + by_divisor)
    ratio = tl.div_rn(x, tl.broadcast_to(step[:, None], [BLOCKS, 16]))
    code = _round_to_code(tl.abs(ratio)) | tl.where(ratio < 0, 8, 0)
    even, odd = tl.split(tl.reshape(code, [BLOCKS, 8, 2]))
    bytes_at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(codes + bytes_at, (even | (odd << 4)).to(tl.uint8), mask=inside[:, None])
    tl.store(scales + block, scale.to(tl.uint8), mask=inside)


def quantize(w: torch.Tensor, divisor: torch.Tensor | None = None) -> NVFP4Weight:
    """Round ``w: (N, K)`` bfloat16, float16 or float32 to the nearest NVFP4 weight, as ``nvfp4.quantize`` does.

    ``divisor: ()`` fp32 is given where several weights share one; by default it comes from this weight alone.
    Raises ValueError if K is not a multiple of 16.
    """
    N, K = w.shape
    if K % GROUP_SIZE:
        raise ValueError(f"a weight of shape {tuple(w.shape)} has {K} columns; NVFP4 needs a multiple of {GROUP_SIZE}")
    if divisor is None:
        divisor = divisor_from_amax(w.abs().amax())
    w = w.contiguous()
    codes = torch.empty(N, K // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(N, K // GROUP_SIZE, dtype=torch.uint8, device=w.device)
    count = scales.numel()
    if count:
        with torch.cuda.device_of(w):
            grid = (triton.cdiv(count, BLOCKS_TO_QUANTIZE),)
            _quantize_kernel[grid](w, divisor, codes, scales, count, BLOCKS=BLOCKS_TO_QUANTIZE)
    return NVFP4Weight(codes, scales.view(torch.float8_e4m3fn), divisor)
