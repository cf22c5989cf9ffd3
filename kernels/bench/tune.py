"""Gate, then time every candidate configuration: ``python tune.py --out tune.json [--shapes 7B o] [--tokens 1,16]``.

A kernel that hangs ends the program after a minute.
"""

import argparse
import faulthandler
import json
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import gate
import torch
from qerl_kernels import gemm, linear_tiles, tiles
from shapes import SHAPES
from timing import copies, interleaved

# tokens -> (warpgroups, kgroups, rows, depth, group, ahead, blocks, cluster, synchronous) to try
SMALL = [
    (4, 1, 1, 4, 4, 0, 1, 1, 1),
    (4, 1, 1, 2, 4, 0, 1, 1, 1),
    (4, 1, 2, 2, 4, 0, 1, 1, 1),
    (3, 1, 2, 2, 4, 0, 1, 1, 1),
    (2, 1, 2, 2, 2, 0, 2, 1, 1),
    (2, 1, 1, 4, 4, 0, 2, 1, 1),
    (4, 2, 1, 4, 4, 0, 1, 1, 1),
    (4, 4, 1, 4, 2, 0, 1, 1, 1),
    (4, 1, 1, 4, 4, 0, 1, 1, 0),
    (4, 2, 1, 4, 4, 0, 1, 1, 0),
]
MIDDLE = [
    (4, 1, 1, 4, 4, 0, 1, 1, 1),
    (4, 1, 1, 2, 4, 0, 1, 1, 1),
    (4, 2, 1, 4, 4, 0, 1, 1, 1),
    (4, 4, 1, 4, 2, 0, 1, 1, 1),
    (2, 1, 1, 4, 4, 0, 2, 1, 1),
    (4, 1, 1, 4, 2, 0, 1, 1, 0),
    (3, 1, 2, 2, 4, 0, 1, 1, 0),
    (4, 2, 1, 4, 4, 1, 1, 1, 0),
    (4, 4, 1, 4, 2, 0, 1, 1, 0),
]
LARGE = [
    (4, 2, 1, 4, 4, 0, 1, 1, 1),
    (4, 1, 1, 2, 4, 0, 1, 1, 1),
    (3, 1, 1, 2, 2, 0, 1, 1, 0),
    (3, 1, 2, 2, 4, 0, 1, 1, 0),
    (4, 1, 1, 2, 2, 0, 1, 1, 0),
    (4, 1, 1, 2, 2, 0, 1, 2, 0),
    (4, 2, 1, 2, 2, 1, 1, 1, 0),
    (4, 4, 1, 4, 2, 0, 1, 1, 0),
]
LARGER = [
    (3, 1, 1, 2, 2, 0, 1, 1, 0),
    (2, 1, 1, 2, 2, 0, 1, 1, 0),
    (2, 1, 1, 2, 2, 1, 1, 1, 0),
    (4, 2, 1, 2, 2, 0, 1, 1, 0),
    (2, 2, 1, 2, 2, 1, 1, 1, 0),
]
LARGEST = [
    (2, 1, 1, 1, 1, 0, 1, 1, 0),
    (2, 1, 1, 1, 2, 1, 1, 1, 0),
    (2, 1, 1, 1, 2, 1, 1, 2, 0),
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
EXPANDED = 1024  # tokens from which on expanding the weight is tried too


def candidates(M: int) -> list[int]:
    """Token tiles worth trying for M tokens."""
    sizes = sorted(CANDIDATES)
    if M <= 64:
        return [next(size for size in sizes if size >= M)]
    return [size for size in sizes if 64 <= size <= 2 * M]


def gate_all(configurations: list[gemm.Configuration]) -> dict[gemm.Configuration, str]:
    """The gate's verdict on each configuration."""
    gemm.compile_all(configurations)
    verdicts = {}
    for configuration in configurations:
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            gate.check(configuration)
            verdicts[configuration] = "passed"
        except AssertionError as error:
            verdicts[configuration] = str(error)
        print(verdicts[configuration], configuration, flush=True)
    faulthandler.cancel_dump_traceback_later()
    return verdicts


def splittings(configuration: gemm.Configuration, N: int, M: int) -> list[int]:
    """Equal runs over the whole GPU, and where there are few tiles each tile cut into a whole number of runs."""
    tile_rows = 64 * configuration.cluster * configuration.tile_blocks()
    tiles = -(-N // tile_rows) * -(-M // configuration.tokens)
    most = 132 * configuration.blocks // configuration.cluster // tiles
    return sorted({0, most, most // 2} if most else {0})


def time_shape(shape: str, tokens: list[int], passed: dict[int, list[gemm.Configuration]]) -> list[dict]:
    """Time BF16 and every configuration that passed, for each number of tokens."""
    N, K = SHAPES[shape]
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(40, 120, (N, K // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    first = tiles.tile_weight(codes, scales, torch.rand((), device="cuda") * 1e-3)
    bytes_each = first.tiles.numel()
    weights = [
        tiles.TiledWeight(first.tiles.clone(), first.row_scale, torch.zeros_like(first.counters), N, K)
        for _ in range(copies(bytes_each))
    ]
    dense = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(copies(2 * N * K))]
    torch.cuda.synchronize()

    took = interleaved({"dequantize": [partial(gemm.dequantize, w) for w in weights]})["dequantize"]
    print(f"{shape} dequantize {took:.1f} us, {N * K * 2.5625 / took / 1e6:.2f} TB/s", flush=True)
    rows = []
    for M in tokens:
        x = torch.randn(M, K, device="cuda").to(torch.bfloat16)
        variants = {"bf16": [partial(torch.nn.functional.linear, x, w) for w in dense]}
        for c in (c for size in candidates(M) for c in passed[size] if first.tiles.shape[1] % c.depth == 0):
            for splits in splittings(c, N, M):
                c = replace(c, splits=splits)
                variants[json.dumps(astuple(c))] = [partial(gemm.product, x, w, c) for w in weights]
        if M >= EXPANDED:
            scale = first.scale.item()
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

    everything = {tokens: [gemm.deepest(tokens, *fields) for fields in tried] for tokens, tried in CANDIDATES.items()}
    verdicts = gate_all([c for tried in everything.values() for c in tried])
    passed = {tokens: [c for c in tried if verdicts[c] == "passed"] for tokens, tried in everything.items()}
    tokens = [int(M) for M in options.tokens.split(",")]
    rows: list[dict] = []
    for shape in {SHAPES[shape]: shape for shape in options.shapes.split(",")}.values():  # each size once
        rows += time_shape(shape, tokens, passed)
        gates = {str(c): verdict for c, verdict in verdicts.items()}
        Path(options.out).write_text(
            json.dumps({"gpu": torch.cuda.get_device_name(), "gate": gates, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
