"""Prove each variant of the product on a machine before it is used there: its outputs must be exact.

One-hot tokens must give the weight itself, bit for bit, over all 16 codes under every block scale. With a small adapter
they must give the rounded sum of both. That is a few launches of microseconds a variant. The adapter's small kernel and
the kernel that expands W0 are checked on the same numbers.

Each compiled code is proven once. A verdict lies beside the machine code in the cache, under the hash of the code, the
GPU's name and this file. Without a cache each process proves the code anew. ``kernels/bench/gate.py`` checks more, on
the GPU and the compiler of the committed results.
"""

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from qerl_kernels import compiler, gemm, nvfp4, tiles
from qerl_kernels.adapter import VARIANTS, Adapter, Shrink, Variant, load_shrink, shrink, shrink_code, spans
from qerl_kernels.counters import forget_counters

ROWS, COLUMNS = 144, 512  # more blocks of 16 than there are scales; not a multiple of a tile's 64 rows
PASSED, FAILED = b"passed", b"failed: "


class Problem(NamedTuple):
    """Hold what a variant is examined on.

    ``weight`` has every product of code and scale. ``alone`` and ``adapted`` are what the tokens ``x`` must give
    without and with the ``adapter``.
    """

    weight: tiles.TiledWeight
    x: torch.Tensor
    adapter: Adapter
    alone: torch.Tensor
    adapted: torch.Tensor


