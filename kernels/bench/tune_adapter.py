"""Time products with an adapter of rank 32: ``python tune_adapter.py tune.json --out adapter.json [--shapes 7B o]``.

tune.json is what tune.py wrote. Of each layer and number of tokens the configurations near the fastest are timed again,
and what becomes of them with fewer blocks, which leaves multiprocessors to the adapter's small kernel: alone, and with
every launch of that kernel that is worth trying.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import gate
import torch
from conditions import conditions
from qerl_kernels import gemm, tiles
from qerl_kernels.adapter import SMALL_M, SPLITS, VARIANTS, Adapter, Shrink, padded, spans
from shapes import SHAPES, widths
from times import configuration, name_of, ours
from timing import interleaved
from tune import MULTIPROCESSORS, among, passes, random_weights, tiles_of

RANK = 32
NEAR = 1.05  # of the fastest time without an adapter
MOST_WITH_ROOM = 4  # configurations with fewer blocks, of each


def near(row: dict) -> list[gemm.Configuration]:
    """The configurations of one row of tune.json that are worth trying with an adapter."""
    times = ours(row["us"])
    fastest = min(times.values())
    return [configuration(name) for name, us in times.items() if us <= NEAR * fastest]


def with_room(c: gemm.Configuration, N: int, M: int) -> list[gemm.Configuration]:
    """The same tiles, each cut into so few runs or among so few blocks that multiprocessors are left over."""
    found = []
    for parts in range(1, min((MULTIPROCESSORS - SPLITS) // tiles_of(c, N, M), 8) + 1):
        found.append(replace(among(c, 1), splits=parts))
        if parts > 1:
            found.append(among(c, parts))
    return sorted(found, key=lambda one: -max(one.splits, one.cluster))[:MOST_WITH_ROOM]


def to_time(row: dict) -> list[gemm.Configuration]:
    """All that is worth trying for one row of tune.json, each once."""
    tried = near(row)
    return list(dict.fromkeys([*tried, *(one for c in tried for one in with_room(c, row["N"], row["M"]))]))


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


def random_adapters(shape: str, count: int) -> list[Adapter]:
    """Of one layer's parts."""
    N, K = SHAPES[shape]
    R, table = padded(RANK * len(widths(shape))), spans(widths(shape), RANK).cuda()
    return [
        Adapter(torch.randn(R, K, device="cuda").bfloat16(), torch.randn(N, R, device="cuda").bfloat16() / 100, table)
        for _ in range(count)
    ]


def time_row(row: dict, weights: list[tiles.TiledWeight], adapters: list[Adapter]) -> dict:
    """One row of tune.json -> times alone and with each launch, in microseconds."""
    M, R = row["M"], adapters[0].a.shape[0]
    x = torch.randn(M, row["K"], device="cuda").to(torch.bfloat16)
    alone, adapted = {}, {}
    for c in to_time(row):
        if not passes(replace(c, splits=0)):
            continue
        calls = {"alone": [partial(gemm.product, x, w, c) for w in weights]}
        for how in launches(M, R, c.cluster == 1 and c.splits == 0):
            pairs = zip(weights, adapters, strict=True)
            calls[json.dumps(how)] = [partial(gemm.product, x, w, c, None, a, how) for w, a in pairs]
        times = interleaved(calls, rounds=3)
        alone[name_of(c)] = times.pop("alone")
        adapted[name_of(c)] = times
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
    gemm.compile_all({replace(c, splits=0) for row in rows for c in to_time(row)})
    with gate.within_a_minute():
        for how in {how for row in rows for how in launches(row["M"], 96, False)}:
            gate.check_launch(how)
    print("the gate passes", flush=True)
    described, found = conditions(), []
    Path(options.out).write_text(json.dumps({**described, "rows": found}))  # there may be none with so few tokens
    for size in dict.fromkeys((row["N"], row["K"]) for row in rows):
        shape = wanted[size]
        weights = random_weights(shape)
        adapters = random_adapters(shape, len(weights))
        for row in [row for row in rows if (row["N"], row["K"]) == size]:
            found.append(time_row(row, weights, adapters))
            alone, times = found[-1]["alone"], found[-1]["adapted"]
            best = sorted((us, c, how) for c, each in times.items() for how, us in each.items())[:3]
            listed = "  ".join(f"{c} {how} {us:.1f} ({alone[c]:.1f})" for us, c, how in best)
            print(f"{shape} M={row['M']}: alone {min(alone.values()):.1f}  {listed}", flush=True)
        Path(options.out).write_text(json.dumps({**described, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
