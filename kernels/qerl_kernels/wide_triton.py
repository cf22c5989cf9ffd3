"""Prepare the operands of wide.py on a GPU, in one pass over memory each."""

import torch
import triton
import triton.language as tl

NUMBERS = 1024  # numbers of a row that one program writes
ROWS = 16  # rows of W0 behind which one program writes


@triton.jit
def _silu_mul_kernel(gate, up, wide, K, R, stride, USED: tl.constexpr, NUMBERS: tl.constexpr):
    # USED is a constant, so that the compiler knows K + USED to be a multiple of 8 and stores 8 numbers at once.
    blocks = tl.cdiv(K + USED, NUMBERS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * NUMBERS + tl.arange(0, NUMBERS)
    inside = column < K
    g = tl.load(gate + row * K + column, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + row * K + column, mask=inside, other=0).to(tl.float32)
    behind = tl.where((column >= K + R) & (column < K + R + 2), 1.0, 0.0)
    y = tl.where(inside, g / (1 + tl.exp(-g)) * u, behind)
    tl.store(wide + row * stride + column, y.to(wide.dtype.element_ty), mask=column < K + USED)


@triton.jit
def _fill_kernel(
    w,
    B,
    bias,
    N,
    R,
    r,
    first,
    stride,
    factor,
    USED: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write ROWS rows a program; ``w`` points to the first number behind the first row of W0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside, by = row < N, tl.zeros([ROWS, COLUMNS], tl.float32) + factor
    is_b = inside & (column >= first) & (column < first + r)
    values = tl.div_rn(tl.load(B + row * r + column - first, mask=is_b, other=0).to(tl.float32), by)
    if WITH_BIAS:
        by_row = tl.zeros([ROWS, 1], tl.float32) + factor
        whole = tl.div_rn(tl.load(bias + row, mask=inside, other=0).to(tl.float32), by_row)
        rounded = whole.to(w.dtype.element_ty).to(tl.float32)
        values = tl.where(column == R, rounded, tl.where(column == R + 1, whole - rounded, values))
    tl.store(w + row * stride + column, values.to(w.dtype.element_ty), mask=inside & (column < USED))


def silu_mul(gate: torch.Tensor, up: torch.Tensor, wide: torch.Tensor, R: int) -> None:
    """Write silu(gate) * up and what stands behind it into ``wide: (T, K + used)``.

    ``gate`` and ``up`` are (T, K) and contiguous. Behind them stand R zeros, two ones, and zeros.
    """
    (T, K), used = gate.shape, wide.shape[1] - gate.shape[1]
    if T:
        with torch.cuda.device_of(gate):
            grid = (T * triton.cdiv(K + used, NUMBERS),)
            _silu_mul_kernel[grid](gate, up, wide, K, R, wide.stride(0), USED=used, NUMBERS=NUMBERS)


def fill(
    w: torch.Tensor, K: int, R: int, first: int, B: torch.Tensor, bias: torch.Tensor | None, factor: float
) -> None:
    """Do what ``wide.fill`` does, with ``B`` contiguous."""
    N, used = w.shape[0], w.shape[1] - K
    sizes = (N, R, B.shape[1], first, w.stride(0), factor)
    with torch.cuda.device_of(w):
        _fill_kernel[(triton.cdiv(N, ROWS),)](
            w[:, K:],
            B,
            B if bias is None else bias,
            *sizes,
            USED=used,
            WITH_BIAS=bias is not None,
            ROWS=ROWS,
            COLUMNS=triton.next_power_of_2(used),
        )
