"""Time the linear kernels: cuBLAS BF16, Marlin, Humming and ours, on layers of Qwen2.5 or on random ones.

``python run.py --out NVIDIA_H200.json`` times the layers of SHAPES at TOKENS. ``--random 60 --seed 7`` instead draws 60
points of 1 to 256 tokens and as many of 257 to 8192, both evenly over the logarithm, from the layers of layers.py, and
times ours also with an adapter of rank 32. Humming compiles for about 11 s a layer: of random points it takes part in
the first HUMMING of up to 256 tokens, compiled beforehand in processes of their own.

All variants pass the gate first. A baseline that cannot run a layer, or whose answer is wrong, is named and left out
there. Where our kernel is wrong, or does not run, the layer is named in the file, and the exit status is 1.
"""

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path

import baselines
import gate
import tables
import torch
from layers import Layer, random_points
from qerl_kernels import gemm, linear_tiles, nvfp4_triton, rule, tiles
from qerl_kernels.conditions import conditions
from timing import copies, interleaved
from tune import gate_in_processes, random_adapters

# the fused linear layers of Qwen2.5, (N, K)
SHAPES = {
    "7B qkv": (4608, 3584),
    "7B o": (3584, 3584),
    "7B gate_up": (37888, 3584),
    "7B down": (3584, 18944),
    "14B qkv": (7168, 5120),
    "14B o": (5120, 5120),
    "14B gate_up": (27648, 5120),
    "14B down": (5120, 13824),
    "32B qkv": (7168, 5120),
    "32B o": (5120, 5120),
    "32B gate_up": (55296, 5120),
    "32B down": (5120, 27648),
}
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
FEW, MANY = (1, 256), (257, 8192)
HUMMING = 12


def time_layer(layer: Layer, tokens: Sequence[int], names: list[str], adapted: bool) -> Iterator[dict]:
    """Time one layer at each number of tokens, and yield the rows; raise AssertionError where ours is wrong.

    Copies of one weight take turns, so many that no cache holds them. ``names`` are the baselines beside cuBLAS.
    """
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
    products: dict[str, list[Callable]] = {
        "bf16": [baselines.bf16(w.clone()) for _ in range(copies(2 * N * K))],
        "qerl": [partial(linear_tiles.linear, weight=one) for one in weights],
    }
    dense = nvfp4_triton.dequantize(packed.codes, packed.block_scales).double() * scale.double()
    x = torch.randn(max(tokens), K, device="cuda").to(torch.bfloat16)
    few = x[:64]
    exact = few.double() @ dense.t()
    right = {"qerl": (exact, 3e-3)}
    R = 0
    if adapted:
        adapters = random_adapters(layer, count)
        a, b = adapters[0].a, adapters[0].b
        R = a.shape[0]
        products["qerl_adapter"] = [
            partial(linear_tiles.linear, weight=one, adapter=own) for one, own in zip(weights, adapters, strict=True)
        ]
        right["qerl_adapter"] = exact + (few.double() @ a.double().t()) @ b.double().t(), 5e-3
    left_out = {}
    for name in names:
        try:
            product = getattr(baselines, name)(packed.codes, packed.block_scales, scale)
            gate.agree(product(few), exact, name, 2e-2)
            products[name] = [product, *(baselines.again(product) for _ in range(count - 1))]
        except (AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
            left_out[name] = f"{type(error).__name__}: {error}"[:200]
    del dense
    for M in tokens:
        for name, (ours, limit) in right.items():
            gate.agree(products[name][0](x[:M])[:64], ours[:M], name, limit)
        calls = {name: [partial(product, x[:M]) for product in of] for name, of in products.items()}
        us = interleaved(calls, rounds=5, at_least=20 if M <= 256 else 6)
        row = {"shape": layer.name, "N": N, "K": K, "M": M, "us": {name: round(time, 3) for name, time in us.items()}}
        chosen = {"chosen": rule.choose(N, K, M)} | ({"chosen_adapter": rule.choose(N, K, M, R)} if adapted else {})
        row |= {name: described(choice) for name, choice in chosen.items()}
        row |= {"predicted": [round(choice.microseconds, 1) for choice in chosen.values()]}
        yield row | ({"left_out": left_out} if left_out else {})


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--random", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    result, compiling = conditions(), list[subprocess.Popen]()
    if options.random is None:
        work = [(Layer(shape, (N,), K), TOKENS, ["marlin", "humming"]) for shape, (N, K) in SHAPES.items()]
    else:
        few, many = (random_points(options.random, options.seed, *limits) for limits in (FEW, MANY))
        compiling = warm_humming(few[:HUMMING])
        order = [pair for both in zip(few, many, strict=True) for pair in both]
        work = [(layer, (M,), ["marlin", *["humming"] * ((layer, M) in few[:HUMMING])]) for layer, M in order]
        result |= {"seed": options.seed, "humming_points": HUMMING}
    variants = list(rule.rule().variants)
    gemm.compile_all(variants)
    passed, refused = gate_in_processes(variants, 12)
    assert len(passed) == len(variants), f"the gate refuses {refused}"
    print(f"{len(passed)} variants pass the gate", flush=True)
    for process in compiling:
        process.wait()
    rows, failed = list[dict](), list[str]()
    for layer, tokens, names in work:
        try:
            for row in time_layer(layer, tokens, names, options.random is not None):
                rows.append(row)  # one by one: what came before a wrong answer stays
        except (AssertionError, RuntimeError) as error:
            failed.append(
                f"{layer.name} ({layer.N}, {layer.K}), {tokens} tokens: {type(error).__name__}: {error}"[:300]
            )
            print(failed[-1], flush=True)
        head = json.dumps({**result, **({"failed": failed} if failed else {})}, indent=1)[:-2]
        options.out.write_text(f'{head},\n "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n")
        gc.collect()
        torch.cuda.empty_cache()
    print(len(rows), "points in", options.out, flush=True)
    if failed:
        sys.exit(
            f"{len(failed)} of {len(work)} points have no figure, for ours is wrong there or does not run: {failed[0]}"
        )
    regimes = tables.both_regimes({"rows": rows}) if options.random else []
    print("\n".join("; ".join(row) for row in regimes) or tables.layers({"rows": rows}))


if __name__ == "__main__":
    main()
