"""Gate, then time variants of the product over random layers, for fit.py to make the rule from.

``python tune.py --out tune.json [--layers 34] [--seed 1] [--seconds 400] [--guided]``. Layers are drawn from layers.py,
numbers of tokens from FEW and MANY; at each point cuBLAS, the expanded product and a random choice of variants that
could be the fastest take turns, then, for every other layer, the fastest again with an adapter of rank 32 under several
launches of its small kernel. A variant that the gate refuses is named and left out; one that hangs ends only the
process that tries it. The file is written after each layer.
"""

import argparse
import concurrent.futures
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
from qerl_kernels.adapter import SPLITS, VARIANTS, Adapter, Shrink, padded, spans
from qerl_kernels.conditions import conditions
from timing import copies, interleaved

FEW = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
MANY = (272, 288, 320, 352, 384, 416, 448, 480, 512, 576, 640, 704, 768, 896, 1024, 1280, 1536, 2048)
MOST = (3072, 4096, 6144, 8192)
# by the tokens of a tile: (warpgroups, kgroups, rows, depth, group, ahead, synchronous)
SMALL = [
    (4, 1, 1, 4, 4, 0, 1),
    (4, 1, 1, 2, 4, 0, 1),
    (3, 1, 2, 2, 4, 0, 1),
    (4, 2, 1, 4, 4, 0, 1),
    (4, 4, 1, 4, 2, 0, 1),
]
SMALL += [(4, 2, 1, 2, 4, 0, 1)]
SIXTEEN = [
    (4, 2, 1, 4, 4, 0, 0),
    (4, 1, 1, 4, 4, 0, 0),
    (3, 1, 2, 2, 4, 0, 1),
    (4, 2, 1, 4, 4, 0, 1),
    (4, 2, 1, 2, 2, 0, 0),
]
SIXTEEN += [(4, 1, 1, 2, 4, 0, 0)]
MIDDLE = [
    (4, 4, 1, 4, 2, 0, 0),
    (4, 2, 1, 4, 4, 1, 0),
    (4, 1, 1, 4, 2, 0, 0),
    (3, 1, 2, 2, 4, 0, 0),
    (4, 2, 1, 2, 2, 0, 0),
]
MIDDLE += [(4, 1, 1, 2, 4, 0, 0)]
LARGE = [
    (4, 4, 1, 4, 2, 0, 0),
    (3, 1, 1, 4, 2, 0, 0),
    (3, 1, 1, 2, 2, 0, 0),
    (2, 1, 2, 2, 4, 0, 0),
    (4, 1, 1, 2, 2, 0, 0),
]
LARGE += [(4, 2, 1, 2, 2, 1, 0)]
LARGER = [(2, 1, 1, 2, 2, 0, 0), (3, 1, 1, 2, 2, 0, 0), (2, 1, 2, 2, 4, 0, 0), (2, 2, 1, 2, 2, 1, 0)]
LARGEST = [(2, 1, 1, 1, 1, 0, 0), (3, 1, 1, 1, 1, 0, 0)]
BETWEEN = [
    (2, 1, 1, 2, 2, 0, 0),
    (3, 1, 1, 2, 2, 0, 0),
    (2, 1, 2, 1, 2, 0, 0),
    (3, 1, 1, 1, 2, 0, 0),
    (2, 2, 1, 2, 2, 0, 0),
]
FAMILIES = {8: SMALL, 16: SIXTEEN, 24: MIDDLE, 32: MIDDLE, 48: LARGE, 64: LARGE}
FAMILIES |= dict.fromkeys((80, 96, 112, 128), LARGER)
FAMILIES |= {size: LARGEST if size < 192 else LARGEST[:1] for size in range(144, 257, 16)}
FAMILIES[128] = [*LARGER, (2, 1, 1, 2, 2, 1, 0)]
FAMILIES |= {size: [*LARGEST, *BETWEEN] for size in (144, 160, 176)}
PAIRS = [(2, 1, 1, 1, 2, 0, 0), (2, 1, 1, 2, 2, 0, 0), (2, 1, 1, 2, 4, 0, 0)]
FAMILIES |= {size: [*LARGEST[:1], *PAIRS] for size in (192, 208, 224, 240)}
FAMILIES[256] = [*LARGEST[:1], (2, 1, 1, 1, 2, 1, 0), *PAIRS]
CLUSTERS = {size: (1, 2, 4) if size <= 32 or size > 128 else (1, 2, 3, 4, 8) for size in FAMILIES}
MULTIPROCESSORS = 132
RANK = 32
WASTE = 1.16  # of the tokens of tiles over the tokens that there are


