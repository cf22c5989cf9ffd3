"""silu(gate) * up of a gated MLP, rounded once, and its gradient.

A compiled engine computes it in fp32 and rounds the product; a framework that multiplies rounded tensors rounds twice,
and keeps three of them for the backward. This keeps gate and up.
"""

import torch


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``gate``, ``up``: (..., N) of one dtype -> (..., N) in that dtype, differentiable in both.

    Raises ValueError where shape, dtype or device differ.
    """
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device):
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype} on {gate.device} and up {tuple(up.shape)} {up.dtype} on "
            f"{up.device}; they must be alike"
        )
    return torch.ops.qerl.silu_mul(gate, up)


@torch.library.custom_op("qerl::silu_mul", mutates_args=(), device_types="cpu")
def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The naive reference."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


@_silu_mul.register_kernel("cuda")
def _(gate, up):
    from qerl_kernels.silu_mul_triton import forward  # only here: a CPU needs no Triton

    return forward(gate.contiguous(), up.contiguous())


@_silu_mul.register_fake
def _(gate, up):
    return torch.empty_like(gate)


@torch.library.custom_op("qerl::silu_mul_backward", mutates_args=(), device_types="cpu")
def _backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d silu(g) / dg = s (1 + g (1 - s)) with s = sigmoid(g)."""
    dy32, g = dy.float(), gate.float()
    s = torch.sigmoid(g)
    return (dy32 * up.float() * s * (1 + g * (1 - s))).to(gate.dtype), (dy32 * g * s).to(up.dtype)


@_backward.register_kernel("cuda")
def _(dy, gate, up):
    from qerl_kernels.silu_mul_triton import backward

    return backward(dy.contiguous(), gate.contiguous(), up.contiguous())


@_backward.register_fake
def _(dy, gate, up):
    return torch.empty_like(gate), torch.empty_like(up)


_silu_mul.register_autograd(
    lambda ctx, dy: torch.ops.qerl.silu_mul_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
