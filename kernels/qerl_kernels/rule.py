"""Choose the variant of the product for (N, K, M), by itself or with an adapter: the one of least cost.

``cost.py`` computes each cost with coefficients that were fitted to times on one GPU. ``linear_tiles.json`` holds the
coefficients, that GPU's name and the conditions. Every layer and every number of tokens is chosen for in the same way,
so there is no list of layers. With many tokens the weight may also be expanded for cuBLAS. Nothing is tuned at run
time. A choice takes some 5 ms (12 with an adapter) and is made once a (layer, rounded M).
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from qerl_kernels import cost
from qerl_kernels.adapter import VARIANTS, Shrink, quickest
from qerl_kernels.compiler import CompileError
from qerl_kernels.cost import Coefficients, ExpandCoefficients, Machine, ShrinkCoefficients
from qerl_kernels.gemm import WHOLE, Configuration
from qerl_kernels.tiles import TILE

FILE = Path(__file__).with_name("linear_tiles.json")
WASTE = 1.3  # a variant fits if its tiles hold at most so many times the tokens,
SPARE = 40  # or at most so many tokens more
EXPAND_FROM = 512  # the fewest tokens for which expanding was timed
LONGEST_SHRINK = 4096  # the most tokens for which the adapter's small kernel was timed
NEAR = 1.25  # variants up to so many times the least cost alone are tried with an adapter
CUBLAS_SHRINK = 7.0  # microseconds to launch cuBLAS for an adapter's first product, and not to overlap with it
TB = 3.5  # TB/s of passes over x and y that an adapter of an expanded product takes


class Rule(NamedTuple):
    """Hold the content of ``linear_tiles.json``.

    That is its GPU, the variants with their coefficients, and the coefficients of the small kernel and of expanding.
    """

    machine: Machine
    variants: dict[Configuration, Coefficients]
    shrink: ShrinkCoefficients
    expand: ExpandCoefficients


class Choice(NamedTuple):
    """Say how a product runs, and how many microseconds that takes.

    Without a ``configuration`` the weight is expanded. Without a ``shrink`` cuBLAS takes the small kernel's place, if
    there is an adapter.
    """

    configuration: Configuration | None
    shrink: Shrink | None
    microseconds: float


@functools.cache
def rule() -> Rule:
    """Return the committed rule."""
    return read(json.loads(FILE.read_text()))


def read(data: dict) -> Rule:
    """Return the rule from the data that ``fit.py`` writes."""
    machine = Machine(data["gpu"], data["multiprocessors"], tuple(data["clusters"]), data["rate"])
    variants = {Configuration(*fields): Coefficients(*by) for fields, by in data["variants"]}
    small = data["shrink"]
    start, round_, chunk = (tuple(small[name]) for name in ("start", "round", "chunk"))
    shrink = ShrinkCoefficients(
        start, round_, chunk, small["added"], small["of_columns"], small["of_end"], small["late"]
    )
    return Rule(machine, variants, shrink, ExpandCoefficients(**data["expand"]))


@functools.cache
def machine_of(device: int) -> Machine:
    """Describe the GPU that is present, scaled from the rule's own.

    Clusters scale with the multiprocessors, and the rate of weights with the memory's rate, up to the rule's.
    """
    fitted, properties = rule().machine, torch.cuda.get_device_properties(device)
    share = properties.multi_processor_count / fitted.multiprocessors
    clusters = tuple(max(int(count * share), 1) if count else 0 for count in fitted.clusters)
    rate = fitted.rate * min(memory_rate(properties) / H200_MEMORY, 1.0) if memory_rate(properties) else fitted.rate
    if properties.name == fitted.gpu and properties.multi_processor_count == fitted.multiprocessors:
        return fitted
    return Machine(properties.name, properties.multi_processor_count, clusters, rate)


H200_MEMORY = 4.9  # TB/s by clock and width, on the GPU that the rule was fitted on


def memory_rate(properties: object) -> float:
    """Return the TB/s of a GPU's memory by its clock and width, or 0 where torch does not report them."""
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2 * clock * 1e3 * width / 8 / 1e12


def untuned(device: int = 0) -> str | None:
    """Return what to tell a user whose GPU is not the one that the rule was fitted on, or None where it is."""
    fitted, here = rule().machine, machine_of(device)
    if here == fitted:
        return None
    return (
        f"the choice of kernels was fitted on {fitted.gpu} with {fitted.multiprocessors} multiprocessors; "
        f"on {here.gpu} with {here.multiprocessors} it is carried over by multiprocessors and memory rate and was "
        "not measured. "
        "qerl bench kernels --tune fits it anew"
    )


