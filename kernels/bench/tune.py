"""Gate, then time every candidate configuration: ``python tune.py --out tune.json [--shapes 7B o] [--tokens 1,16]``.

A kernel that hangs ends the program after a minute.
"""

import argparse
import functools
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import gate
import torch
from conditions import conditions
from qerl_kernels import gemm, linear_tiles, tiles
from shapes import SHAPES
from times import name_of
from timing import copies, interleaved

# tokens -> (warpgroups, kgroups, rows, depth, group, ahead, synchronous) to try, by itself and with as many blocks in a
# cluster as the layer leaves room for
SMALL = [
    (4, 1, 1, 4, 4, 0, 1),
    (4, 1, 1, 2, 4, 0, 1),
    (3, 1, 2, 2, 4, 0, 1),
    (4, 2, 1, 4, 4, 0, 1),
    (4, 4, 1, 4, 2, 0, 1),
    (4, 1, 1, 4, 4, 0, 0),
    (4, 2, 1, 4, 4, 0, 0),
]
MIDDLE = [
    (4, 1, 1, 4, 2, 0, 0),
    (4, 1, 1, 2, 4, 0, 0),
    (3, 1, 2, 2, 4, 0, 0),
    (4, 2, 1, 4, 4, 1, 0),
    (4, 4, 1, 4, 2, 0, 0),
]
LARGE = [
    (3, 1, 1, 2, 2, 0, 0),
    (3, 1, 1, 4, 2, 0, 0),
    (3, 1, 2, 2, 4, 0, 0),
    (2, 1, 2, 2, 4, 0, 0),
    (4, 1, 1, 2, 2, 0, 0),
    (4, 1, 1, 2, 4, 0, 0),
    (4, 2, 1, 2, 2, 1, 0),
    (4, 4, 1, 4, 2, 0, 0),
]
LARGER = [
    (3, 1, 1, 2, 2, 0, 0),
    (3, 1, 1, 2, 2, 1, 0),
    (2, 1, 1, 2, 2, 0, 0),
    (2, 1, 1, 2, 2, 1, 0),
    (2, 1, 2, 2, 4, 0, 0),
    (2, 2, 1, 2, 2, 1, 0),
]
LARGEST = [
    (2, 1, 1, 1, 1, 0, 0),
    (2, 1, 1, 1, 2, 1, 0),
]
CANDIDATES = {
    8: SMALL,
    16: SMALL,
    24: MIDDLE,
    32: MIDDLE,
    48: LARGE,
    64: LARGE,
    96: LARGER,
    128: LARGER,
    192: LARGEST,
    256: LARGEST,
}
TOKENS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
MULTIPROCESSORS = 132
EXPANDED = 1024  # tokens from which on expanding the weight is tried too


def candidates(M: int) -> list[int]:
    """Token tiles worth trying for M tokens."""
    sizes = sorted(CANDIDATES)
    if M <= 64:
        return [next(size for size in sizes if size >= M)]
    return [size for size in sizes if 64 <= size <= 2 * M]


@functools.cache
def passes(configuration: gemm.Configuration) -> bool:
    """Whether the gate lets one configuration through; a kernel that hangs ends the program."""
    try:
        with gate.within_a_minute():
            gate.check(configuration)
    except AssertionError as error:
        print(error, configuration, flush=True)
        return False
    return True


def tiles_of(configuration: gemm.Configuration, N: int, M: int) -> int:
    """Tiles of one product."""
    return -(-N // (64 * configuration.tile_blocks())) * -(-M // configuration.tokens)


def among(configuration: gemm.Configuration, cluster: int) -> gemm.Configuration:
    """The same tiles, each divided among the blocks of a cluster; 1: of equal runs."""
    fields = {name: value for name, value in asdict(configuration).items() if name not in ("stages", "splits")}
    return gemm.deepest(**{**fields, "cluster": cluster})


def variants_of(configuration: gemm.Configuration, N: int, M: int) -> list[gemm.Configuration]:
    """Equal runs over the whole GPU; where there are few tiles also each cut into whole runs, or among a cluster."""
    most = MULTIPROCESSORS // tiles_of(configuration, N, M)
    found = [replace(configuration, splits=splits) for splits in sorted({0, most, most // 2} if most else {0})]
    if most >= 2:
        found += [among(configuration, cluster) for cluster in {min(most, 8), max(min(most, 8) - 1, 2)}]
    return found


def to_time(N: int, K: int, M: int) -> list[gemm.Configuration]:
    """Every variant worth trying for M tokens and a weight of (N, K)."""
    k_tiles = 2 * -(-K // 128)
    tried = [gemm.deepest(size, *fields) for size in candidates(M) for fields in CANDIDATES[size]]
    return [variant for c in tried if k_tiles % c.depth == 0 for variant in variants_of(c, N, M)]


def random_weights(shape: str) -> list[tiles.TiledWeight]:
    """As many of one layer as no cache holds."""
    N, K = SHAPES[shape]
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(40, 120, (N, K // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    first = tiles.tile_weight(codes, scales, torch.rand((), device="cuda") * 1e-3)
    return [
        replace(first, tiles=first.tiles.clone(), counters=torch.zeros_like(first.counters))
        for _ in range(copies(first.tiles.numel()))
    ]


def time_shape(shape: str, tokens: list[int]) -> list[dict]:
    """Time BF16 and every configuration that passes the gate, for each number of tokens."""
    N, K = SHAPES[shape]
    weights = random_weights(shape)
    bytes_each = weights[0].tiles.numel()
    dense = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(copies(2 * N * K))]
    torch.cuda.synchronize()

    took = interleaved({"dequantize": [partial(gemm.dequantize, w) for w in weights]})["dequantize"]
    print(f"{shape} dequantize {took:.1f} us, {N * K * 2.5625 / took / 1e6:.2f} TB/s", flush=True)
    rows = []
    for M in tokens:
        x = torch.randn(M, K, device="cuda").to(torch.bfloat16)
        variants = {"bf16": [partial(torch.nn.functional.linear, x, w) for w in dense]}
        for c in to_time(N, K, M):
            if passes(replace(c, splits=0)):
                variants[name_of(c)] = [partial(gemm.product, x, w, c) for w in weights]
        if M >= EXPANDED:
            scale = weights[0].scale.item()
            variants["expand"] = [partial(linear_tiles.expand_and_multiply, x, w, scale, None) for w in weights]
        times = interleaved(variants, rounds=5, at_least=20 if M <= 256 else 6)
        rows.append({"shape": shape, "N": N, "K": K, "M": M, "us": times})
        best = sorted((us, name) for name, us in times.items() if name != "bf16")
        listed = "  ".join(f"{name} {us:.1f}" for us, name in best[:4])
        rate, ratio = bytes_each / best[0][0] / 1e6, times["bf16"] / best[0][0]
        print(f"{shape} M={M}: bf16 {times['bf16']:.1f}  [{rate:.2f} TB/s, {ratio:.2f}x] {listed}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="tune.json")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    options = parser.parse_args()

    tokens = [int(M) for M in options.tokens.split(",")]
    shapes = {SHAPES[shape]: shape for shape in options.shapes.split(",")}  # each size once
    gemm.compile_all({replace(c, splits=0) for N, K in shapes for M in tokens for c in to_time(N, K, M)})
    described, rows = conditions(), []
    for shape in shapes.values():
        rows += time_shape(shape, tokens)
        Path(options.out).write_text(json.dumps({**described, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
