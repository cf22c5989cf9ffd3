"""Compute RMSNorm and its gradient on a GPU, in one pass over memory each; a program takes one row after another."""

import torch
import triton
import triton.language as tl

PROGRAMS = 4096  # the most programs of a launch; each takes every PROGRAMS-th row
PROGRAMS_WITH_W = 528  # the most programs where each writes the sum of its rows for the gradient of w


@triton.jit
def _forward_kernel(x, w, y, inverse, rows, H, epsilon, ROUNDED: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < H
    factor = tl.load(w + column, mask=inside, other=0)
    if ROUNDED:
        factor = factor.to(y.dtype.element_ty).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * H + column
        x32 = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        r = 1 / tl.sqrt_rn(tl.sum(x32 * x32) / H + epsilon)
        n = x32 * r
        if ROUNDED:
            n = n.to(y.dtype.element_ty).to(tl.float32)
        tl.store(y + at, (n * factor).to(y.dtype.element_ty), mask=inside)
        tl.store(inverse + row, r)


@triton.jit
def _backward_kernel(
    dy, x, w, inverse, dx, dw, rows, H, ROUNDED: tl.constexpr, WITH_W: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    inside = column < H
    factor = tl.load(w + column, mask=inside, other=0)
    if ROUNDED:
        factor = factor.to(x.dtype.element_ty).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * H + column
        d = tl.load(dy + at, mask=inside, other=0).to(tl.float32)
        r = tl.load(inverse + row)
        n = tl.load(x + at, mask=inside, other=0).to(tl.float32) * r
        g = d * factor
        tl.store(dx + at, (r * (g - n * (tl.sum(g * n) / H))).to(dx.dtype.element_ty), mask=inside)
        if WITH_W:
            if ROUNDED:
                n = n.to(x.dtype.element_ty).to(tl.float32)
            total += d * n
    if WITH_W:
        tl.store(dw + tl.program_id(0) * H + column, total, mask=inside)


def _launch(H: int) -> dict[str, int]:
    block = triton.next_power_of_2(H)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def forward(x: torch.Tensor, w: torch.Tensor, epsilon: float, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute y and 1 / rms(x), (...,) fp32, of contiguous ``x: (..., H)`` and ``w: (H,)`` fp32."""
    H = x.shape[-1]
    y, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    if rows := inverse.numel():
        with torch.cuda.device_of(x):
            grid = (min(rows, PROGRAMS),)
            _forward_kernel[grid](x, w, y, inverse, rows, H, epsilon, ROUNDED=rounded, **_launch(H))
    return y, inverse


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, inverse: torch.Tensor, rounded: bool, with_w: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of x and, with ``with_w``, of w (else zeros), all contiguous.

    The sum over rows has the same order every time.
    """
    H = x.shape[-1]
    dx, dw = torch.empty_like(x), torch.zeros_like(w)
    if rows := inverse.numel():
        programs = min(rows, PROGRAMS_WITH_W if with_w else PROGRAMS)
        sums = torch.empty(programs, H, dtype=torch.float32, device=x.device) if with_w else dw
        with torch.cuda.device_of(x):
            constants = {"ROUNDED": rounded, "WITH_W": with_w, **_launch(H)}
            _backward_kernel[(programs,)](dy, x, w, inverse, dx, sums, rows, H, **constants)
        dw = sums.sum(0) if with_w else dw
    return dx, dw
