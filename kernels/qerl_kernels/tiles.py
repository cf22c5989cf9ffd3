"""Store NVFP4 weights in the order in which Hopper's matrix unit reads them.

A weight ``(N, K)`` is cut into tiles of 64 rows and 64 columns, stored ``(ceil(N/64), 2 ceil(K/128), 2304) uint8``;
what lies beyond N and K is zero. A tile has 2048 bytes of codes, then 256 bytes of block scales.

**Codes.** Thread ``t = 32 w + 4 g + c`` of a warpgroup owns 16 bytes: four 32-bit words, one for each 16 columns
``j``. A word holds the eight codes of the thread's part of the m64k16 operand: rows ``16 w + g`` (h = 0) and
``16 w + g + 8`` (h = 1), columns ``16 j + 2 c + 8 e`` and the next one. The pair ``p = h + 2 e`` of neighbouring
columns becomes one register of two numbers.

For BF16 a code goes to the sign bit and the bits 8 to 6 of its half, where it is the number ``code * 2^-126``. For FP16
it goes to the sign bit and the bits 11 to 9, where it is ``code * 2^-14``. The bits are spread in the word so that few
instructions put them there. Each type has its own order (``ORDERS``)::

    BF16  p = 0, 1, 2:  (word << 3 p) & 0x81C081C0
          p = 3:        (word << 1 & 0x80008000) | (word >> 3 & 0x01800180) | (word >> 7 & 0x00400040)
    FP16  p = 0, 1:     (word << 3 p) & 0x8E008E00
          p = 2:        (word << 1 & 0x80008000) | (word << 6 & 0x0E000E00)
          p = 3:        (word << 2 & 0x80008000) | (word << 9 & 0x0E000E00)

**Block scales.** The E4M3 byte is rewritten, without loss, as five bits of exponent and three of mantissa, in which
E4M3's subnormal numbers are normal ones. Then ``(byte << 4) + 0x7600`` is ``scale * 2^119`` in BF16, and
``(byte << 7) + 0x3000`` is ``scale * 2^7`` in FP16. The product with the code is exact: ``code * scale * 2^-7``, in
FP16 between 2^-17, a subnormal number, and 21. The end of the kernel multiplies by 2^7.

A block of scale zero is stored with codes zero, a negative scale as a positive one with the codes' signs flipped. Each
(w, g) has 8 bytes; the scale of (j, h) is byte ``4 (j // 2) + 2 h + j % 2`` of them.

``decode.cuh`` takes the same integer steps; here they are in plain torch, for the CPU and for the proofs.
"""

import functools
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch

from qerl_kernels import nvfp4

TILE = 64
TILE_BYTES = 2304
CODE_BYTES = 2048
COUNTERS = 1024  # one for each thread block that runs at one time; no GPU has so many multiprocessors
CHUNK_ROWS = 4096  # rows that are rearranged at a time, so that the temporaries stay small


class Order(NamedTuple):
    """Say how a word and a stored scale become numbers of one type.

    A number is ``sign << 15 | magnitude of the code << lowest``. Each of a pair's ``steps`` is a shift to the left (to
    the right where negative) and a mask of the word; joined they give the pair's numbers. A stored scale becomes
    ``(byte << scale_shift) + scale_base``.
    """

    lowest: int
    steps: tuple[tuple[tuple[int, int], ...], ...]
    scale_shift: int
    scale_base: int


ORDERS = {
    torch.bfloat16: Order(
        6,
        (
            ((0, 0x81C081C0),),
            ((3, 0x81C081C0),),
            ((6, 0x81C081C0),),
            ((1, 0x80008000), (-3, 0x01800180), (-7, 0x00400040)),
        ),
        4,
        0x7600,
    ),
    torch.float16: Order(
        9,
        (
            ((0, 0x8E008E00),),
            ((3, 0x8E008E00),),
            ((1, 0x80008000), (6, 0x0E000E00)),
            ((2, 0x80008000), (9, 0x0E000E00)),
        ),
        7,
        0x3000,
    ),
}