def rounded(M: int) -> int:
    """Round M up to one of the few numbers that are chosen for: at most an eighth more from 64 tokens on."""
    step = 8 if M <= 512 else 32 if M <= 2048 else 256
    return -(-M // step) * step


def choose(N: int, K: int, M: int, columns: int = 0, may_expand: bool = True, machine: Machine | None = None) -> Choice:
    """Choose for M tokens and a weight of (N, K), with an adapter of this many ``columns`` of s, or none."""
    return _choose(N, K, rounded(M), columns, may_expand, machine or rule().machine)


@functools.lru_cache(maxsize=2**14)
def choose_fixed(N: int, K: int, M: int, columns: int, machine: Machine) -> Choice:
    """Choose for ``rounded`` M a launch whose order of summation is fixed: a token has the same bits in every batch.

    One block goes through the columns of a tile from the first to the last, in steps of 16 by the same instruction. The
    small kernel computes s with 16 warps, which divide the columns in the same way for every M. Raises CompileError
    where no such variant is left.
    """
    candidates = []
    for c, by in rule().variants.items():
        if c not in machine.refused and has_fixed_order(c) and fits(c, K, M):
            uncut = replace(c, splits=WHOLE)
            w = cost.work(uncut, N, K, M, machine.clusters[0])
            candidates.append((cost.product(uncut, by, w, M, machine.rate), uncut))
    if not candidates:
        raise CompileError(
            f"no variant that is proven on {machine.gpu} has one order of sums for ({N}, {K}), {M} tokens"
        )
    microseconds, configuration = min(candidates, key=lambda candidate: candidate[0])
    return Choice(configuration, quickest(M) if columns else None, microseconds)


def has_fixed_order(c: Configuration) -> bool:
    """Return True if a variant adds up the columns of an uncut tile in one go."""
    return c.cluster == 1 and c.kgroups == 1 and not c.synchronous


@functools.lru_cache(maxsize=2**14)
def _choose(N: int, K: int, M: int, columns: int, may_expand: bool, machine: Machine) -> Choice:
    choice = _by_kernel(N, K, M, columns, machine)
    if may_expand and M >= EXPAND_FROM:
        choice = min(choice, _expanded(N, K, M, columns, machine), key=lambda choice: choice.microseconds)
    return choice


def _expanded(N: int, K: int, M: int, columns: int, machine: Machine) -> Choice:
    microseconds = rule().expand.whole(N, K, M, machine.multiprocessors)
    if columns:
        microseconds += CUBLAS_SHRINK + (4 * M * N + 2 * M * K) / TB / 1e6
    return Choice(None, None, microseconds)


def _by_kernel(N: int, K: int, M: int, columns: int, machine: Machine) -> Choice:
    """Choose one variant that computes all tokens from the tiles."""
    alone = sorted(ranked(N, K, M, machine), key=lambda candidate: candidate[0])
    if not columns:
        microseconds, c = alone[0]
        return Choice(c, None, microseconds)
    candidates = [(microseconds, c) for microseconds, c in alone if microseconds <= NEAR * alone[0][0] + 1]
    microseconds, c, how = min(
        (pair for microseconds, c in candidates for pair in _with_shrink(N, K, M, columns, c, microseconds, machine)),
        key=lambda candidate: candidate[0],
    )
    return Choice(c, how, microseconds)


def ranked(N: int, K: int, M: int, machine: Machine) -> Iterator[tuple[float, Configuration]]:
    """Yield every variant that fits a weight of (N, K) and M tokens, in every division worth trying, with its cost."""
    for c, by in rule().variants.items():
        if c not in machine.refused and fits(c, K, M):
            for divided in divisions(c, N, K, M, machine):
                w = cost.work(divided, N, K, M, machine.clusters[c.cluster - 1])
                yield cost.product(divided, by, w, M, machine.rate), divided


def fits(c: Configuration, K: int, M: int) -> bool:
    """Return True if a variant's stages divide the columns and its tiles do not hold many more tokens than M."""
    return 2 * -(-K // (2 * TILE)) % c.depth == 0 and c.tokens * -(-M // c.tokens) <= max(WASTE * M, M + SPARE)


def divisions(c: Configuration, N: int, K: int, M: int, machine: Machine) -> list[Configuration]:
    """List the ways to cut one variant's tiles into runs.

    One has a run for each block of the whole GPU. Where tiles are few, others cut each tile into the same number of
    runs. The list is empty where clusters do not fit.
    """
    blocks = -(-N // TILE)
    tiles = -(-blocks // c.tile_blocks()) * -(-M // c.tokens)
    most, steps = machine.multiprocessors // tiles, 2 * -(-K // (2 * TILE)) // c.depth
    if c.cluster > 1:
        return [c] if c.cluster <= steps and machine.clusters[c.cluster - 1] else []
    splits = {0, most, most - 1, most // 2, 1} if most else {0}
    return [replace(c, splits=parts) for parts in sorted(splits) if 0 <= parts <= steps]


def _with_shrink(
    N: int, K: int, M: int, R: int, c: Configuration, alone: float, machine: Machine
) -> Iterator[tuple[float, Configuration, Shrink | None]]:
    """Yield the cost of one variant with each launch of the small kernel, and with cuBLAS in its place."""
    by = rule().shrink
    at_once = machine.clusters[c.cluster - 1]
    w = cost.work(c, N, K, M, at_once)
    if M > 512:
        yield alone + CUBLAS_SHRINK + 2 * M * K / TB / 1e6 + by.added + by.of_columns * c.tokens / 64 * R / 32, c, None
    if M > LONGEST_SHRINK:
        return
    for how, index in launches(M):
        small, blocks = by.alone(how, index, M, K, R, machine.multiprocessors), how.blocks(M, R)
        room = blocks <= machine.multiprocessors - w.streaming
        yield by.together(alone, small, room, c.tokens, R, w.ends), c, how
        beside = how._replace(beside=True)
        if c.cluster == 1 and not room and beside.left_free(M, R, machine.multiprocessors):
            less = cost.work(c, N, K, M, at_once - blocks)
            base = cost.product(c, rule().variants[replace(c, splits=0)], less, M, machine.rate)
            yield by.together(base, small, True, c.tokens, R, less.ends), c, beside


@functools.lru_cache(maxsize=2**12)
def launches(M: int) -> list[tuple[Shrink, int]]:
    """List launches of the small kernel for M tokens, with the index of their variant.

    They have few blocks, or as many as the tokens need.
    """
    listed = []
    for index, variant in enumerate(VARIANTS):
        most = -(-M // variant.tokens)
        if most > 64 or (variant.tokens > 8 and variant.tokens >= 2 * M) or (variant.tokens == 8 and M > 8):
            continue
        listed += [
            (Shrink(variant, blocks), index) for blocks in sorted({1, min(2, most), min(4, most), -(-most // 2), most})
        ]
    return listed
