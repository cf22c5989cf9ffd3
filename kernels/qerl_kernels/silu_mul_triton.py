"""Compute silu(gate) * up and its gradient on a GPU, in one pass over memory each."""

import torch
import triton
import triton.language as tl

NUMBERS = 1024  # outputs that one program computes


@triton.jit
def _forward_kernel(gate, up, y, count, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0).to(tl.float32)
    tl.store(y + at, (g / (1 + tl.exp(-g)) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(dy, gate, up, dgate, dup, count, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < count
    d = tl.load(dy + at, mask=inside, other=0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0).to(tl.float32)
    s = 1 / (1 + tl.exp(-g))
    tl.store(dgate + at, (d * u * s * (1 + g * (1 - s))).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (d * g * s).to(dup.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_forward_kernel(joined, scales, y, N, NUMBERS: tl.constexpr):
    """Compute NUMBERS outputs of one row a program.

    The row's two scales are loaded once, and no number needs a division to find its row.
    """
    blocks = tl.cdiv(N, NUMBERS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * NUMBERS + tl.arange(0, NUMBERS)
    inside = column < N
    first = joined + row * 2 * N + column
    g = tl.load(first, mask=inside, other=0).to(tl.float32) * tl.load(scales + 2 * row)
    u = tl.load(first + N, mask=inside, other=0).to(tl.float32) * tl.load(scales + 2 * row + 1)
    tl.store(y + row * N + column, (g / (1 + tl.exp(-g)) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_backward_kernel(dy, joined, scales, djoined, N, NUMBERS: tl.constexpr):
    blocks = tl.cdiv(N, NUMBERS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * NUMBERS + tl.arange(0, NUMBERS)
    inside = column < N
    gate_at = row * 2 * N + column
    gate_scale = tl.load(scales + 2 * row)
    up_scale = tl.load(scales + 2 * row + 1)
    d = tl.load(dy + row * N + column, mask=inside, other=0).to(tl.float32)
    g = tl.load(joined + gate_at, mask=inside, other=0).to(tl.float32) * gate_scale
    u = tl.load(joined + gate_at + N, mask=inside, other=0).to(tl.float32) * up_scale
    s = 1 / (1 + tl.exp(-g))
    dgate = d * u * s * (1 + g * (1 - s)) * gate_scale
    tl.store(djoined + gate_at, dgate.to(djoined.dtype.element_ty), mask=inside)
    tl.store(djoined + gate_at + N, (d * g * s * up_scale).to(djoined.dtype.element_ty), mask=inside)


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up of contiguous tensors of one shape and dtype -> the same shape and dtype."""
    y = torch.empty_like(gate)
    if y.numel():
        with torch.cuda.device_of(gate):
            _forward_kernel[(triton.cdiv(y.numel(), NUMBERS),)](gate, up, y, y.numel(), NUMBERS=NUMBERS)
    return y


def backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dgate: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of gate and up from contiguous tensors of one shape and dtype.

    ``dgate`` is where the first is written, if given; it may be ``dy``.
    """
    dgate, dup = torch.empty_like(gate) if dgate is None else dgate, torch.empty_like(up)
    if dy.numel():
        with torch.cuda.device_of(dy):
            grid = (triton.cdiv(dy.numel(), NUMBERS),)
            _backward_kernel[grid](dy, gate, up, dgate, dup, dy.numel(), NUMBERS=NUMBERS)
    return dgate, dup


def scaled_forward(joined: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute the scaled product of contiguous ``joined: (S, 2 N)`` and ``scales: (S, 2)`` fp32 -> (S, N)."""
    rows, N = joined.shape[0], joined.shape[1] // 2
    y = joined.new_empty(rows, N)
    if y.numel():
        with torch.cuda.device_of(joined):
            grid = (rows * triton.cdiv(N, NUMBERS),)
            _scaled_forward_kernel[grid](joined, scales, y, N, NUMBERS=NUMBERS)
    return y


def scaled_backward(dy: torch.Tensor, joined: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of ``joined`` from contiguous ``dy: (S, N)`` -> (S, 2 N)."""
    djoined, (rows, N) = torch.empty_like(joined), dy.shape
    if dy.numel():
        with torch.cuda.device_of(dy):
            grid = (rows * triton.cdiv(N, NUMBERS),)
            _scaled_backward_kernel[grid](dy, joined, scales, djoined, N, NUMBERS=NUMBERS)
    return djoined
