"""silu(gate) * up and its gradient on a GPU, one pass over memory each."""

import torch
import triton
import triton.language as tl

NUMBERS = 1024  # of one program


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
def _scaled_forward_kernel(joined, scales, y, count, N, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < count
    row = at // N
    first = joined + at + row * N  # row * 2 N + column
    g = tl.load(first, mask=inside, other=0).to(tl.float32) * tl.load(scales + 2 * row, mask=inside, other=0)
    u = tl.load(first + N, mask=inside, other=0).to(tl.float32) * tl.load(scales + 2 * row + 1, mask=inside, other=0)
    tl.store(y + at, (g / (1 + tl.exp(-g)) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_backward_kernel(dy, joined, scales, djoined, count, N, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < count
    row = at // N
    gate_at = at + row * N
    gate_scale = tl.load(scales + 2 * row, mask=inside, other=0)
    up_scale = tl.load(scales + 2 * row + 1, mask=inside, other=0)
    d = tl.load(dy + at, mask=inside, other=0).to(tl.float32)
    g = tl.load(joined + gate_at, mask=inside, other=0).to(tl.float32) * gate_scale
    u = tl.load(joined + gate_at + N, mask=inside, other=0).to(tl.float32) * up_scale
    s = 1 / (1 + tl.exp(-g))
    dgate = d * u * s * (1 + g * (1 - s)) * gate_scale
    tl.store(djoined + gate_at, dgate.to(djoined.dtype.element_ty), mask=inside)
    tl.store(djoined + gate_at + N, (d * g * s * up_scale).to(djoined.dtype.element_ty), mask=inside)


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``gate``, ``up``: contiguous and alike -> the same."""
    y = torch.empty_like(gate)
    if y.numel():
        with torch.cuda.device_of(gate):
            _forward_kernel[(triton.cdiv(y.numel(), NUMBERS),)](gate, up, y, y.numel(), NUMBERS=NUMBERS)
    return y


def backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dgate: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up; all contiguous and alike. ``dgate`` is where the first is written, if given; it may
    be ``dy``."""
    dgate, dup = torch.empty_like(gate) if dgate is None else dgate, torch.empty_like(up)
    if dy.numel():
        with torch.cuda.device_of(dy):
            grid = (triton.cdiv(dy.numel(), NUMBERS),)
            _backward_kernel[grid](dy, gate, up, dgate, dup, dy.numel(), NUMBERS=NUMBERS)
    return dgate, dup


def scaled_forward(joined: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``joined: (S, 2 N)`` and ``scales: (S, 2)`` fp32, both contiguous -> (S, N)."""
    rows, N = joined.shape[0], joined.shape[1] // 2
    y = joined.new_empty(rows, N)
    if y.numel():
        with torch.cuda.device_of(joined):
            grid = (triton.cdiv(y.numel(), NUMBERS),)
            _scaled_forward_kernel[grid](joined, scales, y, y.numel(), N, NUMBERS=NUMBERS)
    return y


def scaled_backward(dy: torch.Tensor, joined: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The gradient of ``joined``; all contiguous."""
    djoined = torch.empty_like(joined)
    if dy.numel():
        with torch.cuda.device_of(dy):
            grid = (triton.cdiv(dy.numel(), NUMBERS),)
            _scaled_backward_kernel[grid](
                dy, joined, scales, djoined, dy.numel(), joined.shape[1] // 2, NUMBERS=NUMBERS
            )
    return djoined
