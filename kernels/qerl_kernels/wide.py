"""Prepare the operands of an adapted frozen layer, so that one product gives its output.

The product is y = factor * [x s 1 1 0] [W0 B b0 b1 0]^T with ``x: (T, K)`` and ``s: (T, R)`` of all adapters that read
x. B: (N, r), over the factor, stands in the r columns of s that belong to it. b0 is the bias over the factor, rounded;
b1 is what that rounding lost, rounded. Rows start 128 bytes apart, or as near to that as K allows.
"""

import torch

from qerl_kernels.silu_mul import silu_mul


def columns(R: int) -> tuple[int, int]:
    """Return how many numbers stand behind the K of a row: those that the product reads, and those that are allocated.

    The first is a multiple of 8, the second of 64.
    """
    used, room = (-(-(R + 2) // n) * n for n in (8, 64))
    return used, room


def _empty(like: torch.Tensor, T: int, K: int, R: int) -> torch.Tensor:
    used, room = columns(R)
    return like.new_empty(T, K + room)[:, : K + used]


def widen(x: torch.Tensor, R: int) -> torch.Tensor:
    """Copy ``x: (T, K)`` -> (T, K + used), followed by R columns that the caller writes, two of ones, and zeros."""
    T, K = x.shape
    wide = _empty(x, T, K, R)
    wide[:, :K], wide[:, K + R : K + R + 2], wide[:, K + R + 2 :] = x, 1, 0
    return wide


def widen_silu_mul(gate: torch.Tensor, up: torch.Tensor, R: int) -> torch.Tensor:
    """Compute ``widen`` of silu(gate) * up, (T, K) each, in fp32 with one rounding; not differentiable."""
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
    """Write what stands behind W0 in ``w: (N, K + used)``, whose rows may lie apart.

    ``B: (N, r)`` over ``factor`` starts at column K + ``first``. The ``bias: (N,)`` over ``factor`` goes to columns K +
    R and K + R + 1, and the others become zero.
    """
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