@dataclass(frozen=True)
class TiledWeight:
    """Hold ``tiles: (ceil(N/64), 2 ceil(K/128), 2304) uint8``, ``row_scale: (N,) fp32`` and the kernel's ``counters``.

    ``counters`` are zero between calls. Two CUDA graphs that hold one weight may not run at the same time (see
    ``counters.py``). ``scale: () fp32`` on the CPU is the row scale where all rows have the same one, else None. It is
    a tensor and not a number, so that torch.compile shares one code among a model's layers.

    ``operand`` is the type, bfloat16 or float16, in whose order the codes lie: on a GPU that of the activations. With
    ``fixed_order`` a token's sums are added up in one order, whatever other tokens there are.
    """

    tiles: torch.Tensor
    row_scale: torch.Tensor
    counters: torch.Tensor
    N: int
    K: int
    scale: torch.Tensor | None = None
    operand: torch.dtype = torch.bfloat16
    fixed_order: bool = False


def tile_weight(
    codes: torch.Tensor,
    block_scales: torch.Tensor,
    row_scale: torch.Tensor,
    operand: torch.dtype = torch.bfloat16,
) -> TiledWeight:
    """Rearrange ``codes: (N, K/2)``, ``block_scales: (N, K/16)`` with ``row_scale: () or (N,)`` fp32 tensor scales.

    Waits for the GPU. Raises ValueError if N is not a multiple of 16, a block scale is not a number, or ``operand`` has
    no order.
    """
    order_of(operand)
    N, K = codes.shape[0], 2 * codes.shape[1]
    if N % 16:
        raise ValueError(f"a weight of shape ({N}, {K}) has {N} rows; the tiled layout needs a multiple of 16")
    if torch.isnan(block_scales.float()).any():
        raise ValueError(
            f"a weight of shape ({N}, {K}) has block scales that are not numbers; the checkpoint is damaged"
        )
    tiles = torch.cat(
        [_tiles(codes[n : n + CHUNK_ROWS], block_scales[n : n + CHUNK_ROWS], operand) for n in range(0, N, CHUNK_ROWS)]
    )
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=codes.device)
    row_scale = row_scale.float().expand(N).clone()
    if codes.is_cuda:  # the product may fetch weights before the kernels ahead of it have written them
        torch.cuda.synchronize(codes.device)
    return TiledWeight(tiles, row_scale, counters, N, K, common_scale(row_scale), operand)


def order_of(operand: torch.dtype) -> Order:
    """Return the order of a type; raises ValueError where the tiled layout has none."""
    if operand not in ORDERS:
        raise ValueError(f"tiled NVFP4 weights are multiplied as bfloat16 or float16, not as {operand}")
    return ORDERS[operand]


def common_scale(row_scale: torch.Tensor) -> torch.Tensor | None:
    """Return the row scale that all rows have, () fp32 on the CPU, or None where they differ."""
    return row_scale[0].cpu() if bool((row_scale == row_scale[0]).all()) else None


