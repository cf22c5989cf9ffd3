"""Choose block scales for the smallest squared error, instead of amax / 6.

With amax / 6 the largest value of a block is exact, at the expense of the others. A few neighbouring E4M3 numbers are
tried for each block. Larger ones, up to 1.5 times, make the largest value fall on 4, where the steps are finer. Smaller
ones clip the largest value and give the rest finer steps.

The first candidate is amax / 6 itself, and another wins only with a strictly smaller error. So no block, and no layer,
gets worse. Format and tensor scale stay as they are.
"""

import torch

from qerl_kernels.nvfp4 import GROUP_SIZE, NVFP4Weight, dequantize, encode, quantize

# Candidates are steps on the E4M3 number line: 8 steps double the scale, and byte 0x7E is 448, the largest.
CANDIDATES = (0, -1, 1, -2, 2, -3, 3, 4, 5)
SMALLEST, LARGEST = 0x01, 0x7E


def quantize_mse(w: torch.Tensor, divisor: torch.Tensor | None = None) -> NVFP4Weight:
    """Quantize like ``nvfp4.quantize``, but search each block's scale for the smallest squared error.

    ``w: (N, K)``, ``divisor: ()`` shared by fused weights or None. Raises ValueError if K is not a multiple of 16.
    """
    start = quantize(w, divisor)
    first = start.block_scales.view(torch.uint8)
    best, smallest = start, None
    for candidate in CANDIDATES:
        scale_bytes = (first.to(torch.int16) + candidate).clamp(SMALLEST, LARGEST).to(torch.uint8)
        block_scales = scale_bytes.view(torch.float8_e4m3fn)
        trial = NVFP4Weight(encode(w, block_scales, start.divisor), block_scales, start.divisor)
        error = _block_errors(w, trial)
        if smallest is None:
            best, smallest = trial, error
            continue
        better = error < smallest  # (N, K/16)
        smallest = torch.where(better, error, smallest)
        best = _choose(better, trial, best)
    return best


def _block_errors(w: torch.Tensor, weight: NVFP4Weight) -> torch.Tensor:
    """Return the squared error of each block, fp32: (N, K/16)."""
    difference = w.float() - dequantize(weight.codes, weight.block_scales).float() / weight.divisor
    return difference.square().view(w.shape[0], -1, GROUP_SIZE).sum(dim=-1)


def _choose(which: torch.Tensor, one: NVFP4Weight, other: NVFP4Weight) -> NVFP4Weight:
    """Take blocks of ``one`` where ``which: (N, K/16)`` is true, and of ``other`` elsewhere."""
    scales = torch.where(which, one.block_scales.view(torch.uint8), other.block_scales.view(torch.uint8))
    codes = torch.where(which.repeat_interleave(GROUP_SIZE // 2, dim=1), one.codes, other.codes)
    return NVFP4Weight(codes, scales.view(torch.float8_e4m3fn), one.divisor)
