"""The operands of an adapted frozen layer whose output is one product: y = factor * [x s 1 1 0] [W0 B b0 b1 0]^T.

``x: (T, K)``, ``s: (T, R)`` of all adapters that read x. B, (N, r) over the factor, stands in the r of these columns
that belong to it; b0 and b1 are the bias over the factor, rounded, and what that lost, rounded. Rows start 128 bytes
apart, or as near as K lets them.
"""

import torch

from qerl_kernels.silu_mul import silu_mul


def columns(R: int) -> tuple[int, int]:
    """Numbers behind the K of a row: those that the product reads, a multiple of 8, and those that are allocated."""
    used, room = (-(-(R + 2) // n) * n for n in (8, 64))
    return used, room


def _empty(like: torch.Tensor, T: int, K: int, R: int) -> torch.Tensor:
    used, room = columns(R)
    return like.new_empty(T, K + room)[:, : K + used]


def widen(x: torch.Tensor, R: int) -> torch.Tensor:
    """``x: (T, K)`` -> (T, K + used): x, R columns that are to be written, ones and zeros."""
    T, K = x.shape
    wide = _empty(x, T, K, R)
    wide[:, :K], wide[:, K + R : K + R + 2], wide[:, K + R + 2 :] = x, 1, 0
    return wide


def widen_silu_mul(gate: torch.Tensor, up: torch.Tensor, R: int) -> torch.Tensor:
    """``widen`` of silu(gate) * up, (T, K) each, computed in fp32 and rounded once; not differentiable."""
    T, K = gate.shape
    if gate.is_cuda:
        from qerl_kernels import wide_triton  # only here: a CPU needs no Triton

        wide = _empty(gate, T, K, R)
        wide_triton.silu_mul(gate.contiguous(), up.contiguous(), wide, R)
        return wide
    return widen(silu_mul(gate, up), R)


def fill(
    w: torch.Tensor, K: int, R: int, first: int, B: torch.Tensor, bias: torch.Tensor | None, factor: float
) -> None:
    """Write what stands behind W0 in ``w: (N, K + used)``: ``B: (N, r)`` from column K + ``first`` on, and the bias
    ``(N,)``, over ``factor``. Its rows may lie apart."""
    if w.is_cuda:
        from qerl_kernels import wide_triton

        wide_triton.fill(w, K, R, first, B.contiguous(), bias, factor)
        return
    w[:, K:] = 0
    w[:, K + first : K + first + B.shape[1]] = B.float() / factor
    if bias is not None:
        whole = bias.float() / factor
        w[:, K + R] = whole
        w[:, K + R + 1] = whole - w[:, K + R].float()