def _tiles(codes: torch.Tensor, block_scales: torch.Tensor, operand: torch.dtype) -> torch.Tensor:
    N, K = codes.shape[0], 2 * codes.shape[1]
    rows, columns = -(-N // TILE) * TILE, -(-K // (2 * TILE)) * (2 * TILE)
    scale_bytes = block_scales.view(torch.uint8)
    separate = nvfp4.unpack(codes)
    zero = ((scale_bytes & 0x7F) == 0).repeat_interleave(nvfp4.GROUP_SIZE, dim=1)
    flip = (scale_bytes >> 7 << 3).repeat_interleave(nvfp4.GROUP_SIZE, dim=1)
    separate = torch.where(zero, torch.zeros_like(separate), separate ^ flip)
    separate = torch.nn.functional.pad(separate, (0, columns - K, 0, rows - N))
    stored = _stored_scales().to(codes.device)[scale_bytes.int()]
    stored = torch.nn.functional.pad(stored, (0, (columns - K) // nvfp4.GROUP_SIZE, 0, rows - N))

    blocks, k_tiles = rows // TILE, columns // TILE
    # row = 16 w + 8 h + g, column = 16 j + 8 e + 2 c + l
    parts = separate.view(blocks, 4, 2, 8, k_tiles, 4, 2, 4, 2)  # block, w, h, g, k tile, j, e, c, l
    parts = parts.permute(0, 4, 1, 3, 7, 5, 6, 2, 8).reshape(blocks, k_tiles, 128, 4, 4, 2)  # ..., thread, j, p, l
    words = _place(parts, order_of(operand))
    scales = stored.view(blocks, 4, 2, 8, k_tiles, 2, 2)  # block, w, h, g, k tile, j // 2, j % 2
    scales = scales.permute(0, 4, 1, 3, 5, 2, 6).reshape(blocks, k_tiles, TILE_BYTES - CODE_BYTES)
    return torch.cat([words.view(torch.uint8).view(blocks, k_tiles, CODE_BYTES), scales], dim=-1)


def _place(parts: torch.Tensor, order: Order) -> torch.Tensor:
    """Place ``parts: (..., p = 4, l = 2) uint8`` codes in (...) int32 words."""
    parts = parts.int()
    word = torch.zeros(parts.shape[:-2], dtype=torch.int32, device=parts.device)
    for pair in range(4):
        for half in range(2):
            code = parts[..., pair, half]
            number = (code >> 3) << 15 | (code & 7) << order.lowest
            for shift, mask in order.steps[pair]:
                word |= _shifted(number & (mask & 0xFFFF), -shift) << (16 * half)
    return word


def _shifted(word: torch.Tensor, to_the_left: int) -> torch.Tensor:
    return word << to_the_left if to_the_left >= 0 else word >> -to_the_left


def dequantize(tiles: torch.Tensor, N: int, K: int, operand: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Expand the exact operand ``code * block scale`` -> (N, K), inverting ``tile_weight`` in plain torch.

    The row scales are not applied.
    """
    order = order_of(operand)
    blocks, k_tiles = tiles.shape[:2]
    words = tiles[..., :CODE_BYTES].contiguous().view(torch.int32).view(blocks, k_tiles, 4, 8, 4, 4)  # w, g, c, j
    pairs = []
    for steps in order.steps:
        parts = [_shifted(words, shift) & (mask - (1 << 32) if mask >> 31 else mask) for shift, mask in steps]
        pairs.append(reduce(torch.bitwise_or, parts))
    values = torch.stack(pairs, dim=-1).view(operand)  # ..., j, (p = e, h; l): code * 2^-126 or 2^-14
    values = values.view(blocks, k_tiles, 4, 8, 4, 4, 2, 2, 2)  # block, k tile, w, g, c, j, e, h, l
    stored = tiles[..., CODE_BYTES:].reshape(blocks, k_tiles, 4, 8, 2, 2, 2).permute(0, 1, 2, 3, 4, 6, 5)
    stored = stored.reshape(blocks, k_tiles, 4, 8, 4, 2)  # w, g, j, h
    scales = ((stored.int() << order.scale_shift) + order.scale_base).to(torch.int16).view(operand)
    # The product is taken in fp32, since a CPU may flush subnormal numbers of 16 bits.
    w = values.float() * scales.float()[:, :, :, :, None, :, None, :, None] * 128.0
    w = w.permute(0, 2, 7, 3, 1, 5, 6, 4, 8).reshape(blocks * TILE, k_tiles * TILE)
    return w[:N, :K].to(operand)


@functools.cache
def _stored_scales() -> torch.Tensor:
    """Return the stored byte of each E4M3 byte, the exponent plus 10 in the upper five bits: (256,) uint8.

    It is kept on the CPU, as nvfp4's table is.
    """
    table = []
    for byte in range(256):
        exponent, mantissa = (byte & 0x7F) >> 3, byte & 7
        if exponent:
            table.append((exponent + 3) << 3 | mantissa)
        elif mantissa:  # the subnormal number mantissa * 2^-9 becomes normal
            shift = mantissa.bit_length() - 1
            table.append((shift + 1) << 3 | (mantissa << (3 - shift)) & 7)
        else:
            table.append(0)
    return torch.tensor(table, dtype=torch.uint8, device="cpu")