def usable(
    configurations: Iterable[gemm.Configuration], device: torch.device, operand: torch.dtype
) -> list[gemm.Configuration]:
    """Return the configurations that are proven, loaded on ``device``.

    Warns once, with the first reason, where some fail; the caller reports where all do.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    proven, failed = [], []
    for configuration in configurations:
        reason = verdict(configuration, index, operand)
        if reason is None:
            proven.append(configuration)
        else:
            failed.append(f"{configuration}: {reason}")
    if proven and failed:  # where all fail the caller raises
        warnings.warn(
            f"{len(failed)} of {len(proven) + len(failed)} kernels do not load or compute wrong numbers on this "
            f"machine and are not used: {failed[0]}",
            stacklevel=2,
        )
    return proven


@functools.cache
def verdict(configuration: gemm.Configuration, device: int, operand: torch.dtype) -> str | None:
    """Return what is wrong with a variant on this GPU, or None if it is proven.

    A failure to compile or load is not kept on disk, since it may succeed another time.
    """
    try:
        gemm.load(configuration, torch.device("cuda", device), operand)
        code = gemm.machine_code(configuration, operand)
    except compiler.CompileError as error:
        return f"does not load: {error}"
    return _read_or_examine([code], device, lambda: examine(configuration, problem(device, operand)))


@functools.cache
def verdict_beside(device: int, operand: torch.dtype) -> str | None:
    """Load the kernels that run beside every variant; return what is wrong with them, or None if they are proven.

    A failure to compile or load holds for this process, so that not every layer tries again. It is not kept on disk.
    """
    try:
        load_shrink(torch.device("cuda", device), operand)
        codes = [*(shrink_code(variant, operand) for variant in VARIANTS), gemm.dequantize_code(operand)]
    except compiler.CompileError as error:
        return f"does not load: {error}"
    return _read_or_examine(codes, device, lambda: examine_beside(problem(device, operand)))


def _read_or_examine(codes: list[bytes], device: int, examine_now: Callable[[], str | None]) -> str | None:
    this_file = Path(__file__).read_bytes()
    key = hashlib.sha256(b"\0".join([*codes, torch.cuda.get_device_name(device).encode(), this_file])).hexdigest()
    content = compiler.kept(f"{key}.verdict")
    if content is None:
        reason = examine_now()
        content = PASSED if reason is None else FAILED + reason.encode()
        compiler.keep(f"{key}.verdict", content)
    if content == PASSED:
        return None
    return f"{content.removeprefix(FAILED).decode()} (to ask again: delete {key}.verdict in {compiler.cache_folder()})"


def forget() -> None:
    """Free what proofs have allocated on the GPU.

    While vLLM loads a model with sleep mode, all allocations lie in memory that it takes away when it sleeps. At level
    2 it brings that memory back with other contents. Another engine in the process may launch kernels meanwhile.
    """
    problem.cache_clear()
    forget_counters()


def examine(configuration: gemm.Configuration, example: Problem) -> str | None:
    """Return what one variant computes wrongly, or None if nothing."""
    launch = Shrink(Variant(8, 1, 16), 8)
    for tokens in (COLUMNS, 1):
        x = example.x[:tokens]
        for name, expected, adapter in (("weight", example.alone, None), ("adapter", example.adapted, example.adapter)):
            y = gemm.product(x, example.weight, configuration, None, adapter, None if adapter is None else launch)
            if wrong := int((y != expected[:tokens]).sum()):
                return f"{name}: {wrong} of {y.numel()} outputs of {tokens} tokens differ"
    return None


def examine_beside(example: Problem) -> str | None:
    """Return what is wrong in the expanded weight or in any launch of the adapter's small kernel.

    Returns None if nothing is.
    """
    operand = example.weight.operand
    w = example.alone.roll(-3, 0).t() * nvfp4.expanded_factor(operand)  # the factor is exact
    if wrong := int((gemm.dequantize(example.weight) != w).sum()):
        return f"expanded weight: {wrong} of {w.numel()} numbers differ"
    a = example.adapter.a
    for variant in VARIANTS:
        for tokens in (COLUMNS, 1):
            s = shrink(example.x[:tokens], a, Shrink(variant, 7))
            if wrong := int((s != a.roll(3, 1).t()[:tokens]).sum()):
                return f"adapter's first product, {variant}: {wrong} of {s.numel()} numbers of {tokens} tokens differ"
    return None


@functools.cache
def problem(device: int, operand: torch.dtype) -> Problem:
    """Return the problem on a GPU, for activations of one type, made once until ``forget``."""
    return make(torch.device("cuda", device), operand)


def make(device: torch.device, operand: torch.dtype) -> Problem:
    """Make a problem whose fp32 sums are exact, so that each expected output is one rounding of a known number.

    Autocast is off. A trainer may ask first in a forward pass under autocast, which would round in between; a right
    kernel would then be found wrong, and that verdict kept.
    """
    with torch.autocast(device.type, enabled=False):
        return _make(device, operand)


def _make(device: torch.device, operand: torch.dtype) -> Problem:
    codes = torch.arange(ROWS * COLUMNS, dtype=torch.int64).mul_(7).remainder_(16).view(ROWS, COLUMNS).to(torch.uint8)
    scales = torch.arange(ROWS * COLUMNS // nvfp4.GROUP_SIZE, dtype=torch.int64).remainder_(254).to(torch.uint8)
    scales = torch.where(scales < 127, scales, scales + 1).view(ROWS, -1)  # bytes 127 and 255 are NaN
    packed, block_scales = nvfp4.pack(codes).to(device), scales.view(torch.float8_e4m3fn).to(device)
    weight = tiles.tile_weight(packed, block_scales, torch.ones((), dtype=torch.float32, device=device), operand)
    w = nvfp4.dequantize(packed, block_scales).float()  # (N, K)
    a = (torch.arange(32 * COLUMNS, device=device).mul_(5).remainder_(13) - 6).view(32, COLUMNS).float()
    b = (torch.arange(ROWS * 32, device=device).mul_(3).remainder_(11) - 5).view(ROWS, 32).float()
    adapter = Adapter(a.to(operand), b.to(operand), spans([ROWS], 32).to(device))
    x = torch.eye(COLUMNS, dtype=torch.float32, device=device).roll(3, 0)  # token i is one in column i - 3
    adapted = (x @ w.t() + (x @ a.t()) @ b.t()).to(operand)
    return Problem(weight, x.to(operand), adapter, (x @ w.t()).to(operand), adapted)
