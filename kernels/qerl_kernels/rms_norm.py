"""Compute RMSNorm with its gradient, keeping only the input, its weight and one number a row.

In plain torch it takes a dozen passes over memory and keeps the input once more in fp32.
"""

import torch

from qerl_kernels import naive


def rms_norm(x: torch.Tensor, w: torch.Tensor, epsilon: float, *, rounded: bool = False) -> torch.Tensor:
    """Compute y = x / sqrt(mean(x^2) + epsilon) * w, in fp32 with one rounding at the end, differentiable in x and w.

    ``x: (..., H)``, ``w: (H,)`` fp32 -> ``(..., H)`` in the dtype of ``x``. With ``rounded`` the normalized input and w
    are each rounded to that dtype before their product, as transformers and stock vLLM do.

    Raises ValueError where the shapes do not fit or w is not fp32.
    """
    if w.shape != x.shape[-1:] or w.dtype != torch.float32:
        raise ValueError(f"x is {tuple(x.shape)} and w {tuple(w.shape)} {w.dtype}; w must be ({x.shape[-1]},) in fp32")
    return torch.ops.qerl.rms_norm(x, w, epsilon, rounded)[0]


@torch.library.custom_op("qerl::rms_norm", mutates_args=(), device_types="cpu")
def _rms_norm(x: torch.Tensor, w: torch.Tensor, epsilon: float, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute y by the naive reference, and 1 / rms(x): (...,) fp32."""
    x32 = x.float()
    inverse = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + epsilon)
    y = w.to(x.dtype) * (x32 * inverse).to(x.dtype) if rounded else naive.rms_norm(x, w, epsilon)
    return y, inverse.squeeze(-1)


@_rms_norm.register_kernel("cuda")
def _(x, w, epsilon, rounded):
    from qerl_kernels.rms_norm_triton import forward  # only here: a CPU needs no Triton

    return forward(x.contiguous(), w.contiguous(), epsilon, rounded)


@_rms_norm.register_fake
def _(x, w, epsilon, rounded):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("qerl::rms_norm_backward", mutates_args=(), device_types="cpu")
def _backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, inverse: torch.Tensor, rounded: bool, with_w: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute dx = (g - n mean(g n)) / rms(x), with n = x / rms(x) and g = dy w.

    With ``with_w`` also dw, the sum over rows of dy n, else zeros.
    """
    factor = w.to(x.dtype).float() if rounded else w
    n = x.float() * inverse.unsqueeze(-1)
    g = dy.float() * factor
    dx = (inverse.unsqueeze(-1) * (g - n * (g * n).mean(dim=-1, keepdim=True))).to(x.dtype)
    if not with_w:
        return dx, torch.zeros_like(w)
    n = n.to(x.dtype).float() if rounded else n
    return dx, (dy.float() * n).reshape(-1, w.numel()).sum(0)


@_backward.register_kernel("cuda")
def _(dy, x, w, inverse, rounded, with_w):
    from qerl_kernels.rms_norm_triton import backward

    return backward(dy.contiguous(), x.contiguous(), w.contiguous(), inverse, rounded, with_w)


@_backward.register_fake
def _(dy, x, w, inverse, rounded, with_w):
    return x.new_empty(x.shape), torch.empty_like(w)


def _save(ctx, inputs, output):
    x, w, _, ctx.rounded = inputs
    ctx.save_for_backward(x, w, output[1])


def _gradient(ctx, dy, _):
    dx, dw = torch.ops.qerl.rms_norm_backward(dy, *ctx.saved_tensors, ctx.rounded, ctx.needs_input_grad[1])
    return dx, dw if ctx.needs_input_grad[1] else None, None, None


_rms_norm.register_autograd(_gradient, setup_context=_save)
