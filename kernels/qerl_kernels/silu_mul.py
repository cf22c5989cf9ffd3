"""Compute silu(gate) * up of a gated MLP with one rounding, and its gradient.

A compiled engine computes it in fp32 and rounds the product. In plain torch on rounded tensors it rounds twice and
keeps three of them for the backward. This operator keeps gate and up.
"""

import torch


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up: (..., N) each, of one dtype -> (..., N) in that dtype, differentiable in both.

    Raises ValueError where shape, dtype or device differ.
    """
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device):
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype} on {gate.device} and up {tuple(up.shape)} {up.dtype} on "
            f"{up.device}; they must be alike"
        )
    return torch.ops.qerl.silu_mul(gate, up)


def silu_mul_backward_(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of gate and up from ``dy``; the gradient of gate overwrites ``dy``.

    All have the same shape and dtype. On a GPU ``dy`` must be contiguous.
    """
    dup: torch.Tensor = torch.ops.qerl.silu_mul_backward_(dy, gate, up)
    return dy, dup


def scaled_silu_mul(joined: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute silu(scales[:, 0] * gate) * scales[:, 1] * up, rounded once, differentiable in ``joined`` only.

    gate and up are the halves of ``joined: (S, 2 N)``, ``scales: (S, 2)`` fp32 -> (S, N) in the dtype of ``joined``.

    Raises ValueError where the shapes do not fit together or the scales are not fp32.
    """
    rows, width = joined.shape
    if width % 2 or scales.shape != (rows, 2) or scales.dtype != torch.float32:
        raise ValueError(
            f"joined is {tuple(joined.shape)} and scales {scales.dtype} {tuple(scales.shape)}, not (S, 2 N) and "
            "float32 (S, 2)"
        )
    return torch.ops.qerl.scaled_silu_mul(joined, scales)


@torch.library.custom_op("qerl::silu_mul", mutates_args=(), device_types="cpu")
def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up in plain torch, as a reference."""
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
    """Compute both gradients with d silu(g) / dg = s (1 + g (1 - s)), s = sigmoid(g)."""
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


@torch.library.custom_op("qerl::silu_mul_backward_", mutates_args=("dy",), device_types="cpu")
def _backward_in_place(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    dgate, dup = _backward(dy, gate, up)
    dy.copy_(dgate)
    return dup


@_backward_in_place.register_kernel("cuda")
def _(dy, gate, up):
    from qerl_kernels.silu_mul_triton import backward

    return backward(dy, gate.contiguous(), up.contiguous(), dgate=dy)[1]


@_backward_in_place.register_fake
def _(dy, gate, up):
    return torch.empty_like(up)


_silu_mul.register_autograd(
    lambda ctx, dy: torch.ops.qerl.silu_mul_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("qerl::scaled_silu_mul", mutates_args=(), device_types="cpu")
def _scaled(joined: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute the scaled product in plain torch, as a reference."""
    gate, up = joined.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate * scales[:, :1]) * (up * scales[:, 1:])).to(joined.dtype)


@_scaled.register_kernel("cuda")
def _(joined, scales):
    from qerl_kernels.silu_mul_triton import scaled_forward

    return scaled_forward(joined.contiguous(), scales.contiguous())


@_scaled.register_fake
def _(joined, scales):
    return joined.new_empty(joined.shape[0], joined.shape[1] // 2)


@torch.library.custom_op("qerl::scaled_silu_mul_backward", mutates_args=(), device_types="cpu")
def _scaled_backward(dy: torch.Tensor, joined: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    gate, up = joined.float().chunk(2, dim=1)
    g, u, dy32 = gate * scales[:, :1], up * scales[:, 1:], dy.float()
    s = torch.sigmoid(g)
    dgate, dup = dy32 * u * s * (1 + g * (1 - s)) * scales[:, :1], dy32 * g * s * scales[:, 1:]
    return torch.cat([dgate, dup], dim=1).to(joined.dtype)


@_scaled_backward.register_kernel("cuda")
def _(dy, joined, scales):
    from qerl_kernels.silu_mul_triton import scaled_backward

    return scaled_backward(dy.contiguous(), joined.contiguous(), scales.contiguous())


@_scaled_backward.register_fake
def _(dy, joined, scales):
    return torch.empty_like(joined)


_scaled.register_autograd(
    lambda ctx, dy: (torch.ops.qerl.scaled_silu_mul_backward(dy, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
