"""Apply the rotary position embedding on a GPU in one pass over memory; a program takes all heads of a token."""

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(
    x, cosine, sine, y, heads, HALF: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BACK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (column < HALF)
    at = token * heads * 2 * HALF + head * 2 * HALF + column
    angle, inside_angles = token * 2 * HALF + tl.arange(0, WIDTH), tl.arange(0, WIDTH) < HALF
    x1 = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    x2 = tl.load(x + at + HALF, mask=inside, other=0).to(tl.float32)
    c1 = tl.load(cosine + angle, mask=inside_angles, other=0)[None, :]
    c2 = tl.load(cosine + angle + HALF, mask=inside_angles, other=0)[None, :]
    s1 = tl.load(sine + angle, mask=inside_angles, other=0)[None, :]
    s2 = tl.load(sine + angle + HALF, mask=inside_angles, other=0)[None, :]
    if BACK:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    tl.store(y + at, y1.to(y.dtype.element_ty), mask=inside)
    tl.store(y + at + HALF, y2.to(y.dtype.element_ty), mask=inside)


def turn(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, back: bool) -> torch.Tensor:
    """Rotate contiguous tensors as ``rotate`` does, or with ``back`` compute its gradient."""
    *_, heads, D = x.shape
    y = torch.empty_like(x)
    if not x.numel():
        return y
    sizes = {"HALF": D // 2, "HEADS": triton.next_power_of_2(heads), "WIDTH": triton.next_power_of_2(D // 2)}
    warps = min(4, max(1, sizes["HEADS"] * sizes["WIDTH"] // 256))  # 8 pairs of numbers a thread, or fewer
    with torch.cuda.device_of(x):
        _kernel[(x.numel() // (heads * D),)](x, cosine, sine, y, heads, **sizes, BACK=back, num_warps=warps)
    return y
