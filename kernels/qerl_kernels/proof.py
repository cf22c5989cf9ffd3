"""A variant of the product is proven on a machine before it is used there: exact outputs, once for each compiled code.

One-hot tokens must give the weight itself, bit for bit, over all 16 codes under every block scale, and a small adapter
the rounded sum of both. That is a few launches of microseconds a variant. The kernels beside it, the adapter's first
product and W0 itself, are asked for the same numbers. A verdict lies beside the machine code in the cache, under the
hash of the code, the GPU's name and this file; without a cache it is found anew in each process. What the committed
gate (``kernels/bench/gate.py``) proves beyond that, it proves on the GPU and the compiler of the results.
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

ROWS, COLUMNS = 144, 512  # more blocks of 16 than there are scales; off the 64 rows of a tile
PASSED, FAILED = b"passed", b"failed: "


class Problem(NamedTuple):
    """A weight with every product of code and scale, tokens, an adapter, and what must come out without and with it."""

    weight: tiles.TiledWeight
    x: torch.Tensor
    adapter: Adapter
    alone: torch.Tensor
    adapted: torch.Tensor


def usable(
    configurations: Iterable[gemm.Configuration], device: torch.device, operand: torch.dtype
) -> list[gemm.Configuration]:
    """Those that are proven, loaded on ``device``; warns once of those that are not, by the first, if others are."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found, failed = [], []
    for configuration in configurations:
        said = verdict(configuration, index, operand)
        if said is None:
            found.append(configuration)
        else:
            failed.append(f"{configuration}: {said}")
    if found and failed:  # where all fail the caller has no kernel, and says why
        warnings.warn(
            f"{len(failed)} of {len(found) + len(failed)} kernels do not load or compute wrong numbers on this machine "
            f"and are not used: {failed[0]}",
            stacklevel=2,
        )
    return found


@functools.cache
def verdict(configuration: gemm.Configuration, device: int, operand: torch.dtype) -> str | None:
    """What is wrong with a variant on this GPU; None if it is proven.

    That one does not compile or load is not kept on disk: it may at another time.
    """
    try:
        gemm.load(configuration, torch.device("cuda", device), operand)
        code = gemm.machine_code(configuration, operand)
    except compiler.CompileError as error:
        return f"does not load: {error}"
    return _kept_or_found([code], device, lambda: examine(configuration, problem(device, operand)))


@functools.cache
def verdict_beside(device: int, operand: torch.dtype) -> str | None:
    """What is wrong with the kernels that run beside every variant; None if they are proven. Loads them.

    As ``verdict``: that one does not compile or load holds for this process, which does not try it once a layer.
    """
    try:
        load_shrink(torch.device("cuda", device), operand)
        codes = [*(shrink_code(variant, operand) for variant in VARIANTS), gemm.dequantize_code(operand)]
    except compiler.CompileError as error:
        return f"does not load: {error}"
    return _kept_or_found(codes, device, lambda: examine_beside(problem(device, operand)))


def _kept_or_found(codes: list[bytes], device: int, find: Callable[[], str | None]) -> str | None:
    asked = Path(__file__).read_bytes()
    key = hashlib.sha256(b"\0".join([*codes, torch.cuda.get_device_name(device).encode(), asked])).hexdigest()
    known = compiler.kept(f"{key}.verdict")
    if known is None:
        said = find()
        known = PASSED if said is None else FAILED + said.encode()
        compiler.keep(f"{key}.verdict", known)
    if known == PASSED:
        return None
    return f"{known.removeprefix(FAILED).decode()} (to ask again: delete {key}.verdict in {compiler.cache_folder()})"


def forget() -> None:
    """Keeps nothing on the GPU of what was allocated to ask.

    While vLLM loads a model with sleep mode, all that is allocated lies in memory that it takes away when it sleeps,
    and at level 2 brings back with other contents; another engine in the process may launch kernels meanwhile.
    """
    problem.cache_clear()
    forget_counters()


def examine(configuration: gemm.Configuration, given: Problem) -> str | None:
    """What one variant computes wrongly; None if nothing."""
    how = Shrink(Variant(8, 1, 16), 8)
    for tokens in (COLUMNS, 1):
        x = given.x[:tokens]
        for what, expected, adapter in (("weight", given.alone, None), ("adapter", given.adapted, given.adapter)):
            y = gemm.product(x, given.weight, configuration, None, adapter, None if adapter is None else how)
            if wrong := int((y != expected[:tokens]).sum()):
                return f"{what}: {wrong} of {y.numel()} outputs of {tokens} tokens differ"
    return None


def examine_beside(given: Problem) -> str | None:
    """What the adapter's first product, in any launch, or the expanded weight is wrong in; None if nothing."""
    operand = given.weight.operand
    w = given.alone.roll(-3, 0).t() * nvfp4.expanded_factor(operand)  # exact
    if wrong := int((gemm.dequantize(given.weight) != w).sum()):
        return f"expanded weight: {wrong} of {w.numel()} numbers differ"
    a = given.adapter.a
    for variant in VARIANTS:
        for tokens in (COLUMNS, 1):
            s = shrink(given.x[:tokens], a, Shrink(variant, 7))
            if wrong := int((s != a.roll(3, 1).t()[:tokens]).sum()):
                return f"adapter's first product, {variant}: {wrong} of {s.numel()} numbers of {tokens} tokens differ"
    return None


@functools.cache
def problem(device: int, operand: torch.dtype) -> Problem:
    """On a GPU, for activations of one type."""
    return make(torch.device("cuda", device), operand)


def make(device: torch.device, operand: torch.dtype) -> Problem:
    """All numbers are such that fp32 sums of them are exact: what comes out is one rounding of a known number.

    A trainer may ask first in a forward pass, under autocast, which would round in between: a right kernel would be
    found wrong, and that verdict kept.
    """
    with torch.autocast(device.type, enabled=False):
        return _make(device, operand)


def _make(device: torch.device, operand: torch.dtype) -> Problem:
    codes = torch.arange(ROWS * COLUMNS, dtype=torch.int64).mul_(7).remainder_(16).view(ROWS, COLUMNS).to(torch.uint8)
    scales = torch.arange(ROWS * COLUMNS // nvfp4.GROUP_SIZE, dtype=torch.int64).remainder_(254).to(torch.uint8)
    scales = torch.where(scales < 127, scales, scales + 1).view(ROWS, -1)  # 127 and 255 are no numbers
    packed, block_scales = nvfp4.pack(codes).to(device), scales.view(torch.float8_e4m3fn).to(device)
    weight = tiles.tile_weight(packed, block_scales, torch.ones((), dtype=torch.float32, device=device), operand)
    w = nvfp4.dequantize(packed, block_scales).float()  # (N, K)
    a = (torch.arange(32 * COLUMNS, device=device).mul_(5).remainder_(13) - 6).view(32, COLUMNS).float()
    b = (torch.arange(ROWS * 32, device=device).mul_(3).remainder_(11) - 5).view(ROWS, 32).float()
    adapter = Adapter(a.to(operand), b.to(operand), spans([ROWS], 32).to(device))
    x = torch.eye(COLUMNS, dtype=torch.float32, device=device).roll(3, 0)  # token i has its one in column i - 3
    adapted = (x @ w.t() + (x @ a.t()) @ b.t()).to(operand)
    return Problem(weight, x.to(operand), adapter, (x @ w.t()).to(operand), adapted)
