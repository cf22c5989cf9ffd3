"""Apply the rotary position embedding to queries or keys with one rounding, and compute its gradient.

With the halves x = (x1, x2) of a head, and cosines c = (c1, c2) and sines s = (s1, s2) of a position, it computes

    y = (x1 c1 - x2 s1, x2 c2 + x1 s2)        dx = (dy1 c1 + dy2 s2, dy2 c2 - dy1 s1)

in fp32. As separate operations the same takes eight passes over memory forward and more backward. They need fp32
tensors to round only once.
"""

import torch


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate ``x: (..., T, heads, D)`` by ``cosine`` and ``sine: (..., T, D)`` fp32; differentiable in ``x`` only.

    The result has the shape and dtype of ``x``. Raises ValueError where the shapes do not fit together, D is odd or the
    angles are not fp32.
    """
    *rows, _, D = x.shape
    fits = cosine.shape == sine.shape == (*rows, D) and D % 2 == 0
    if not fits or cosine.dtype != torch.float32 or sine.dtype != torch.float32:
        raise ValueError(
            f"x is {tuple(x.shape)}, cosines {cosine.dtype} {tuple(cosine.shape)} and sines {sine.dtype} "
            f"{tuple(sine.shape)}; they must be (..., T, heads, D) with an even D and float32 (..., T, D)"
        )
    return torch.ops.qerl.rotate(x, cosine, sine)


@torch.library.custom_op("qerl::rotate", mutates_args=(), device_types="cpu")
def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Compute the rotation in plain torch, as a reference."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cosine[..., None, :] + turned * sine[..., None, :]).to(x.dtype)


@_rotate.register_kernel("cuda")
def _(x, cosine, sine):
    from qerl_kernels.rotate_triton import turn  # only here: a CPU needs no Triton

    return turn(x.contiguous(), cosine.contiguous(), sine.contiguous(), back=False)


@torch.library.custom_op("qerl::rotate_backward", mutates_args=(), device_types="cpu")
def _backward(dy: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = (dy.float() * sine[..., None, :]).chunk(2, dim=-1)
    return (dy.float() * cosine[..., None, :] + torch.cat([second, -first], dim=-1)).to(dy.dtype)


@_backward.register_kernel("cuda")
def _(dy, cosine, sine):
    from qerl_kernels.rotate_triton import turn

    return turn(dy.contiguous(), cosine.contiguous(), sine.contiguous(), back=True)


@_rotate.register_fake
@_backward.register_fake
def _(x, cosine, sine):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_rotate.register_autograd(
    lambda ctx, dy: (torch.ops.qerl.rotate_backward(dy, *ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)