def every_variant() -> list[gemm.Configuration]:
    """Return one configuration a kernel, with ``splits`` 0."""
    configurations = []
    for size, families in FAMILIES.items():
        for family in families:
            for cluster in CLUSTERS[size]:
                try:
                    configurations.append(gemm.deepest(size, *family, cluster))
                except ValueError:
                    continue
    return [c for c in configurations if fits_in_stages(c)]


def fits_in_stages(c: gemm.Configuration) -> bool:
    """Return True if the sums of a cluster's blocks fit where the stages were: schedule.cuh asserts it."""
    stages = c.stages * c.depth * (c.tokens * 128 + c.tile_blocks() * tiles.TILE_BYTES)
    return c.cluster == 1 or 4 * 64 * c.tile_blocks() * c.tokens * c.kgroups <= stages


def tiles_of(c: gemm.Configuration, N: int, M: int) -> int:
    """Return the number of tiles of one product."""
    blocks = -(-N // 64)
    return -(-blocks // c.tile_blocks()) * -(-M // c.tokens)


def to_time(variants: list[gemm.Configuration], N: int, K: int, M: int) -> list[gemm.Configuration]:
    """Return every way to run each variant that could be worth its time for M tokens and a weight of (N, K)."""
    sizes = sorted({c.tokens for c in variants})
    covering = next((size for size in sizes if size >= M), sizes[-1])
    least = 48 if M <= 256 else 128
    wanted = {size for size in sizes if size >= least and size * -(-M // size) <= WASTE * M} | {covering}
    ways = []
    for c in variants:
        if c.tokens not in wanted or 2 * -(-K // 128) % c.depth or (c.tokens > covering):
            continue
        tiles_ = tiles_of(c, N, M)
        most = MULTIPROCESSORS // tiles_
        steps = 2 * -(-K // 128) // c.depth
        if c.cluster == 1:
            splits = {0, *([most, max(most // 2, 1)] if most else [])}
            ways += [replace(c, splits=s) for s in sorted(splits) if s <= steps]
        elif c.cluster <= steps and tiles_ * c.cluster <= 3 * MULTIPROCESSORS:
            ways.append(c)
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


def launches(M: int, R: int, takes_all: bool) -> list[Shrink]:
    """Return launches of the small kernel for M tokens and R rows of A.

    A product that ``takes_all`` blocks may leave some.
    """
    choices = []
    for variant in VARIANTS:
        most = -(-M // variant.tokens)
        if most > 64 or (variant.tokens > 8 and variant.tokens >= 2 * M) or (variant.tokens == 8 and M > 8):
            continue
        for blocks in sorted({1, min(2, most), min(4, most), -(-most // 2), most}):
            choices.append(Shrink(variant, blocks))
            if takes_all and Shrink(variant, blocks, True).left_free(M, R, MULTIPROCESSORS):
                choices.append(Shrink(variant, blocks, True))
    return choices


def with_room(
    c: gemm.Configuration, others: list[gemm.Configuration], N: int, M: int, K: int
) -> list[gemm.Configuration]:
    """Return variants of the same tiles as ``c`` that leave multiprocessors over, with few runs or few blocks."""
    tiles_ = tiles_of(c, N, M)
    room = (MULTIPROCESSORS - SPLITS) // tiles_
    steps = 2 * -(-K // 128) // c.depth
    same = [o for o in others if replace(o, cluster=1, stages=1) == replace(c, cluster=1, stages=1, splits=0)]
    narrower = [
        replace(o, splits=parts) for o in same if o.cluster == 1 for parts in (room, room - 1) if 1 <= parts <= steps
    ]
    return narrower + [o for o in same if 1 < o.cluster <= room]


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
            tried = to_time(self.variants, layer.N, layer.K, M)
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
        ours = sorted((us, name) for name, us in row["us"].items() if ":" in name)[:2]
        best = [self.configuration(name) for _, name in ours]
        tried = list(dict.fromkeys([*best, *(o for c in best[:1] for o in with_room(c, self.variants, N, M, K))]))
        chosen: list[tuple[gemm.Configuration, Shrink | None]] = []
        for c in tried:
            hows = launches(M, R, c.cluster == 1 and c.splits == 0)
            chosen += [(c, how) for how in self.draw.sample(hows, min(6, len(hows)))]
            chosen += [(c, None)] if M > 512 else []
        return chosen

    def configuration(self, name: str) -> gemm.Configuration:
        """Return the configuration of a ``name``."""
        index, splits = map(int, name.split(":"))
        return replace(self.variants[index], splits=splits)


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
