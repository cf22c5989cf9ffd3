"""Multiply rows sorted by expert with each expert's frozen packed weight, and compute the input gradient.

    y[s] = x[s] W0_e^T for the rows s of expert e,   W0 = value(code) * block scale, exact in BF16

The caller applies the tensor scales, because it multiplies the result in fp32 anyway (scaled_silu_mul, the routing
weights). Applied here they would add a rounding. On a CPU, and where PyTorch has no grouped product, each expert that
has rows is expanded and multiplied by itself. On a GPU of Ampere or later in BF16, all experts of the layer are
expanded for the length of one call. One ``grouped_mm`` multiplies them, and nothing is read back to the host.

Both functions are torch.library operators, as in linear.py, and the backward keeps only the packed weight.
"""

import functools
import warnings

import torch

from qerl_kernels.nvfp4 import GROUP_SIZE, dequantize


def grouped_linear(
    x: torch.Tensor, ends: torch.Tensor, codes: torch.Tensor, block_scales: torch.Tensor
) -> torch.Tensor:
    """Compute y = x W0_e^T for each expert's rows, without the tensor scales; differentiable in ``x`` only.

    ``x: (S, K)`` bfloat16 or float32, ``ends: (E,)`` int32, ``codes: (E, N, K/2)`` uint8, ``block_scales: (E, N,
    K/16)`` float8_e4m3fn -> ``(S, N)`` in the dtype of ``x``. Rows ``ends[e - 1]`` to ``ends[e]`` are those of expert
    e; the last end is S.

    Raises ValueError where the shapes do not fit together. Raises it for float16 too, which a product without its
    tensor scale may overflow.
    """
    experts, N, half = codes.shape
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x is {x.dtype}; frozen experts compute in bfloat16 or float32")
    if x.dim() != 2 or x.shape[1] != 2 * half:
        raise ValueError(f"x has shape {tuple(x.shape)}, but the packed weights have {2 * half} columns")
    if block_scales.shape != (experts, N, 2 * half // GROUP_SIZE) or 2 * half % GROUP_SIZE:
        raise ValueError(
            f"codes {tuple(codes.shape)} do not fit block scales {tuple(block_scales.shape)}: (E, N, K/2), (E, N, K/16)"
        )
    if ends.shape != (experts,) or ends.dtype != torch.int32:
        raise ValueError(f"ends is {ends.dtype} {tuple(ends.shape)}, not int32 of shape ({experts},)")
    return torch.ops.qerl.nvfp4_grouped_linear(x, ends, codes, block_scales)


@torch.library.custom_op("qerl::nvfp4_grouped_linear", mutates_args=())
def _grouped_linear(
    x: torch.Tensor, ends: torch.Tensor, codes: torch.Tensor, block_scales: torch.Tensor
) -> torch.Tensor:
    if _has_grouped_mm(x.device, x.dtype):
        return torch.nn.functional.grouped_mm(x.contiguous(), _expand(codes, block_scales).transpose(1, 2), offs=ends)
    y = x.new_empty(len(x), codes.shape[1])
    for expert, first, last in _experts_with_rows(ends):
        torch.mm(x[first:last], _expand_one(codes, block_scales, expert, x.dtype).t(), out=y[first:last])
    return y


@_grouped_linear.register_fake
def _(x, ends, codes, block_scales):
    return x.new_empty(x.shape[0], codes.shape[1])


@torch.library.custom_op("qerl::nvfp4_grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    dy: torch.Tensor, ends: torch.Tensor, codes: torch.Tensor, block_scales: torch.Tensor
) -> torch.Tensor:
    """Compute dx[s] = dy[s] W0_e: (S, N) -> (S, K)."""
    if _has_grouped_mm(dy.device, dy.dtype):
        return torch.nn.functional.grouped_mm(dy.contiguous(), _expand(codes, block_scales), offs=ends)
    dx = dy.new_empty(len(dy), 2 * codes.shape[2])
    for expert, first, last in _experts_with_rows(ends):
        torch.mm(dy[first:last], _expand_one(codes, block_scales, expert, dy.dtype), out=dx[first:last])
    return dx


@_grouped_linear_backward.register_fake
def _(dy, ends, codes, block_scales):
    return dy.new_empty(dy.shape[0], 2 * codes.shape[2])


def _gradient(ctx, dy):
    return torch.ops.qerl.nvfp4_grouped_linear_backward(dy, *ctx.saved_tensors), None, None, None


_grouped_linear.register_autograd(
    _gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:])
)


@functools.cache
def _has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if one product can multiply all experts; warn once on a GPU where it cannot."""
    if device.type != "cuda":
        return False
    available = hasattr(torch.nn.functional, "grouped_mm") and torch.cuda.get_device_capability(device) >= (8, 0)
    if not (available and dtype == torch.bfloat16):
        warnings.warn(
            f"no grouped product of {dtype} on this GPU with torch {torch.__version__}: the experts are multiplied one "
            "after the other, which is slow; use bfloat16, torch 2.10 or later, and a GPU of Ampere or later",
            stacklevel=2,
        )
        return False
    return True


def _expand(codes: torch.Tensor, block_scales: torch.Tensor) -> torch.Tensor:
    """Expand W0 of all experts to (E, N, K) bfloat16."""
    from qerl_kernels.nvfp4_triton import dequantize as on_gpu  # only here: a CPU needs no Triton

    experts, N, half = codes.shape
    return on_gpu(codes.reshape(-1, half), block_scales.reshape(experts * N, -1)).view(experts, N, 2 * half)


def _expand_one(codes: torch.Tensor, block_scales: torch.Tensor, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """Expand W0 of one expert to (N, K) in ``dtype``."""
    return dequantize(codes[expert], block_scales[expert]).to(dtype)


def _experts_with_rows(ends: torch.Tensor) -> list[tuple[int, int, int]]:
    """List the experts that have rows as (expert, first row, end row)."""
    boundaries = ends.tolist()
    return [
        (e, first, last)
        for e, (first, last) in enumerate(zip([0, *boundaries], boundaries, strict=False))
        if first < last
    ]
