"""How long a product takes, from how its work is divided among thread blocks: what ``rule.py`` chooses by.

A variant takes ``start`` once, ``stage`` for each stage of columns that its busiest block goes through, ``end`` for
each tile or part of a tile that this block finishes, ``sum`` for each sum that it adds up from other blocks, and
``shared`` once where any are exchanged. ``stage`` is the larger, softly, of the variant's own and of what memory
allows when all blocks stream weights at one time. The numbers are fitted to times (``kernels/bench/fit.py``) and
stand in ``linear_tiles.json`` with the GPU that they are of. All times are microseconds.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from qerl_kernels.adapter import SPLITS, Shrink
from qerl_kernels.gemm import Configuration, divide
from qerl_kernels.tiles import TILE_BYTES

SHARPNESS = 4  # of the larger of two times
NEIGHBOURS = 8  # token tiles that share a weight tile while it is in L2: RUN_ROWS of schedule.cuh


class Coefficients(NamedTuple):
    """Of one variant, in microseconds: see the head of this file."""

    start: float
    stage: float
    end: float
    sum: float
    shared: float


class Work(NamedTuple):
    """What the busiest block does: stages, ends of tiles, sums from others; and how many blocks stream at one time."""

    stages: float
    ends: float
    sums: int
    streaming: int


@dataclass(frozen=True)
class Machine:
    """A GPU: its name, multiprocessors, clusters of 1, 2, ... blocks at one time, and TB/s at which weights stream.

    ``refused`` are variants that are not to be used there.
    """

    gpu: str
    multiprocessors: int
    clusters: tuple[int, ...]
    rate: float
    refused: frozenset[Configuration] = frozenset()


def larger(a: float, b: float) -> float:
    """The larger of two times that mostly overlap."""
    return (a**SHARPNESS + b**SHARPNESS) ** (1 / SHARPNESS)


@functools.lru_cache(maxsize=2**16)
def work(c: Configuration, N: int, K: int, M: int, at_once: int) -> Work:
    """The busiest block's share of a product where ``at_once`` blocks, or clusters, run at one time."""
    d = divide(c, N, K, M, at_once)
    if c.cluster > 1:
        rounds = -(-d.tiles // at_once)
        return Work(rounds * -(-d.steps // c.cluster), rounds, 0, min(d.tiles, at_once) * c.cluster)
    whole = -(-(d.tiles - d.shared) // d.grid)  # of the busiest
    if not d.shared:
        return Work(whole * d.steps, whole, 0, d.grid)
    units = d.shared * d.steps
    run = -(-units // d.grid)
    even = run * d.grid == units and d.steps % run == 0  # no run goes over the end of a tile
    others = 1 if run >= d.steps else -(-d.steps // run) - even
    return Work(whole * d.steps + run, whole + (1 if even else 1 + run / d.steps), others, d.grid)


def stage_bytes(c: Configuration) -> int:
    """Bytes of weights of one stage."""
    return c.tile_blocks() * c.depth * TILE_BYTES


def memory_time(c: Configuration, w: Work, M: int, rate: float) -> float:
    """Of one stage, by memory alone, when all blocks stream; weights that several token tiles share are read once."""
    return stage_bytes(c) * w.streaming / min(-(-M // c.tokens), NEIGHBOURS) / rate / 1e6


def product(c: Configuration, by: Coefficients, w: Work, M: int, rate: float) -> float:
    """Of one product by one variant."""
    stage = larger(by.stage, memory_time(c, w, M, rate))
    return by.start + stage * w.stages + by.end * w.ends + by.sum * w.sums + by.shared * (w.sums > 0)


class ShrinkCoefficients(NamedTuple):
    """Of the adapter's small kernel by its variant, and of what an adapter adds to a product."""

    start: tuple[float, ...]
    round: tuple[float, ...]
    chunk: tuple[float, ...]
    added: float  # whatever the product
    of_columns: float  # for 64 tokens of a tile and 32 columns of s
    of_end: float
    late: float  # how much of the small kernel's time a product waits that takes its multiprocessors

    def alone(self, how: Shrink, index: int, M: int, K: int, R: int, multiprocessors: int) -> float:
        """The small kernel of the variant with this ``index``."""
        rounds, chunks = shrink_work(how, M, K, R, multiprocessors)
        return self.start[index] + rounds * (self.round[index] + self.chunk[index] * chunks)

    def together(self, base: float, small: float, fits: bool, tokens: int, R: int, ends: float) -> float:
        """The small kernel and a product of ``base``, with room for both at one time or not."""
        both = larger(base, small) if fits else base + self.late * small
        return both + self.added + self.of_columns * tokens / 64 * R / 32 + self.of_end * ends


def shrink_work(how: Shrink, M: int, K: int, R: int, multiprocessors: int) -> tuple[int, int]:
    """Rounds of tokens of the small kernel, one block a multiprocessor, and chunks of columns of a warp in each."""
    at_once = multiprocessors // SPLITS * SPLITS
    parts = -(-M // how.variant.tokens)
    rounds = -(-parts // how.grid(M, R)[2]) * -(-how.blocks(M, R) // at_once)
    return rounds, -(-K // (32 * SPLITS * how.variant.warps))


class ExpandCoefficients(NamedTuple):
    """Of expanding the weight and cuBLAS: to start, for a MB moved, for a GFLOP, for a round of its tiles."""

    start: float
    megabyte: float
    gflop: float
    round: float

    def whole(self, N: int, K: int, M: int, multiprocessors: int) -> float:
        """Of one product."""
        return sum(c * f for c, f in zip(self, expand_features(N, K, M, multiprocessors), strict=True))


def expand_features(N: int, K: int, M: int, multiprocessors: int) -> tuple[float, float, float, float]:
    """1, MB moved by expanding, GFLOP, and thousands of columns times rounds of cuBLAS's tiles, 128 x 256."""
    rounds = -(-(-(-N // 128) * -(-M // 256)) // multiprocessors)
    return 1.0, 2.5625e-6 * N * K, 2e-9 * M * N * K, rounds * K / 1000
