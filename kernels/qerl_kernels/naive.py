"""Define what each kernel must compute, in readable references that also run on a CPU."""

import torch

from qerl_kernels.nvfp4 import dequantize


def linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    block_scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute y = row_scale * (x W0^T) + bias with W0 = code * block scale, in fp32 with one rounding at the end.

    ``x: (..., K)``, ``codes: (N, K/2)``, ``block_scales: (N, K/16)``, ``row_scale: () or (N,)`` fp32 tensor scales,
    ``bias: (N,)`` -> ``(..., N)`` in the dtype of ``x``.
    """
    w = dequantize(codes, block_scales).float()  # (N, K)
    with torch.autocast(x.device.type, enabled=False):
        y = torch.nn.functional.linear(x.float(), w) * row_scale
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def linear_backward(
    dy: torch.Tensor, codes: torch.Tensor, block_scales: torch.Tensor, row_scale: torch.Tensor
) -> torch.Tensor:
    """Compute dx = (dy * row_scale) W0, the gradient of ``linear`` for ``x``, in fp32 with one rounding at the end.

    ``dy: (..., N)`` -> ``(..., K)`` in the dtype of ``dy``.
    """
    w = dequantize(codes, block_scales).float()  # (N, K)
    with torch.autocast(dy.device.type, enabled=False):
        return torch.matmul(dy.float() * row_scale, w).to(dy.dtype)


def rms_norm(x: torch.Tensor, w: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute y = x / sqrt(mean(x^2) + epsilon) * w, in fp32 with one rounding at the end.

    ``x: (..., H)``, ``w: (H,)`` fp32 -> ``(..., H)`` in the dtype of ``x``. The engine and the trainer both call this
    definition. So noise that is too small for BF16 still reaches the output, and is the same on both sides.
    """
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + epsilon) * w.float()).to(x.dtype)
