"""Compute the frozen linear layer, y = row_scale * (x W0^T) + bias on packed NVFP4 weights, and its input gradient.

W0 = value(code) * block scale is exact in BF16 (see nvfp4.py). The tensor scale is one fp32 factor for each output row,
so that a fused layer (q/k/v, gate/up) keeps the scales of its parts.

On a CPU the naive reference runs. On a GPU W0 is expanded for the length of one call, and cuBLAS multiplies with fp32
sums. The row scale and the bias are applied to the fp32 sum, and the result is rounded once.

Both functions are torch.library operators (``qerl::nvfp4_linear``, ``qerl::nvfp4_linear_backward``). They are opaque to
torch.compile and usable inside a CUDA graph, since nothing here reads a value back to the host. The backward keeps only
the packed weight: neither the activations nor an expanded weight.
"""

import torch

from qerl_kernels import naive, nvfp4


def linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    block_scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute y = row_scale * (x W0^T) + bias, differentiable with respect to ``x`` only.

    ``x: (..., K)`` bfloat16, float16 or float32, ``codes: (N, K/2)`` uint8, ``block_scales: (N, K/16)`` float8_e4m3fn,
    ``row_scale: () or (N,)`` float32 (1 over the checkpoint's divisor), ``bias: (N,)`` -> ``(..., N)`` in the dtype of
    ``x``.

    ``scale`` is the row scale as a number, given where all rows have the same one. On a GPU it is then cuBLAS's own
    factor, forward and backward, and the product is written once.

    Raises ValueError where shapes or types do not fit.
    """
    _check_weight(codes, block_scales, row_scale)
    if x.shape[-1] != 2 * codes.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, but the packed weight has {2 * codes.shape[1]}")
    if bias is not None and bias.shape != (codes.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, but the weight has {codes.shape[0]} rows")
    return _linear(x, codes, block_scales, row_scale, bias, scale)


def _check_weight(codes: torch.Tensor, block_scales: torch.Tensor, row_scale: torch.Tensor) -> None:
    N, half = codes.shape
    if codes.dtype != torch.uint8 or block_scales.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"codes and block scales are {codes.dtype} and {block_scales.dtype}, not uint8 and float8_e4m3fn"
        )
    if block_scales.shape != (N, 2 * half // nvfp4.GROUP_SIZE) or 2 * half % nvfp4.GROUP_SIZE:
        raise ValueError(
            f"codes {tuple(codes.shape)} do not fit block scales {tuple(block_scales.shape)}: (N, K/2), (N, K/16)"
        )
    if row_scale.dtype != torch.float32 or row_scale.shape not in ((), (N,)):
        raise ValueError(f"row_scale is {row_scale.dtype} {tuple(row_scale.shape)}, not float32 of shape () or ({N},)")


@torch.library.custom_op("qerl::nvfp4_linear", mutates_args=(), device_types="cpu")
def _linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    block_scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    return naive.linear(x, codes, block_scales, row_scale, bias)


@_linear.register_kernel("cuda")
def _expanded(x, codes, block_scales, row_scale, bias, scale=None):
    w, factor = expand(codes, block_scales, x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    if scale is not None:
        return _scaled_matmul(rows, w.t(), factor * scale, bias).view(*x.shape[:-1], codes.shape[0])
    y = _matmul_fp32(rows, w.t()).mul_(factor * row_scale)
    if bias is not None:
        y.add_(bias.float())
    return y.to(x.dtype).view(*x.shape[:-1], codes.shape[0])


@_linear.register_fake
def _(x, codes, block_scales, row_scale, bias, scale=None):
    return x.new_empty(*x.shape[:-1], codes.shape[0])


@torch.library.custom_op("qerl::nvfp4_linear_backward", mutates_args=(), device_types="cpu")
def linear_backward(
    dy: torch.Tensor,
    codes: torch.Tensor,
    block_scales: torch.Tensor,
    row_scale: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute dx = (dy * row_scale) W0, the gradient of ``linear`` with respect to ``x``.

    ``dy: (..., N)`` -> ``(..., K)`` in the dtype of ``dy``. On a GPU without ``scale``, a ``row_scale`` of (N,) costs
    one more rounding: dy * row_scale / max is rounded to the dtype of ``dy`` before the product. ``scale`` is that of
    ``linear``.
    """
    return naive.linear_backward(dy, codes, block_scales, row_scale)


@linear_backward.register_kernel("cuda")
def _expanded_backward(dy, codes, block_scales, row_scale, scale=None):
    rows = dy.reshape(-1, dy.shape[-1])
    w, factor = expand(codes, block_scales, dy.dtype)
    if scale is not None:
        return _scaled_matmul(rows, w, factor * scale, None).view(*dy.shape[:-1], w.shape[1])
    largest = row_scale.amax()
    if row_scale.dim():  # the sum runs over rows of W0, so only a common factor, the largest, can be applied to it
        rows = (rows.float() * (row_scale / largest)).to(dy.dtype)
    dx = _matmul_fp32(rows, w).mul_(factor * largest)
    return dx.to(dy.dtype).view(*dy.shape[:-1], 2 * codes.shape[1])


@linear_backward.register_fake
def _(dy, codes, block_scales, row_scale, scale=None):
    return dy.new_empty(*dy.shape[:-1], 2 * codes.shape[1])


def expand(
    codes: torch.Tensor, block_scales: torch.Tensor, dtype: torch.dtype, room: int = 0
) -> tuple[torch.Tensor, float]:
    """Return the operand of a library's product, ``w: (N, K + room)`` in ``dtype``, and the factor of that product.

    ``w * factor`` is code * block scale, exactly. The caller writes the last ``room`` columns, a multiple of 8.
    """
    if codes.is_cuda:
        from qerl_kernels import nvfp4_triton  # only here: a CPU needs no Triton

        w = nvfp4_triton.dequantize(codes, block_scales, room)
    else:
        w = torch.nn.functional.pad(nvfp4.dequantize(codes, block_scales), (0, room))
    by = nvfp4.expanded_factor(dtype)
    return (w if by == 1 else w.mul_(by)).to(dtype), 1 / by


def _matmul_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute ``a @ b`` with the fp32 accumulator as the result: (M, K), (K, N) -> (M, N) float32."""
    return torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def _scaled_matmul(a: torch.Tensor, b: torch.Tensor, scale: float, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``scale * (a @ b) + bias`` in the dtype of ``a``, rounded once: (M, K), (K, N), (N,) -> (M, N)."""
    y = a.new_empty(a.shape[0], b.shape[1])
    addend = y if bias is None else bias.to(a.dtype)
    return torch.addmm(addend, a, b, beta=0 if bias is None else 1, alpha=scale, out=y)


def _save_weight(ctx, inputs, output):
    _, codes, block_scales, row_scale, _, ctx.scale = inputs
    ctx.save_for_backward(codes, block_scales, row_scale)


def _gradient(ctx, dy):
    dx = linear_backward(dy, *ctx.saved_tensors, ctx.scale) if ctx.needs_input_grad[0] else None
    return dx, None, None, None, None, None


_linear.register_autograd(_gradient, setup_context=_save_weight)
