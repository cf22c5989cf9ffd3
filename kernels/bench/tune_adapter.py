"""Time products with an adapter of rank 32: ``python tune_adapter.py tune.json --out adapter.json [--shapes 7B o]``.

tune.json is what tune.py wrote. Of each layer and number of tokens the configurations near the fastest are timed again,
and what becomes of them with fewer blocks, which leaves multiprocessors to the adapter's small kernel: alone, and with
every launch of that kernel that is worth trying.
"""

import argparse
import faulthandler
import json
from dataclasses import asdict, astuple, replace
from functools import partial
from pathlib import Path

import gate
import torch
from conditions import conditions
from qerl_kernels import gemm, tiles
from qerl_kernels.adapter import SMALL_M, SPLITS, VARIANTS, Adapter, Shrink, padded, spans
from shapes import SHAPES, widths
from timing import copies, interleaved
from tune import MULTIPROCESSORS, passes

RANK = 32
NEAR = 1.05  # of the fastest time without an adapter
MOST_WITH_ROOM = 4  # configurations with fewer blocks, of each


def near(row: dict) -> list[gemm.Configuration]:
    """The configurations of one row of tune.json that are worth trying with an adapter."""
    ours = {name: us for name, us in row["us"].items() if name.startswith("[")}
    fastest = min(ours.values())
    return [gemm.Configuration(*json.loads(name)) for name, us in ours.items() if us <= NEAR * fastest]


def with_room(c: gemm.Configuration, N: int, M: int) -> list[gemm.Configuration]:
    """The same tiles, each cut into so few runs or among so few blocks that multiprocessors are left over."""
    tiles_ = -(-N // (64 * c.tile_blocks())) * -(-M // c.tokens)
    fields = {name: value for name, value in asdict(c).items() if name not in ("stages", "splits", "cluster")}
    found = []
    for parts in range(1, min((MULTIPROCESSORS - SPLITS) // tiles_, 8) + 1):
        found.append(replace(gemm.deepest(**fields), splits=parts))
        if parts > 1:
            found.append(gemm.deepest(**fields, cluster=parts))
    return sorted(found, key=lambda one: -max(one.splits, one.cluster))[:MOST_WITH_ROOM]


def to_time(row: dict) -> list[gemm.Configuration]:
    """All that is worth trying for one row of tune.json and passes the gate, each once."""
    tried = near(row)
    more = [one for c in tried for one in with_room(c, row["N"], row["M"])]
    return [*tried, *(c for c in dict.fromkeys(more) if c not in tried and passes(replace(c, splits=0)))]


def launches(M: int, R: int, takes_all: bool) -> list[Shrink]:
    """Of the small kernel, for M tokens and R rows of A; a product that ``takes_all`` blocks may leave some."""
    found = []
    for variant in VARIANTS:
        most = -(-M // variant.tokens)
        if most > 16 or (variant.tokens > 8 and variant.tokens >= 2 * M) or (variant.tokens == 8 and M > 8):
            continue
        for blocks in sorted({1, min(2, most), -(-most // 2), most}):
            found.append(Shrink(variant, blocks))
            if takes_all and Shrink(variant, blocks, True).left_free(M, R, MULTIPROCESSORS):
                found.append(Shrink(variant, blocks, True))
    return found


def layer(shape: str) -> tuple[list[tiles.TiledWeight], list[Adapter]]:
    """As many random weights and adapters of one layer as no cache holds."""
    N, K = SHAPES[shape]
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(40, 120, (N, K // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    first = tiles.tile_weight(codes, scales, torch.rand((), device="cuda") * 1e-3)
    R, table = padded(RANK * len(widths(shape))), spans(widths(shape), RANK).cuda()
    weights, adapters = [], []
    for _ in range(copies(first.tiles.numel())):
        counters = torch.zeros_like(first.counters)
        weights.append(tiles.TiledWeight(first.tiles.clone(), first.row_scale, counters, N, K))
        a, b = torch.randn(R, K, device="cuda").bfloat16(), torch.randn(N, R, device="cuda").bfloat16() / 100
        adapters.append(Adapter(a, b, table))
    return weights, adapters


def time_row(row: dict, weights: list[tiles.TiledWeight], adapters: list[Adapter]) -> dict:
    """One row of tune.json -> times alone and with each launch, in microseconds."""
    M, R = row["M"], adapters[0].a.shape[0]
    x = torch.randn(M, row["K"], device="cuda").to(torch.bfloat16)
    alone, adapted = {}, {}
    for c in to_time(row):
        name = json.dumps(astuple(c))
        calls = {"alone": [partial(gemm.product, x, w, c) for w in weights]}
        for how in launches(M, R, c.cluster == 1 and c.splits == 0):
            pairs = zip(weights, adapters, strict=True)
            calls[json.dumps(how)] = [partial(gemm.product, x, w, c, None, a, how) for w, a in pairs]
        times = interleaved(calls, rounds=3)
        alone[name] = times.pop("alone")
        adapted[name] = times
    return {**{key: row[key] for key in ("shape", "N", "K", "M")}, "alone": alone, "adapted": adapted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tuned")
    parser.add_argument("--out", default="adapter.json")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    options = parser.parse_args()
    rows = json.loads(Path(options.tuned).read_text())["rows"]
    wanted = {SHAPES[shape]: shape for shape in options.shapes.split(",")}  # each size once
    rows = [row for row in rows if row["M"] <= SMALL_M and (row["N"], row["K"]) in wanted]
    more = {replace(one, splits=0) for row in rows for c in near(row) for one in with_room(c, row["N"], row["M"])}
    gemm.compile_all(more)
    faulthandler.dump_traceback_later(60, exit=True)  # a kernel that hangs
    for how in {how for row in rows for how in launches(row["M"], 96, False)}:
        for shape in ((1, 16, 8), (70, 3600, 64), (140, 18944, 96)):
            gate.check_shrink(*shape, how)
    faulthandler.cancel_dump_traceback_later()
    print("the gate passes", flush=True)
    described, found = conditions(), []
    Path(options.out).write_text(json.dumps({**described, "rows": found}))  # there may be none with so few tokens
    for size in dict.fromkeys((row["N"], row["K"]) for row in rows):
        shape = wanted[size]
        weights, adapters = layer(shape)
        for row in [row for row in rows if (row["N"], row["K"]) == size]:
            found.append(time_row(row, weights, adapters))
            alone, times = found[-1]["alone"], found[-1]["adapted"]
            best = sorted((us, c, how) for c, each in times.items() for how, us in each.items())[:3]
            listed = "  ".join(f"{c} {how} {us:.1f} ({alone[c]:.1f})" for us, c, how in best)
            print(f"{shape} M={row['M']}: alone {min(alone.values()):.1f}  {listed}", flush=True)
        Path(options.out).write_text(json.dumps({**described, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
