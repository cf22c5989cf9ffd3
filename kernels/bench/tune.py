"""Gate, then time variants of the product over random layers, for fit.py to make the rule from.

``python tune.py --out tune.json [--layers 34] [--seed 1] [--seconds 400] [--guided]``. Layers are drawn from layers.py,
numbers of tokens from FEW and MANY; at each point cuBLAS, the expanded product and a random choice of variants that
could be the fastest take turns, then, for every other layer, the fastest again with an adapter of rank 32 under several
launches of its small kernel. A variant that the gate refuses is named and left out; one that hangs ends only the
process that tries it. The file is written after each layer.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import gate
import torch
from layers import Layer, all_layers
from qerl_kernels import gemm, linear_tiles, rule, tiles
from qerl_kernels.adapter import Adapter, Shrink, padded, spans
from qerl_kernels.conditions import conditions
from qerl_kernels.cost import Machine
from timing import copies, interleaved

FEW = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
MANY = (272, 288, 320, 352, 384, 416, 448, 480, 512, 576, 640, 704, 768, 896, 1024, 1280, 1536, 2048)
MOST = (3072, 4096, 6144, 8192)
# by the tokens of a tile: digits of (warpgroups, kgroups, rows, depth, group, ahead, synchronous), a kernel each
KERNELS = {
    (8,): "4114401 4112401 3122401 4214401 4414201 4212401",
    (16,): "4214400 4114400 3122401 4214401 4212200 4112400",
    (24, 32): "4414200 4214410 4114200 3122400 4212200 4112400",
    (48, 64): "4414200 3114200 3112200 2122400 4112200 4212210",
    (80, 96, 112): "2112200 3112200 2122400 2212210",
    (128,): "2112200 3112200 2122400 2212210 2112210",
    (144, 160, 176): "2111100 3111100 2112200 3112200 2121200 3111200 2212200",
    (192, 208, 224, 240): "2111100 2111200 2112200 2112400",
    (256,): "2111100 2111210 2111200 2112200 2112400",
}
MULTIPROCESSORS = 132
RANK = 32
WASTE = 1.16  # most tokens of tiles for each token that there is, where no rule guides


def every_variant() -> list[gemm.Configuration]:
    """Return one configuration a kernel, with ``splits`` 0."""
    configurations = []
    for sizes, kernels in KERNELS.items():
        for size, digits in itertools.product(sizes, kernels.split()):
            for cluster in (1, 2, 4) if size <= 32 or size > 128 else (1, 2, 3, 4, 8):
                with contextlib.suppress(ValueError):
                    configurations.append(gemm.deepest(size, *map(int, digits), cluster))
    return [c for c in configurations if fits_in_stages(c)]


def fits_in_stages(c: gemm.Configuration) -> bool:
    """Return True if the sums of a cluster's blocks fit where the stages were: schedule.cuh asserts it."""
    stages = c.stages * c.depth * (c.tokens * 128 + c.tile_blocks() * tiles.TILE_BYTES)
    return c.cluster == 1 or 4 * 64 * c.tile_blocks() * c.tokens * c.kgroups <= stages


