"""Marlin's FP4 layout in closed form: where each code and block scale of the canonical layout lies.

vLLM repacks the codes ``(N, K/2) uint8`` to int32 ``(K/16, 2N)``. Word ``w = 4i + j`` (``i < 32, j < 4``) of the block
that holds rows ``16t .. 16t+15`` of K and columns ``64b .. 64b+63`` of N has eight nibbles; nibble ``m`` stands, with
``e = (0, 2, 4, 6, 1, 3, 5, 7)[m]``, for

    k = 16t + (2(i%4), 2(i%4) + 1, 2(i%4 + 4), 2(i%4 + 4) + 1)[e % 4]
    n = 64b + 16j + i // 4 + 8 (e // 4)

The block scales ``(N, K/16)`` become ``(K/16, N)``, permuted within 64 columns and stored as the high byte of a
half-precision number (a sign bit less, an exponent bit more than E4M3), after multiplication by a power of two.
"""

from functools import lru_cache

import torch

from qerl_kernels.nvfp4 import pack, unpack

_NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@lru_cache
def _coordinates() -> tuple[torch.Tensor, torch.Tensor]:
    """(k, n) within a 16 x 64 block of every nibble: both (128, 8)."""
    word = torch.arange(128).unsqueeze(1)
    i, j = word // 4, word % 4
    e = torch.tensor(_NIBBLE_ORDER)
    low = 2 * (i % 4)
    k = torch.stack([low, low + 1, low + 8, low + 9], dim=-1).squeeze(1)[:, e % 4]  # (128, 8)
    n = 16 * j + i // 4 + 8 * (e // 4)
    return k, n


def repack(codes: torch.Tensor) -> torch.Tensor:
    """``codes: (N, K/2)`` uint8 -> Marlin's words, int32 ``(K/16, 2N)``; N a multiple of 64, K of 16."""
    nibbles = unpack(codes)  # (N, K)
    N, K = nibbles.shape
    blocks = nibbles.view(N // 64, 64, K // 16, 16).permute(2, 0, 3, 1)  # (K/16, N/64, k, n)
    k, n = _coordinates()
    words = blocks[:, :, k.to(codes.device), n.to(codes.device)].long()  # (K/16, N/64, 128, 8)
    shifts = 4 * torch.arange(8, device=codes.device)
    packed = (words << shifts).sum(dim=-1)  # unsigned 32 bits in an int64
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).view(K // 16, 2 * N)


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse of ``repack``: int32 ``(K/16, 2N)`` -> ``codes: (N, K/2)``."""
    tiles, twice_N = words.shape
    N = twice_N // 2
    shifts = 4 * torch.arange(8, device=words.device)
    nibbles = (words.view(tiles, N // 64, 128, 1) >> shifts) & 0xF  # (K/16, N/64, 128, 8)
    blocks = torch.empty(tiles, N // 64, 16, 64, dtype=torch.uint8, device=words.device)
    k, n = _coordinates()
    blocks[:, :, k.to(words.device), n.to(words.device)] = nibbles.to(torch.uint8)
    return pack(blocks.permute(1, 3, 0, 2).reshape(N, tiles * 16))
