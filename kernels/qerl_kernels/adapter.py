"""The policy adapter of one layer: y + s B^T with s = x A^T, whatever computes the base's y.

A of several parts (q, k, v; gate, up) stand one below the other and B is block diagonal, so that two products serve all
parts. The tiled kernel adds the second at its end (``nvfp4_tiles.cu``); the first is one small kernel ahead of it
(``adapter_shrink.cu``). s is rounded to the dtype of x, as a product of its own would be.
"""

import ctypes
import functools
import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from qerl_kernels.compiler import Defines, compile_ahead, compile_source
from qerl_kernels.driver import Call, Kernel, addresses, current_stream, launch

COLUMNS = 32  # of s and B that the tiled kernel takes at a time: their number is a multiple of it
SMALL_M = 512  # tokens up to which the small kernel is used where nothing else is said, cuBLAS beyond
SPLITS = 8  # of adapter_shrink.cu
BESIDE = 5  # a product leaves at most one in so many multiprocessors to it


@dataclass(frozen=True)
class Adapter:
    """``a: (R, K)``, ``b: (N, R)``, R a multiple of 32; ``spans: (ceil(N / 64), 2)`` int32.

    Outside of columns ``spans[i, 0]`` to ``spans[i, 1]`` the rows of B from 64 i on are zero.
    """

    a: torch.Tensor
    b: torch.Tensor
    spans: torch.Tensor


def padded(columns: int) -> int:
    """The number of columns with zeros at the end that the kernels need."""
    return -(-columns // COLUMNS) * COLUMNS


def spans(widths: list[int], rank: int) -> torch.Tensor:
    """(ceil(N / 64), 2) int32: which columns of B the rows of each 64-row block can have, rounded outwards to 32.

    Row part i, ``widths[i]`` rows, has columns ``i rank`` to ``(i + 1) rank``.
    """
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    firsts = range(0, ends[-1], 64)
    blocks = [(bisect_right(ends, first), bisect_right(ends, min(first + 63, ends[-1] - 1))) for first in firsts]
    table = [(low * rank // COLUMNS * COLUMNS, padded((high + 1) * rank)) for low, high in blocks]
    return torch.tensor(table, dtype=torch.int32)


class Variant(NamedTuple):
    """The macros of ``adapter_shrink.cu``: tokens and sixteens of rows of A that a block has, and its warps."""

    tokens: int
    groups: int
    warps: int


class Shrink(NamedTuple):
    """How the small kernel is launched: few blocks hide behind a product that has room for them, many end sooner.

    ``most`` is the largest number of blocks among which tokens are divided; with ``beside`` a product that would take
    every multiprocessor leaves one for each block.
    """

    variant: Variant
    most: int
    beside: bool = False

    @classmethod
    def read(cls, listed: list) -> "Shrink":
        """From a list as json writes it."""
        variant, *rest = listed
        return cls(Variant(*variant), *rest)

    def grid(self, M: int, R: int) -> tuple[int, int, int]:
        """The thread blocks for M tokens and R rows of A."""
        return SPLITS, R // (16 * self.variant.groups), min(-(-M // self.variant.tokens), self.most)

    def blocks(self, M: int, R: int) -> int:
        """Thread blocks in all."""
        return math.prod(self.grid(M, R))

    def left_free(self, M: int, R: int, multiprocessors: int) -> int:
        """How many the product leaves to this kernel: one for each block, or none where that would be many."""
        blocks = self.blocks(M, R)
        return blocks if self.beside and BESIDE * blocks <= multiprocessors else 0


VARIANTS = (
    Variant(8, 1, 16),
    Variant(8, 2, 16),
    Variant(16, 1, 16),
    Variant(16, 2, 16),
    Variant(32, 2, 16),
    Variant(64, 2, 8),
)


def quickest(M: int) -> Shrink:
    """The launch that ends soonest by itself."""
    variant = Variant(8, 1, 16) if M <= 8 else Variant(16, 1, 16) if M <= 64 else Variant(32, 2, 16)
    return Shrink(variant, -(-M // variant.tokens))


def is_small(M: int, how: Shrink | None) -> bool:
    """Whether the small kernel makes s of M tokens, and not cuBLAS."""
    return how is not None or M <= SMALL_M


def half(operand: torch.dtype) -> tuple[str, int]:
    """The macro that says whether a kernel's operands are float16."""
    return "HALF", int(operand == torch.float16)


@functools.cache
def _kernel(variant: Variant, device: int, operand: torch.dtype) -> Kernel:
    with torch.cuda.device(device):
        memory = 4 * (variant.warps + 1) * 16 * variant.groups * variant.tokens
        code = shrink_code(variant, operand)
        return Kernel(code, "adapter_shrink", 32 * variant.warps, memory, cluster=SPLITS)


def _job(variant: Variant, operand: torch.dtype) -> tuple[str, Defines]:
    source = Path(__file__).with_name("adapter_shrink.cu").read_text()
    fields = ((name.upper(), value) for name, value in variant._asdict().items())
    return source, (*fields, half(operand))


@functools.cache
def shrink_code(variant: Variant, operand: torch.dtype) -> bytes:
    """The machine code of one variant of the small kernel, compiled once where there is no cache, too."""
    return compile_source(*_job(variant, operand))


@functools.cache
def load_shrink(device: torch.device, operand: torch.dtype = torch.bfloat16) -> None:
    """Compile the small kernels, or fetch them from the cache, and load them on a device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    compile_ahead([_job(variant, operand) for variant in VARIANTS])
    for variant in VARIANTS:
        _kernel(variant, index, operand)


class Small:
    """A launch of the small kernel, ``call``, with all but its tensors in place; of one thread."""

    def __init__(self, how: Shrink, M: int, K: int, R: int, device: int, operand: torch.dtype):
        self._pointers, self._numbers = (ctypes.c_void_p * 3)(), (ctypes.c_int * 4)(M, K, R)
        arguments = [*addresses(self._pointers), *addresses(self._numbers)]
        self.call = Call(_kernel(how.variant, device, operand), how.grid(M, R), arguments, overlap=True)

    def write(self, x: int, row_stride: int, a: int, s: int) -> None:
        """Where the tensors lie, and how many numbers the rows of x are apart."""
        self._pointers[:], self._numbers[3] = [x, a, s], row_stride


def shrink(x: torch.Tensor, a: torch.Tensor, how: Shrink | None = None) -> torch.Tensor:
    """s = x A^T: ``x: (M, K)``, ``a: (R, K)`` -> ``(M, R)`` in the dtype of x, sums in fp32.

    On a GPU x and a are both bfloat16 or both float16, K is a multiple of 16, and the rows of x start at multiples of
    16 bytes. Without ``how`` the small kernel runs up to SMALL_M tokens, beyond them cuBLAS. The bits do not depend on
    ``how.most``.
    """
    M, K = x.shape
    R = a.shape[0]
    if not x.is_cuda or not is_small(M, how):
        return torch.nn.functional.linear(x, a)
    s = torch.empty(M, R, dtype=x.dtype, device=x.device)
    small = Small(how or quickest(M), M, K, R, x.device.index, x.dtype)
    small.write(x.data_ptr(), x.stride(0), a.data_ptr(), s.data_ptr())
    launch(current_stream(x.device.index), small.call)
    return s
