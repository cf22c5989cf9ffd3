"""Add the policy adapter of one layer to the base's output: y + s B^T with s = x A^T.

The A of several parts (q, k, v; gate, up) stand one below the other, and B is block diagonal. So two products serve all
parts. A small kernel computes s first (``adapter_shrink.cu``); the tiled kernel adds s B^T at its end
(``nvfp4_tiles.cu``). s is rounded to the dtype of x, as the result of a separate product would be.
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

COLUMNS = 32  # columns of s and B that the tiled kernel takes at a time: R is a multiple of it
SMALL_M = 512  # the most tokens for which the small kernel runs by default; cuBLAS runs beyond
SPLITS = 8  # thread blocks of a cluster that share the columns of x: SPLITS of adapter_shrink.cu
BESIDE = 5  # a product leaves at most one in BESIDE multiprocessors to the small kernel


@dataclass(frozen=True)
class Adapter:
    """Hold one layer's adapter: ``a: (R, K)``, ``b: (N, R)``, R a multiple of 32, ``spans: (ceil(N / 64), 2)`` int32.

    Rows 64 i to 64 i + 63 of B are zero outside of columns ``spans[i, 0]`` to ``spans[i, 1]``, the end excluded.
    """

    a: torch.Tensor
    b: torch.Tensor
    spans: torch.Tensor


def padded(columns: int) -> int:
    """Return the number of columns that the kernels need for so many: the next multiple of 32, filled with zeros."""
    return -(-columns // COLUMNS) * COLUMNS


def spans(widths: list[int], rank: int) -> torch.Tensor:
    """Return (ceil(N / 64), 2) int32: the first and the end column of B that each block of 64 rows can use.

    N is the sum of ``widths``. Part i has ``widths[i]`` rows and columns ``i * rank`` to ``(i + 1) * rank``. Both ends
    are rounded outwards to multiples of 32.
    """
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    firsts = range(0, ends[-1], 64)
    blocks = [(bisect_right(ends, first), bisect_right(ends, min(first + 63, ends[-1] - 1))) for first in firsts]
    table = [(low * rank // COLUMNS * COLUMNS, padded((high + 1) * rank)) for low, high in blocks]
    return torch.tensor(table, dtype=torch.int32)


class Variant(NamedTuple):
    """Name the macros of ``adapter_shrink.cu`` for one variant.

    ``tokens`` and ``groups`` are the tokens and the groups of 16 rows of A of a thread block; ``warps`` are its warps.
    """

    tokens: int
    groups: int
    warps: int


class Shrink(NamedTuple):
    """Say how the small kernel is launched.

    ``most`` is the largest number of thread blocks among which the tokens are divided. Many blocks end sooner; few
    blocks can run beside a product that leaves them room. With ``beside`` the product leaves one multiprocessor for
    each block.
    """

    variant: Variant
    most: int
    beside: bool = False

    @classmethod
    def read(cls, listed: list) -> "Shrink":
        """Return the launch that ``linear_tiles.json`` and the bench files write as a list."""
        variant, *division = listed
        return cls(Variant(*variant), *division)

    def grid(self, M: int, R: int) -> tuple[int, int, int]:
        """Return the grid of thread blocks for M tokens and R rows of A."""
        return SPLITS, R // (16 * self.variant.groups), min(-(-M // self.variant.tokens), self.most)

    def blocks(self, M: int, R: int) -> int:
        """Return the number of thread blocks for M tokens and R rows of A."""
        return math.prod(self.grid(M, R))

    def left_free(self, M: int, R: int, multiprocessors: int) -> int:
        """Return how many multiprocessors the product leaves to this kernel.

        With ``beside`` that is one for each block, else none. It is none, too, where it would be more than one in
        BESIDE of all ``multiprocessors``.
        """
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
    """Return the launch that ends soonest by itself for M tokens."""
    variant = Variant(8, 1, 16) if M <= 8 else Variant(16, 1, 16) if M <= 64 else Variant(32, 2, 16)
    return Shrink(variant, -(-M // variant.tokens))


def is_small(M: int, how: Shrink | None) -> bool:
    """Return True if the small kernel computes s for M tokens, False if cuBLAS does."""
    return how is not None or M <= SMALL_M


def half(operand: torch.dtype) -> tuple[str, int]:
    """Return the macro HALF, which is 1 if a kernel's operands are float16 and 0 if they are bfloat16."""
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
    """Return the machine code of one variant of the small kernel.

    It is compiled once a process even without a cache on disk. Raises CompileError.
    """
    return compile_source(*_job(variant, operand))


@functools.cache
def load_shrink(device: torch.device, operand: torch.dtype = torch.bfloat16) -> None:
    """Load every variant of the small kernel on a device, compiling those that the cache does not hold.

    Raises CompileError where one does not compile or load.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    compile_ahead([_job(variant, operand) for variant in VARIANTS])
    for variant in VARIANTS:
        _kernel(variant, index, operand)


class Small:
    """Prepare a launch of the small kernel, ``call``, that lacks only its tensors.

    Only one thread may use it, since ``write`` overwrites its arguments.
    """

    def __init__(self, how: Shrink, M: int, K: int, R: int, device: int, operand: torch.dtype):
        self._pointers, self._numbers = (ctypes.c_void_p * 3)(), (ctypes.c_int * 4)(M, K, R)
        arguments = [*addresses(self._pointers), *addresses(self._numbers)]
        self.call = Call(_kernel(how.variant, device, operand), how.grid(M, R), arguments, overlap=True)

    def write(self, x: int, row_stride: int, a: int, s: int) -> None:
        """Set the addresses of x, A and s, and the numbers from one row of x to the next."""
        self._pointers[:], self._numbers[3] = [x, a, s], row_stride


def shrink(x: torch.Tensor, a: torch.Tensor, how: Shrink | None = None) -> torch.Tensor:
    """Compute s = x A^T: ``x: (M, K)``, ``a: (R, K)`` -> ``(M, R)`` in the dtype of x, with fp32 sums.

    On a GPU x and a are both bfloat16 or both float16, K and R are multiples of 16, and the rows of x start at
    multiples of 16 bytes. Without ``how`` the small kernel runs up to SMALL_M tokens, and cuBLAS beyond. The bits do
    not depend on ``how.most``. Raises CompileError where the small kernel does not compile or load.
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