def could_be_fastest(
    variants: list[gemm.Configuration], N: int, K: int, M: int, machine: Machine
) -> list[gemm.Configuration]:
    """Return the ways to run each variant, without those of narrow tiles for many tokens and of too many clusters."""
    least, ways = min(M, 48 if M <= 256 else 128), list[gemm.Configuration]()
    for c in variants:
        across = -(-M // c.tokens)
        blocks = -(-N // tiles.TILE // c.tile_blocks()) * across * c.cluster
        is_crowded = c.cluster > 1 and blocks > 3 * machine.multiprocessors
        if c.tokens >= least and c.tokens * across <= WASTE * M and rule.fits(c, K, M) and not is_crowded:
            ways += rule.divisions(c, N, K, M, machine)
    return ways


def worth_it(
    variants: list[gemm.Configuration], draw: random.Random, N: int, K: int, M: int
) -> list[gemm.Configuration]:
    """Return what the present rule ranks fastest, some that it ranks next, and some that it does not know."""
    machine = rule.rule().machine
    ranked = [
        c for _, c in sorted(rule.ranked(N, K, M, machine), key=lambda one: one[0]) if replace(c, splits=0) in variants
    ]
    unknown = [c for c in variants if c not in rule.rule().variants and rule.fits(c, K, M)]
    unknown = [d for c in unknown for d in rule.divisions(c, N, K, M, machine)[:3]]
    others = ranked[12:60]
    return [*ranked[:12], *draw.sample(others, min(4, len(others))), *draw.sample(unknown, min(10, len(unknown)))]


def random_weights(N: int, K: int) -> list[tiles.TiledWeight]:
    """Return so many random weights of one layer that no cache holds them, with block scales of ordinary size."""
    shape = -(-N // 64), 2 * -(-K // 128), tiles.TILE_BYTES
    weights = []
    for _ in range(copies(shape[0] * shape[1] * shape[2])):
        data = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        data[..., tiles.CODE_BYTES :].remainder_(40).add_(70)
        scale = torch.full((N,), 1e-3, device="cuda")
        counters = torch.zeros(tiles.COUNTERS, dtype=torch.int32, device="cuda")
        weights.append(tiles.TiledWeight(data, scale, counters, N, K, torch.tensor(1e-3)))
    torch.cuda.synchronize()
    return weights


def random_adapters(layer: Layer, count: int) -> list[Adapter]:
    """Return adapters of one layer's parts, of rank RANK."""
    R, table = padded(RANK * len(layer.widths)), spans(list(layer.widths), RANK).cuda()
    ends = torch.tensor(layer.widths).cumsum(0).cuda()
    part_of_row = torch.bucketize(torch.arange(layer.N, device="cuda"), ends, right=True)
    own = part_of_row[:, None] == torch.arange(R, device="cuda") // RANK  # B is block diagonal
    return [
        Adapter(
            torch.randn(R, layer.K, device="cuda").bfloat16(),
            (torch.randn(layer.N, R, device="cuda") * own / 100).bfloat16(),
            table,
        )
        for _ in range(count)
    ]


def gate_in_processes(
    variants: list[gemm.Configuration], processes: int, operand: str = "bfloat16"
) -> tuple[list[gemm.Configuration], list[str]]:
    """Return those that pass the gate, and why the others do not; each process stops at one that hangs."""
    lists = [json.dumps([astuple(c) for c in variants[first::processes]]) for first in range(processes)]

    def one(listed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, __file__, "--gate", operand], input=listed, text=True, capture_output=True
        )

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        done = list(pool.map(one, lists))
    lines = [json.loads(line) for process in done for line in process.stdout.splitlines() if line.startswith("{")]
    passed = [gemm.Configuration(*line["passed"]) for line in lines if "passed" in line]
    refused = [line["refused"] for line in lines if "refused" in line]
    refused += [process.stderr.strip()[-300:] for process in done if process.returncode]
    return passed, refused


def gate_here(operand: str) -> None:
    """Print a line for each configuration of standard input: whether it passes the gate."""
    for fields in json.loads(sys.stdin.read()):
        c = gemm.Configuration(*fields)
        try:
            with gate.within_a_minute():
                gate.check(c, getattr(torch, operand))
            print(json.dumps({"passed": fields}), flush=True)
        except (AssertionError, RuntimeError) as error:
            print(json.dumps({"refused": f"{c}: {error}"}), flush=True)


class Sweep:
    """Time points in turn, and collect their rows."""

    def __init__(self, variants: list[gemm.Configuration], seed: int, guided: bool):
        self.variants, self.draw, self.guided = variants, random.Random(seed), guided
        self.of = {c: i for i, c in enumerate(variants)}
        self.rows: list[dict] = []
        self.adapted: list[dict] = []

    def name(self, c: gemm.Configuration) -> str:
        """Return the index of the kernel and the number of runs that tiles are cut into, such as "12:3"."""
        return f"{self.of[replace(c, splits=0)]}:{c.splits}"

    def point(
        self, layer: Layer, M: int, weights: list[tiles.TiledWeight], dense: list[torch.Tensor], at_most: int
    ) -> dict:
        """Time one layer and number of tokens, and return its row."""
        x = torch.randn(M, layer.K, device="cuda").to(torch.bfloat16)
        if self.guided:
            tried = worth_it(self.variants, self.draw, layer.N, layer.K, M)
        else:
            tried = could_be_fastest(self.variants, layer.N, layer.K, M, rule.machine_of(0))
            tried = self.draw.sample(tried, min(at_most, len(tried)))
        calls = {"bf16": [partial(torch.nn.functional.linear, x, w) for w in dense]}
        for c in tried:
            calls[self.name(c)] = [partial(gemm.product, x, w, c) for w in weights]
        if M >= rule.EXPAND_FROM:
            calls["expand"] = [partial(linear_tiles.expand_and_multiply, x, w, 1e-3, None) for w in weights]
        us = interleaved(calls, rounds=3, at_least=20 if M <= 256 else 6)
        row = {"layer": layer.name, "N": layer.N, "K": layer.K, "M": M, "us": {k: round(v, 2) for k, v in us.items()}}
        self.rows.append(row)
        return row

    def with_adapter(self, layer: Layer, row: dict, weights: list[tiles.TiledWeight], adapters: list[Adapter]) -> None:
        """Time the fastest of one point again, alone and with an adapter under several launches of the small kernel."""
        M, R = row["M"], adapters[0].a.shape[0]
        x = torch.randn(M, layer.K, device="cuda").to(torch.bfloat16)
        calls: dict[str, list] = {}
        for c, how in self.pairs(row, R):
            calls[self.name(c)] = [partial(gemm.product, x, w, c) for w in weights]
            calls[f"{self.name(c)} {json.dumps(how)}"] = [
                partial(gemm.product, x, w, c, None, a, how) for w, a in zip(weights, adapters, strict=True)
            ]
        us = interleaved(calls, rounds=3, at_least=20 if M <= 256 else 6)
        about = {"layer": layer.name, "N": layer.N, "K": layer.K, "M": M, "R": R}
        self.adapted.append({**about, "us": {k: round(v, 2) for k, v in us.items()}})

    def pairs(self, row: dict, R: int) -> list[tuple[gemm.Configuration, Shrink | None]]:
        """Return variants and launches to time with an adapter: near the fastest, or ranked by the rule."""
        N, K, M = row["N"], row["K"], row["M"]
        if self.guided:
            machine = rule.rule().machine
            alone = sorted(rule.ranked(N, K, M, machine), key=lambda one: one[0])
            near = [(took, c) for took, c in alone if took <= rule.NEAR * alone[0][0] + 1]
            ranked = sorted(
                (pair for took, c in near for pair in rule._with_shrink(N, K, M, R, c, took, machine)),
                key=lambda one: one[0],
            )
            known = [(c, how) for _, c, how in ranked if replace(c, splits=0) in self.of]
            return [*known[:9], *self.draw.sample(known[9:60], min(5, len(known[9:60])))]
        chosen: list[tuple[gemm.Configuration, Shrink | None]] = []
        for _, name in sorted((us, name) for name, us in row["us"].items() if ":" in name)[:2]:
            index, splits = map(int, name.split(":"))
            c = replace(self.variants[index], splits=splits)
            hows = [how for how, _ in rule.launches(M)]
            if c.cluster == 1 and c.splits == 0:  # it takes all blocks, and may leave some
                beside = [how._replace(beside=True) for how in hows]
                hows += [how for how in beside if how.left_free(M, R, MULTIPROCESSORS)]
            chosen += [(c, how) for how in self.draw.sample(hows, min(6, len(hows)))]
            chosen += [(c, None)] if M > 512 else []
        return chosen


def tokens_for(draw: random.Random) -> list[int]:
    """Draw the numbers of tokens of one layer: most sizes of narrow tiles, some of the others."""
    few = [*FEW[:6], *draw.sample(FEW[6:], 6)]
    return [*few, *draw.sample(MANY, 5), draw.choice(MOST)]


def at_once(variants: list[gemm.Configuration]) -> dict[int, int]:
    """Return how many clusters of each size the GPU holds."""
    return {c.cluster: gemm._kernel(c, 0)[1] for c in variants if c.splits == 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="tune.json")
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=400, help="no new layer is begun after so many")
    parser.add_argument(
        "--guided", action="store_true", help="try what the rule in use takes for good, in place of any"
    )
    parser.add_argument("--gate", metavar="OPERAND", help="of what is on standard input, and no more")
    options = parser.parse_args()
    if options.gate:
        gate_here(options.gate)
        return
    start = time.monotonic()
    variants = every_variant()
    gemm.compile_all(variants)
    print(f"{len(variants)} variants compiled after {time.monotonic() - start:.0f} s", flush=True)
    passed, refused = gate_in_processes(variants, 12)
    variants = [c for c in variants if c in passed]
    print(f"{len(variants)} pass the gate after {time.monotonic() - start:.0f} s; refused: {refused}", flush=True)
    sweep = Sweep(variants, options.seed, options.guided)
    result = {
        **conditions(),
        "seed": options.seed,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
    }
    result |= {"at_once": at_once(variants), "refused": refused}
    result |= {"variants": [astuple(c) for c in variants], "rows": sweep.rows, "adapted": sweep.adapted}
    draw = random.Random(options.seed)
    for number, layer in enumerate(draw.sample(all_layers(), options.layers)):
        if time.monotonic() - start > options.seconds:
            break
        weights = random_weights(layer.N, layer.K)
        dense = [
            torch.randn(layer.N, layer.K, device="cuda", dtype=torch.bfloat16)
            for _ in range(copies(2 * layer.N * layer.K))
        ]
        adapters = random_adapters(layer, len(weights)) if number % 2 == 0 else []
        for M in tokens_for(draw):
            try:
                row = sweep.point(layer, M, weights, dense, 26 if M <= 256 else 14)
                if adapters and M <= 2048:
                    sweep.with_adapter(layer, row, weights, adapters)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                print(f"{layer.name} {M}: {error}", flush=True)
        Path(options.out).write_text(json.dumps(result))
        print(f"{number} {layer.name} ({layer.N}, {layer.K}) after {time.monotonic() - start:.0f} s", flush=True)
        del weights, dense, adapters
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
