"""Define the NVFP4 weight format, its bytes in this one place.

A weight ``w: (N, K)`` is stored as

* ``codes: (N, K/2) uint8``            two E2M1 codes a byte, the even column in the low nibble,
* ``block_scales: (N, K/16) float8_e4m3fn``  one scale for 16 neighbouring columns,
* ``divisor: () float32``              the tensor scale, kept as compressed-tensors keeps it: as a divisor,

and stands for ``w[n, k] = value(code[n, k]) * block_scale[n, k // 16] / divisor``. A code is ``s e e m``: a sign bit
and an index into 0, 0.5, 1, 1.5, 2, 3, 4, 6.

The product ``value(code) * block_scale`` has at most 2 + 4 significant bits and an exponent between 2^-10 and 2^12, so
it is exact in BF16. That product, without the tensor scale, is the operand that trainer and engine share bit for bit.
``1 / divisor`` is applied in fp32 to the result of the matrix product.

On disk the layout is compressed-tensors' ``nvfp4-pack-quantized``, whose tensors are ``weight_packed``,
``weight_scale`` and ``weight_global_scale``.
"""

import functools
from dataclasses import dataclass

import torch

GROUP_SIZE = 16
CODE_MAX = 6.0  # largest E2M1 value
SCALE_MAX = 448.0  # largest E4M3 value
ZERO_BLOCK_SCALE = 0.125  # written where a block's scale rounds to zero; its codes are zero at any scale

# values of a code's low three bits; bit 3 is the sign
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class NVFP4Weight:
    """Hold one packed weight: ``codes: (N, K/2)``, ``block_scales: (N, K/16)``, ``divisor: ()``."""

    codes: torch.Tensor
    block_scales: torch.Tensor
    divisor: torch.Tensor


def divisor_from_amax(amax: torch.Tensor) -> torch.Tensor:
    """Return the tensor divisor 2688 / amax, computed in the dtype of ``amax`` as llmcompressor does.

    A weight that is zero, or so small that the quotient overflows, gets 1, so that no infinity is written.
    """
    divisor = (SCALE_MAX * CODE_MAX / amax).float()
    return torch.where(torch.isfinite(divisor), divisor, torch.ones_like(divisor)).reshape(())


def round_to_codes(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E2M1 code, ties to the even code: ``x`` of any shape -> uint8 of that shape.

    A negative number that rounds to zero keeps its sign (code 8); -0 itself gets code 0.
    """
    a = x.abs().float()
    # The values lie on three straight pieces with steps of 0.5, 1 and 2; each term is the index on one of them. Outside
    # its own piece a term is too large, so the least is right. torch.round takes a tie to the even integer, which is
    # also the even index.
    index = torch.minimum((a * 2).round_(), a.round().add_(2))
    index = torch.minimum(index, (a * 0.5).round_().add_(4)).clamp_(max=7)
    return index.to(torch.uint8) | ((x < 0).to(torch.uint8) << 3)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack ``codes: (..., K)`` two a byte -> ``(..., K/2)``, the even column in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """Unpack ``codes: (..., K/2)`` -> one code a byte, ``(..., K)``."""
    return torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)


def quantize(w: torch.Tensor, divisor: torch.Tensor | None = None) -> NVFP4Weight:
    """Round ``w: (N, K)`` to the nearest NVFP4 weight.

    ``divisor`` is given where several weights share one (q/k/v, gate/up); by default it comes from this weight alone.
    For BF16 sources the result is bit-equal to llmcompressor's NVFP4A16: amax/6 is rounded to BF16 before it is
    multiplied by the divisor in fp32.

    Raises ValueError if K is not a multiple of 16.
    """
    if w.is_cuda:  # torch multiplies by the reciprocal there, which rounds differently; the kernel gives the CPU's bits
        from qerl_kernels import nvfp4_triton

        return nvfp4_triton.quantize(w, divisor)
    N, K = w.shape
    if K % GROUP_SIZE:
        raise ValueError(f"a weight of shape {tuple(w.shape)} has {K} columns; NVFP4 needs a multiple of {GROUP_SIZE}")
    if divisor is None:
        divisor = divisor_from_amax(w.abs().amax())
    amax = w.reshape(N, K // GROUP_SIZE, GROUP_SIZE).abs().amax(dim=-1)  # (N, K/16)
    block_scales = ((amax / CODE_MAX).float() * divisor).clamp(max=SCALE_MAX).to(torch.float8_e4m3fn).float()
    block_scales = torch.where(block_scales == 0, ZERO_BLOCK_SCALE, block_scales).to(torch.float8_e4m3fn)
    return NVFP4Weight(encode(w, block_scales, divisor), block_scales, divisor)


def encode(w: torch.Tensor, block_scales: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Return the packed codes nearest to ``w: (N, K)`` for non-zero ``block_scales: (N, K/16)`` -> (N, K/2) uint8."""
    N, K = w.shape
    step = (block_scales.float() / divisor).unsqueeze(-1)  # (N, K/16, 1)
    return pack(round_to_codes(w.reshape(N, K // GROUP_SIZE, GROUP_SIZE).float() / step).view(N, K))


def dequantize(codes: torch.Tensor, block_scales: torch.Tensor) -> torch.Tensor:
    """Expand the exact BF16 operand ``value(code) * block_scale`` -> (N, K) bfloat16.

    The tensor scale is not applied.
    """
    N, half = codes.shape
    pairs = _byte_values().to(codes.device)[codes.int()]  # (N, K/2, 2): the two columns of a byte
    blocks = pairs.view(N, 2 * half // GROUP_SIZE, GROUP_SIZE)
    return (blocks * block_scales.to(torch.bfloat16).unsqueeze(-1)).view(N, 2 * half)


def expanded_factor(dtype: torch.dtype) -> float:
    """Return the factor of the operand where it is expanded in ``dtype`` for a library's product: 2^-14 in float16.

    It is exact, as the operand is a multiple of 2^-10 and float16 has steps of 2^-24. cuBLAS may add up the parts of a
    float16 sum in float16 and apply the tensor scale later. Sums of the operand itself are thousands of times as large
    as those of the weight, and would become infinite.
    """
    return 2.0**-14 if dtype == torch.float16 else 1.0


@functools.cache
def _byte_values() -> torch.Tensor:
    """Return both values of each of the 256 bytes: (256, 2) bfloat16, on the CPU.

    No copy is kept on a GPU: one first made while a model loads would lie in memory that vLLM's sleep mode takes away.
    """
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.bfloat16, device="cpu")
    return values[unpack(torch.arange(256, dtype=torch.uint8, device="cpu").unsqueeze(-1)).long()]
