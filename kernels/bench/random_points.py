"""Time random layers and numbers of tokens: cuBLAS BF16, Marlin, Humming, our kernel without and with an adapter.

``python random_points.py --random 60 --seed 7 --out random.json``. ``--random`` points have 1 to 256 tokens, and as
many 257 to 8192, both drawn evenly over the logarithm; the layers are those of layers.py. All variants pass the gate
first. Humming compiles for about 11 s a layer: it takes part in the first HUMMING points of up to 256 tokens, compiled
beforehand in processes of their own. A baseline that cannot run a layer, or whose answer is wrong, is named and left
out of that point. Where our kernel is wrong, or does not run, the point is named in the file, and the program ends with
exit status 1. The adapter has rank 32.
"""

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path

import baselines
import tables
import torch
from layers import Layer, random_points
from qerl_kernels import gemm, linear_tiles, nvfp4_triton, rule, tiles
from qerl_kernels.conditions import conditions
from timing import copies, interleaved
from tune import gate_in_processes, random_adapters

FEW, MANY = (1, 256), (257, 8192)
HUMMING = 12


def point(layer: Layer, M: int, names: list[str]) -> dict:
    """Time one layer and number of tokens, and return its row."""
    N, K = layer.N, layer.K
    w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    packed = nvfp4_triton.quantize(w)
    scale = 1 / packed.divisor
    first = tiles.tile_weight(packed.codes, packed.block_scales, scale)
    count = copies(first.tiles.numel())
    weights = [
        tiles.TiledWeight(first.tiles.clone(), first.row_scale, torch.zeros_like(first.counters), N, K, first.scale)
        for _ in range(count)
    ]
    adapters = random_adapters(layer, count)
    x = torch.randn(M, K, device="cuda").to(torch.bfloat16)
    dense = nvfp4_triton.dequantize(packed.codes, packed.block_scales).double() * scale.double()
    few = x[:64]
    exact = few.double() @ dense.t()
    arms: dict[str, list[Callable]] = {
        "bf16": [baselines.bf16(w.clone()) for _ in range(copies(2 * N * K))],
        "qerl": [partial(linear_tiles.linear, weight=one) for one in weights],
        "qerl_adapter": [
            partial(linear_tiles.linear, weight=one, adapter=a) for one, a in zip(weights, adapters, strict=True)
        ],
    }
    baselines.check("qerl", lambda part: arms["qerl"][0](x)[:64], few, exact, 3e-3)
    a, b = adapters[0].a, adapters[0].b
    baselines.check(
        "qerl_adapter",
        lambda part: arms["qerl_adapter"][0](x)[:64],
        few,
        exact + (few.double() @ a.double().t()) @ b.double().t(),
        5e-3,
    )
    left_out = {}
    for name in names:
        try:
            product = getattr(baselines, name)(packed.codes, packed.block_scales, scale)
            baselines.check(name, product, few, exact, 2e-2)
            arms[name] = [product, *(baselines.again(product) for _ in range(count - 1))]
        except (AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
            left_out[name] = f"{type(error).__name__}: {error}"[:200]
    del dense, exact
    calls = {name: [partial(product, x) for product in products] for name, products in arms.items()}
    us = interleaved(calls, rounds=5, at_least=20 if M <= 256 else 6)
    R = adapters[0].a.shape[0]
    chosen, adapted = rule.choose(N, K, M), rule.choose(N, K, M, R)
    row = {"layer": layer.name, "N": N, "K": K, "M": M, "us": {name: round(time, 3) for name, time in us.items()}}
    row |= {"chosen": described(chosen), "chosen_adapter": described(adapted)}
    row |= {"predicted": [round(chosen.microseconds, 1), round(adapted.microseconds, 1)]}
    return row | ({"left_out": left_out} if left_out else {})


def described(choice: rule.Choice) -> str:
    """Return the variant's fields and the small kernel's launch as text."""
    if choice.configuration is None:
        return "expand, then cuBLAS"
    return json.dumps([astuple(choice.configuration), choice.shrink])


def warm_humming(points: list[tuple[Layer, int]]) -> list[subprocess.Popen]:
    """Start processes that make Humming compile for each layer."""
    program = (
        "import sys, torch, baselines; from qerl_kernels import nvfp4_triton\n"
        "N, K = map(int, sys.argv[1:3])\n"
        "p = nvfp4_triton.quantize(torch.randn(N, K, device='cuda', dtype=torch.bfloat16))\n"
        "f = baselines.humming(p.codes, p.block_scales, 1 / p.divisor)\n"
        "for M in map(int, sys.argv[3:]): f(torch.randn(M, K, device='cuda').bfloat16())\n"
    )
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, str(layer.N), str(layer.K), "32", str(M)], stderr=subprocess.DEVNULL
        )
        for layer, M in points
    ]


def measure(
    order: list[tuple[Layer, int]], wanted: list[list[str]], keep: Callable[[list[dict]], object]
) -> tuple[list[dict], list[str]]:
    """Return the rows, and for each point that has none the reason; ``keep`` gets the rows from time to time."""
    rows: list[dict] = []
    failed = []
    for number, ((layer, M), names) in enumerate(zip(order, wanted, strict=True), 1):
        try:
            rows.append(point(layer, M, names))
        except (AssertionError, RuntimeError) as error:
            failed.append(f"{layer.name} ({layer.N}, {layer.K}), {M} tokens: {type(error).__name__}: {error}"[:300])
            print(failed[-1], flush=True)
        if number % 20 == 0:
            keep(rows)
            gc.collect()
            torch.cuda.empty_cache()
    return rows, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="random.json")
    parser.add_argument("--random", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    few = random_points(options.random, options.seed, *FEW)
    many = random_points(options.random, options.seed, *MANY)
    compiling = warm_humming(few[:HUMMING])
    variants = list(rule.rule().variants)
    gemm.compile_all(variants)
    passed, refused = gate_in_processes(variants, 12)
    assert len(passed) == len(variants), f"the gate refuses {refused}"
    print(f"{len(passed)} variants pass the gate", flush=True)
    for process in compiling:
        process.wait()
    result = {**conditions(), "seed": options.seed, "humming_points": HUMMING}
    order = [pair for both in zip(few, many, strict=True) for pair in both]
    humming = set(few[:HUMMING])
    wanted = [["marlin", "humming"] if pair in humming else ["marlin"] for pair in order]
    rows, failed = measure(
        order, wanted, lambda rows: Path(options.out).write_text(json.dumps({**result, "rows": rows}))
    )
    result |= {"failed": failed} if failed else {}
    text, head = ",\n".join(json.dumps(row) for row in rows), json.dumps(result, indent=1)[:-2]
    Path(options.out).write_text(f'{head},\n "rows": [\n{text}\n]}}\n')
    print(len(rows), "points in", options.out, flush=True)
    if failed:
        sys.exit(
            f"{len(failed)} of {len(order)} points have no figure, for ours is wrong there or does not run: {failed[0]}"
        )
    for row in tables.both_regimes(result | {"rows": rows}):
        print("; ".join(row))


if __name__ == "__main__":
    main()
