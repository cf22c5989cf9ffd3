"""Convert between the checkpoint's layout and Marlin's FP4 layout, which is given here in closed form.

vLLM repacks the codes ``(N, K/2) uint8`` to int32 ``(K/16, 2N)``. Word ``w = 4i + j`` (``i < 32, j < 4``) of the block
that holds rows ``16t .. 16t+15`` of K and columns ``64b .. 64b+63`` of N has eight nibbles; nibble ``m`` stands, with
``e = (0, 2, 4, 6, 1, 3, 5, 7)[m]``, for

    k = 16t + (2(i%4), 2(i%4) + 1, 2(i%4 + 4), 2(i%4 + 4) + 1)[e % 4]
    n = 64b + 16j + i // 4 + 8 (e // 4)

The block scales ``(N, K/16)`` become ``(K/16, N)``: column ``64b + 8i + 4h + 2a + c`` (``i < 8``; h, a and c are bits)
holds row ``64b + 32h + 16c + 8a + i``. Each is multiplied by ``2^(7 + exponent)`` and stored as the bits 14 to 7 of
that number in half precision: five bits of exponent and three of mantissa, no sign. A product below 2 is stored as
zero, so the format holds scales from ``2^(-6 - exponent)`` on.

All scales of a layer have one exponent. For BF16 activations vLLM takes the largest one that leaves all scales at 448
or below, for half precision zero. The tensor scale that the kernel gets is divided by ``2^exponent``.

vLLM pads N and K with zeros where its kernel needs it, N to a multiple of 64 at least.
"""

import math
from dataclasses import dataclass

import torch

BLOCK = 64  # columns of N that are permuted among themselves; a view can start or end only at a multiple of it


@dataclass(frozen=True)
class MarlinWeight:
    """Hold a weight in Marlin's layout: ``words: (K/16, 2 N') int32`` and ``scales: (K/16, N') uint8``.

    N' is the next multiple of 64 from N on. Both tensors may be columns of a larger weight. ``scale: () fp32`` is the
    tensor scale, one over the checkpoint's divisor. ``exponent`` is that of the block scales.
    """

    words: torch.Tensor
    scales: torch.Tensor
    scale: torch.Tensor
    exponent: int
    N: int
    K: int

    def canonical(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the checkpoint's ``codes: (N, K/2)`` uint8 and ``block_scales: (N, K/16)`` float8_e4m3fn, exactly."""
        return unpack_words(self.words)[: self.N], load_scales(self.scales, self.exponent)[: self.N]


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """Unpack Marlin's words, int32 ``(K/16, 2N)`` with rows of any stride -> ``codes: (N, K/2)`` uint8.

    With the bits of ``e`` written out, nibble ``m = 4 p + 2 q + r`` is column ``2 (i%4 + 4 r) + p`` of row ``16 j + i
    // 4 + 8 q``. So a byte of codes joins a nibble of the word's lower half with one of its upper half.
    """
    steps, N = words.shape[0], words.shape[1] // 2
    halves = words.view(torch.uint8).view(steps, N // BLOCK, 8, 4, 4, 2, 2)  # t, b, i // 4, i % 4, j, p, q
    low, high = halves[..., 0, :], halves[..., 1, :]
    codes = torch.empty(N // BLOCK, 4, 2, 8, steps, 2, 4, dtype=torch.uint8, device=words.device)
    order = (1, 4, 5, 2, 0, 3)  # b, j, q, i // 4, t, i % 4
    codes[..., 0, :] = ((low & 0x0F) | (high << 4)).permute(order)
    codes[..., 1, :] = ((low >> 4) | (high & 0xF0)).permute(order)
    return codes.view(N, 8 * steps)


def load_scales(stored: torch.Tensor, exponent: int) -> torch.Tensor:
    """Restore Marlin's scales, uint8 ``(K/16, N)`` with rows of any stride -> ``(N, K/16)`` float8_e4m3fn."""
    groups, N = stored.shape
    stored = stored.view(groups, N // BLOCK, 8, 2, 2, 2).permute(1, 3, 5, 4, 2, 0).reshape(N, groups)
    # Every E4M3 number but zero is normal in half precision, so the power of two is subtracted from the exponent bits.
    bits = ((stored.to(torch.int16) << 7) - ((7 + exponent) << 10)).clamp_(min=0)
    return bits.view(torch.float16).to(torch.float8_e4m3fn)


def scale_exponent(block_scales: torch.Tensor, stored: torch.Tensor) -> int | None:
    """Return the exponent with which ``stored: (K/16, N)`` was made of ``block_scales: (N, K/16)`` float8_e4m3fn.

    Returns None if no exponent gives all scales back: one was lost, or ``stored`` has another layout. Waits for the
    device.
    """
    largest = float(block_scales.float().amax())
    kept = float((stored.amax().to(torch.int16) << 7).view(torch.float16))
    exponent = max(0, math.frexp(kept)[1] - math.frexp(largest)[1] - 7)
    same = torch.equal(load_scales(stored, exponent).view(torch.uint8), block_scales.view(torch.uint8))
    return exponent if same else None
