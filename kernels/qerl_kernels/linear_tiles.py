"""Compute the frozen linear layer, and its input gradient, on tiled weights.

``rule.py`` chooses the variant of the product. Where decoding costs more than it saves, and all rows have the same
tensor scale, W0 is expanded a slab at a time. cuBLAS then multiplies with the tensor scale as its fp32 factor. Either
way the operand is exact, sums are fp32 and the result is rounded once.

``qerl::nvfp4_linear_tiles`` and its backward are torch.library operators, opaque to torch.compile and usable inside a
CUDA graph. On a CPU plain torch computes the same.
"""

import functools
import warnings
from dataclasses import replace
from threading import get_ident

import torch

from qerl_kernels import gemm, proof, rule, tiles
from qerl_kernels.adapter import COLUMNS, Adapter, shrink
from qerl_kernels.compiler import CompileError
from qerl_kernels.cost import Machine
from qerl_kernels.linear import _matmul_fp32, _scaled_matmul
from qerl_kernels.nvfp4 import expanded_factor
from qerl_kernels.tiles import TiledWeight

MOST_SLAB_ROWS = 32768  # rows of W0 that are expanded at one time; narrower slabs cost cuBLAS a few percent


def slab_rows(N: int) -> int:
    """Return how many rows of a weight are expanded at one time: all, or as few equal slabs as the limit allows."""
    slabs = -(-N // MOST_SLAB_ROWS)
    return -(-N // slabs // tiles.TILE) * tiles.TILE


@functools.cache
def prepare(N: int, K: int, device: torch.device, operand: torch.dtype = torch.bfloat16) -> None:
    """Compile or fetch, prove and load every variant, and check that a weight of (N, K) has one for any M.

    Warns once where the rule was fitted on another GPU. Raises CompileError where no variant fits, or a kernel that
    runs beside the product fails. Its text is the same for all layers where no variant can be used at all.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    variants = rule.rule().variants
    proven = set(variants) - machine(index, operand).refused
    if not proven:
        reason = proof.verdict(next(iter(variants)), index, operand)
        raise CompileError(f"none of {len(variants)} kernels can be used on this machine: {reason}")
    for M in range(8, 513, 8):
        if not any(rule.fits(c, K, M) for c in proven):
            raise CompileError(f"no variant that is proven on this machine fits {K} columns and {M} tokens")
    reason = proof.verdict_beside(index, operand)
    proof.forget()
    if reason is not None:
        raise CompileError(f"kernels beside the product cannot be used on this machine: {reason}")
    _warn_untuned(index)


@functools.cache
def machine(device: int, operand: torch.dtype) -> Machine:
    """Describe a GPU with the variants that are refused there.

    The first call compiles and proves every variant, so it must not be made while a CUDA graph is captured.
    """
    variants = list(rule.rule().variants)
    gemm.compile_all(variants, operand)
    proven = proof.usable(variants, torch.device("cuda", device), operand)
    proof.forget()
    return replace(rule.machine_of(device), refused=frozenset(variants) - frozenset(proven))


@functools.cache
def _warn_untuned(device: int) -> None:
    message = rule.untuned(device)
    if message:
        warnings.warn(message, stacklevel=3)


def supported(device: torch.device) -> bool:
    """Return True if the product runs on this device, which must be a Hopper GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def linear(
    x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None = None, adapter: Adapter | None = None
) -> torch.Tensor:
    """Compute y = row_scale * (x W0^T) + bias, and with an adapter + (x A^T) B^T.

    ``x: (..., K)`` in the weight's ``operand`` (on a CPU any type), ``bias: (N,)`` fp32 -> ``(..., N)`` in the dtype of
    ``x``. It is differentiable with respect to ``x`` only, and with an ``adapter`` not at all.

    Raises ValueError where shapes or types do not fit, or a gradient would have to pass an adapter. Raises it, too,
    where the device is neither a CPU nor a Hopper GPU. Raises CompileError where no kernel can be used.
    """
    if x.shape[-1] != weight.K or (bias is not None and bias.shape != (weight.N,)):
        shapes = tuple(x.shape), None if bias is None else tuple(bias.shape)
        raise ValueError(f"x and bias have shapes {shapes}; the weight is ({weight.N}, {weight.K})")
    if adapter is not None:
        _check_adapter(x, weight, adapter)
    parts = (None, None, None) if adapter is None else (adapter.a, adapter.b, adapter.spans)
    tensors = weight.tiles, weight.row_scale, weight.counters
    return torch.ops.qerl.nvfp4_linear_tiles(
        x, *tensors, weight.N, weight.K, weight.scale, bias, *parts, weight.operand, weight.fixed_order
    )


def _check_adapter(x: torch.Tensor, weight: TiledWeight, adapter: Adapter) -> None:
    R = adapter.b.shape[1]
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("this operator has no gradient through an adapter: add it as a layer of its own, as PEFT does")
    if R % COLUMNS or adapter.a.shape != (R, weight.K) or adapter.b.shape != (weight.N, R):
        shapes = tuple(adapter.a.shape), tuple(adapter.b.shape)
        raise ValueError(f"A and B have shapes {shapes}; they must be (R, K) and (N, R) with R a multiple of {COLUMNS}")
    if adapter.spans.shape != (-(-weight.N // tiles.TILE), 2) or adapter.spans.dtype != torch.int32:
        raise ValueError(f"spans are {adapter.spans.dtype} {tuple(adapter.spans.shape)}, not int32 (ceil(N / 64), 2)")


# The counters are zero before and after each call, so the operator declares no argument as mutated.
@torch.library.custom_op("qerl::nvfp4_linear_tiles", mutates_args=(), device_types="cpu")
def _linear(
    x: torch.Tensor,
    tiles_: torch.Tensor,
    row_scale: torch.Tensor,
    counters: torch.Tensor,
    N: int,
    K: int,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    spans: torch.Tensor | None,
    operand: torch.dtype = torch.bfloat16,
    fixed_order: bool = False,
) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        y = torch.nn.functional.linear(x.float(), tiles.dequantize(tiles_, N, K, operand).float()) * row_scale
        if bias is not None:
            y += bias.float()
        if a is not None and b is not None:
            y += torch.nn.functional.linear(x, a).float() @ b.float().t()
        return y.to(x.dtype)


@_linear.register_kernel("cuda")
def _launch(x, tiles_, row_scale, counters, N, K, scale, bias, a, b, spans, operand=torch.bfloat16, fixed_order=False):
    rows = x if x.dim() == 2 else x.reshape(-1, K)
    M, columns = rows.shape[0], 0 if b is None else b.shape[1]
    run = _planned(get_ident(), N, K, max(M, 1), columns, scale is not None, fixed_order, x.device, operand)
    if run is None:
        weight = TiledWeight(tiles_, row_scale, counters, N, K, operand=operand)
        y = expand_and_multiply(rows, weight, scale.item(), bias)
        if a is not None:
            y.addmm_(shrink(rows, a), b.t())
    else:
        gemm.check(rows, K, operand)
        bias32 = None if bias is None else bias.float()
        y = run(rows, tiles_, row_scale, counters, bias32, a, b, spans) if M else rows.new_empty((0, N))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], N)


@functools.lru_cache(maxsize=gemm.PLANS)
def _planned(
    thread: int,
    N: int,
    K: int,
    M: int,
    columns: int,
    may_expand: bool,
    fixed_order: bool,
    device: torch.device,
    operand: torch.dtype,
) -> gemm.Plan | None:
    """Return the plan by which a thread multiplies M tokens, or None where the weight is expanded.

    Raises ValueError on GPUs other than Hopper.
    """
    if not supported(device):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"tiled NVFP4 weights run on Hopper GPUs only, not on {name}: use the checkpoint's layout")
    gpu = machine(device.index, operand)
    if fixed_order:
        chosen = rule.choose_fixed(N, K, rule.rounded(M), columns, gpu)
    else:
        chosen = rule.choose(N, K, M, columns, may_expand, gpu)
    if chosen.configuration is None:
        return None
    shape = N, K, M, columns, device.index, operand
    return gemm.plan(thread, chosen.configuration, chosen.shrink, *shape, True)


@_linear.register_fake
def _(x, tiles_, row_scale, counters, N, K, scale, bias, a, b, spans, operand=torch.bfloat16, fixed_order=False):
    return x.new_empty(*x.shape[:-1], N)


def expand_and_multiply(x: torch.Tensor, weight: TiledWeight, scale: float, bias: torch.Tensor | None) -> torch.Tensor:
    """Expand W0 a slab of rows at a time, and multiply by cuBLAS: ``x: (M, K)`` -> ``(M, N)``.

    ``scale`` is the tensor scale, which becomes cuBLAS's factor.
    """
    y = torch.empty(x.shape[0], weight.N, dtype=x.dtype, device=x.device)
    slab, scale = slab_rows(weight.N), scale / expanded_factor(weight.operand)
    for first in range(0, weight.N, slab):
        rows = min(slab, weight.N - first)
        w, part = gemm.dequantize(weight, first, rows), y[:, first : first + rows]
        addend = part if bias is None else bias[first : first + rows].to(x.dtype)
        torch.addmm(addend, x, w.t(), beta=0 if bias is None else 1, alpha=scale, out=part)
    return y


@torch.library.custom_op("qerl::nvfp4_linear_tiles_backward", mutates_args=(), device_types="cpu")
def _backward(
    dy: torch.Tensor,
    tiles_: torch.Tensor,
    row_scale: torch.Tensor,
    N: int,
    K: int,
    scale: torch.Tensor | None = None,
    operand: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return ((dy.float() * row_scale) @ tiles.dequantize(tiles_, N, K, operand).float()).to(dy.dtype)


@_backward.register_kernel("cuda")
def _expand_backward(dy, tiles_, row_scale, N, K, scale=None, operand=torch.bfloat16):
    w = gemm.dequantize(TiledWeight(tiles_, row_scale, row_scale, N, K, operand=operand))
    factor = 1 / expanded_factor(operand)
    if scale is not None:
        return _scaled_matmul(dy.reshape(-1, N), w, factor * scale.item(), None).view(*dy.shape[:-1], K)
    largest = row_scale.amax()  # the sum runs over rows, so only a common factor, the largest, can be applied to it
    scaled = (dy.reshape(-1, N).float() * (row_scale / largest)).to(dy.dtype)
    return _matmul_fp32(scaled, w).mul_(factor * largest).to(dy.dtype).view(*dy.shape[:-1], K)


@_backward.register_fake
def _(dy, tiles_, row_scale, N, K, scale=None, operand=torch.bfloat16):
    return dy.new_empty(*dy.shape[:-1], K)


def _save(ctx, inputs, output):
    _, tiles_, row_scale, _, ctx.N, ctx.K, ctx.scale, *_, ctx.operand, _ = inputs
    ctx.save_for_backward(tiles_, row_scale)


def _gradient(ctx, dy):
    dx = torch.ops.qerl.nvfp4_linear_tiles_backward(dy, *ctx.saved_tensors, ctx.N, ctx.K, ctx.scale, ctx.operand)
    return dx, *[None] * 12


_linear.register_autograd(_gradient, setup_context=_save)
