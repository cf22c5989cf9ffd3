"""Estimate how long a product takes from how its work is divided among thread blocks; ``rule.py`` chooses by it.

A variant takes ``start`` once and ``stage`` for each stage of columns that its busiest block goes through. It takes
``end`` for each tile, or part of one, that this block finishes. It takes ``sum`` for each partial sum that this block
adds from others, and ``shared`` once where any are exchanged.

``stage`` is the soft maximum of the variant's own time and of what memory allows when all blocks stream weights at
once. ``kernels/bench/fit.py`` fits the coefficients to measured times; ``linear_tiles.json`` holds them with the name
of the GPU. All times are microseconds.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from qerl_kernels.adapter import SPLITS, Shrink
from qerl_kernels.gemm import Configuration, divide
from qerl_kernels.tiles import TILE_BYTES

SHARPNESS = 4  # exponent of the smooth maximum of two times
NEIGHBOURS = 8  # token tiles that share a weight tile while it is in L2: RUN_ROWS of schedule.cuh


class Coefficients(NamedTuple):
    """Hold one variant's coefficients in microseconds; the head of this file explains them."""

    start: float
    stage: float
    end: float
    sum: float
    shared: float


class Work(NamedTuple):
    """Count what the busiest block does.

    It goes through ``stages``, finishes ``ends`` of tiles and adds ``sums`` of other blocks, while ``streaming`` blocks
    read weights.
    """

    stages: float
    ends: float
    sums: int
    streaming: int


@dataclass(frozen=True)
class Machine:
    """Describe a GPU: its name, its multiprocessors, its clusters and the TB/s at which weights stream.

    ``clusters[i - 1]`` is how many clusters of i thread blocks it holds at one time. ``refused`` are the variants that
    must not run there.
    """

    gpu: str
    multiprocessors: int
    clusters: tuple[int, ...]
    rate: float
    refused: frozenset[Configuration] = frozenset()


def larger(a: float, b: float) -> float:
    """Return a smooth maximum of two times that mostly overlap."""
    return (a**SHARPNESS + b**SHARPNESS) ** (1 / SHARPNESS)


@functools.lru_cache(maxsize=2**16)
def work(c: Configuration, N: int, K: int, M: int, at_once: int) -> Work:
    """Count the busiest block's share of a product on a GPU that runs ``at_once`` blocks, or clusters, at one time.

    Raises ValueError as ``gemm.divide``.
    """
    d = divide(c, N, K, M, at_once)
    if c.cluster > 1:
        rounds = -(-d.tiles // at_once)
        return Work(rounds * -(-d.steps // c.cluster), rounds, 0, min(d.tiles, at_once) * c.cluster)
    whole = -(-(d.tiles - d.shared) // d.grid)  # uncut tiles of the busiest block
    if not d.shared:
        return Work(whole * d.steps, whole, 0, d.grid)
    units = d.shared * d.steps
    run = -(-units // d.grid)
    even = run * d.grid == units and d.steps % run == 0  # no run crosses the end of a tile
    others = 1 if run >= d.steps else -(-d.steps // run) - even
    return Work(whole * d.steps + run, whole + (1 if even else 1 + run / d.steps), others, d.grid)


def memory_time(c: Configuration, w: Work, M: int, rate: float) -> float:
    """Return the microseconds that memory alone takes for one stage when all blocks stream weights.

    Weights that neighbouring token tiles share are read once.
    """
    stage_bytes = c.tile_blocks() * c.depth * TILE_BYTES  # of weights, that a block reads in one stage
    return stage_bytes * w.streaming / min(-(-M // c.tokens), NEIGHBOURS) / rate / 1e6


def product(c: Configuration, by: Coefficients, w: Work, M: int, rate: float) -> float:
    """Return the microseconds of one product of M tokens by one variant, without an adapter."""
    stage = larger(by.stage, memory_time(c, w, M, rate))
    return by.start + stage * w.stages + by.end * w.ends + by.sum * w.sums + by.shared * (w.sums > 0)


class ShrinkCoefficients(NamedTuple):
    """Hold the coefficients of the adapter's small kernel, and of what an adapter adds to a product.

    All but ``late`` are microseconds. ``start``, ``round`` and ``chunk`` have one number a variant of the small kernel,
    in the order of ``adapter.VARIANTS``.
    """

    start: tuple[float, ...]
    round: tuple[float, ...]
    chunk: tuple[float, ...]
    added: float  # once, for any product
    of_columns: float  # for 64 tokens of a tile and 32 columns of s
    of_end: float  # for each tile that the busiest block finishes
    late: float  # share of the small kernel's time that a product waits if both need the same multiprocessors

    def alone(self, how: Shrink, index: int, M: int, K: int, R: int, multiprocessors: int) -> float:
        """Return the microseconds of the small kernel whose variant has this ``index``."""
        rounds, chunks = shrink_work(how, M, K, R, multiprocessors)
        return self.start[index] + rounds * (self.round[index] + self.chunk[index] * chunks)

    def together(self, base: float, small: float, fits: bool, tokens: int, R: int, ends: float) -> float:
        """Return the microseconds of the small kernel and of the product that adds its result.

        ``base`` and ``small`` are the times of each alone; with ``fits`` both run at one time. ``tokens`` are those of
        a tile, and ``ends`` the tiles that the busiest block finishes.
        """
        both = larger(base, small) if fits else base + self.late * small
        return both + self.added + self.of_columns * tokens / 64 * R / 32 + self.of_end * ends


def shrink_work(how: Shrink, M: int, K: int, R: int, multiprocessors: int) -> tuple[int, int]:
    """Return how many rounds the small kernel takes, and how many chunks of 32 columns a warp reads in each.

    One block runs on each multiprocessor at a time.
    """
    at_once = multiprocessors // SPLITS * SPLITS
    parts = -(-M // how.variant.tokens)
    rounds = -(-parts // how.grid(M, R)[2]) * -(-how.blocks(M, R) // at_once)
    return rounds, -(-K // (32 * SPLITS * how.variant.warps))


class ExpandCoefficients(NamedTuple):
    """Hold the microseconds of expanding the weight and multiplying with cuBLAS.

    They count once, for a MB moved, for a GFLOP, and for a round of cuBLAS's tiles a thousand columns long.
    """

    start: float
    megabyte: float
    gflop: float
    round: float

    def whole(self, N: int, K: int, M: int, multiprocessors: int) -> float:
        """Return the microseconds of one product of M tokens with a weight of (N, K)."""
        return sum(c * f for c, f in zip(self, expand_features(N, K, M, multiprocessors), strict=True))


def expand_features(N: int, K: int, M: int, multiprocessors: int) -> tuple[float, float, float, float]:
    """Return what ``ExpandCoefficients`` are multiplied by.

    These are 1, the MB that expanding moves, the GFLOP, and the rounds of cuBLAS's 128 x 256 tiles times K / 1000.
    """
    rounds = -(-(-(-N // 128) * -(-M // 256)) // multiprocessors)
    return 1.0, 2.5625e-6 * N * K, 2e-9 * M * N * K, rounds * K / 1000
