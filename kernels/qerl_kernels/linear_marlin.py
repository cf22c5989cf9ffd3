"""Compute the frozen linear layer, and its input gradient, on a weight in Marlin's layout.

The results are those of ``linear.py``. For the length of one call, codes and block scales are brought into the
checkpoint's layout, 0.56 bytes a weight, and ``linear.py`` expands and multiplies them. The backward keeps only
Marlin's tensors, which may be views of the engine's.

Both functions are torch.library operators (``qerl::nvfp4_linear_marlin`` and ``..._backward``) that read nothing back
to the host.
"""

import torch

from qerl_kernels import linear as canonical
from qerl_kernels.marlin_layout import MarlinWeight


def linear(
    x: torch.Tensor, weight: MarlinWeight, bias: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    """Compute y = weight.scale * (x W0^T) + bias, differentiable with respect to ``x`` only.

    ``x: (..., K)`` bfloat16, float16 or float32, ``bias: (N,)`` -> ``(..., N)`` in the dtype of ``x``. ``scale`` is
    ``weight.scale`` as a number where the caller has it; on a GPU the product is then written once.

    Raises ValueError where the shapes do not fit together.
    """
    if x.shape[-1] != weight.K or (bias is not None and bias.shape != (weight.N,)):
        shapes = tuple(x.shape), None if bias is None else tuple(bias.shape)
        raise ValueError(f"x and bias have shapes {shapes}; the weight is ({weight.N}, {weight.K})")
    tensors = weight.words, weight.scales, weight.scale
    return _linear(x, *tensors, weight.exponent, weight.N, weight.K, bias, scale)


@torch.library.custom_op("qerl::nvfp4_linear_marlin", mutates_args=())
def _linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor,
    exponent: int,
    N: int,
    K: int,
    bias: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    codes, block_scales = MarlinWeight(words, scales, tensor_scale, exponent, N, K).canonical()
    return canonical.linear(x, codes, block_scales, tensor_scale, bias, scale)


@_linear.register_fake
def _(x, words, scales, tensor_scale, exponent, N, K, bias, scale=None):
    return x.new_empty(*x.shape[:-1], N)


@torch.library.custom_op("qerl::nvfp4_linear_marlin_backward", mutates_args=())
def _backward(
    dy: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor,
    exponent: int,
    N: int,
    K: int,
    scale: float | None = None,
) -> torch.Tensor:
    codes, block_scales = MarlinWeight(words, scales, tensor_scale, exponent, N, K).canonical()
    return canonical.linear_backward(dy, codes, block_scales, tensor_scale, scale)


@_backward.register_fake
def _(dy, words, scales, tensor_scale, exponent, N, K, scale=None):
    return dy.new_empty(*dy.shape[:-1], K)


def _save(ctx, inputs, output):
    _, *tensors, ctx.exponent, ctx.N, ctx.K, _, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, dy):
    dx = None
    if ctx.needs_input_grad[0]:
        dx = _backward(dy, *ctx.saved_tensors, ctx.exponent, ctx.N, ctx.K, ctx.scale)
    return dx, *[None] * 8


_linear.register_autograd(_gradient, setup_context=_save)
