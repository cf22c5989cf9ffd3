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


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``gate``, ``up``: contiguous and alike -> the same."""
    y = torch.empty_like(gate)
    if y.numel():
        with torch.cuda.device_of(gate):
            _forward_kernel[(triton.cdiv(y.numel(), NUMBERS),)](gate, up, y, y.numel(), NUMBERS=NUMBERS)
    return y


def backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up; all contiguous and alike."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if dy.numel():
        with torch.cuda.device_of(dy):
            grid = (triton.cdiv(dy.numel(), NUMBERS),)
            _backward_kernel[grid](dy, gate, up, dgate, dup, dy.numel(), NUMBERS=NUMBERS)
    return dgate, dup
