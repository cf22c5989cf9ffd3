"""Time the table of kernels/README.md: our kernel as ``linear_tiles`` picks it, against BF16, Marlin and Humming.

``python run.py --out NVIDIA_H200.json [--shapes 7B o] [--tokens 1,16]``

All are timed in one run. A baseline is timed only if its answer is right (the tolerance allows for what its format
loses) and is named where it is left out; our kernel only behind the gate of gate.py.
"""

import argparse
import gc
import json
from functools import partial
from pathlib import Path

import baselines
import torch
from qerl_kernels import gemm, linear_tiles, nvfp4_triton, rule, tiles
from qerl_kernels.conditions import conditions
from random_points import described
from timing import copies, interleaved
from tune import gate_in_processes

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


def time_shape(shape: str, tokens: list[int]) -> list[dict]:
    """Return the rows of the table for one layer."""
    N, K = SHAPES[shape]
    names = ["marlin", "humming"]
    weights: dict[str, list] = {name: [] for name in ("bf16", "qerl", *names)}
    for i in range(copies(N * K * 9 // 16)):
        w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
        packed = nvfp4_triton.quantize(w)
        tensor_scale = 1 / packed.divisor
        tiled = tiles.tile_weight(packed.codes, packed.block_scales, tensor_scale)
        weights["qerl"].append(partial(linear_tiles.linear, weight=tiled))
        if i < copies(2 * N * K):
            weights["bf16"].append(baselines.bf16(w))
        if i == 0:
            x = torch.randn(32, K, device="cuda").to(torch.bfloat16)
            dense = nvfp4_triton.dequantize(packed.codes, packed.block_scales).double() * tensor_scale.double()
            exact = x.double() @ dense.t()
            del dense
            baselines.check(f"qerl {shape}", weights["qerl"][0], x, exact, 3e-3)
        for name in list(names):
            try:
                weights[name].append(getattr(baselines, name)(packed.codes, packed.block_scales, tensor_scale))
                if i == 0:
                    baselines.check(f"{name} {shape}", weights[name][0], x, exact, 2e-2)
            except (AssertionError, AttributeError, ImportError, RuntimeError, TypeError) as error:
                print(f"{name} is left out of {shape}: {type(error).__name__}: {error}", flush=True)
                names.remove(name)
                del weights[name]
        del w, packed
    rows = []
    for M in tokens:
        x = torch.randn(M, K, device="cuda").to(torch.bfloat16)
        variants = {name: [partial(product, x) for product in products] for name, products in weights.items()}
        times = interleaved(variants, rounds=5, at_least=20 if M <= 256 else 6)
        chosen = described(rule.choose(N, K, M))
        rows.append({"shape": shape, "N": N, "K": K, "M": M, "us": times, "chosen": chosen})
        best = min(us for name, us in times.items() if name != "qerl")
        listed = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
        print(f"{shape} M={M}: {best / times['qerl']:.2f}x of the best  {listed}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="kernels.json")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    options = parser.parse_args()
    tokens = [int(M) for M in options.tokens.split(",")]
    variants = list(rule.rule().variants)
    gemm.compile_all(variants)
    passed, refused = gate_in_processes(variants, 12)
    assert len(passed) == len(variants), f"the gate refuses {refused}"
    print("the gate passes", flush=True)
    result = {**conditions(), "rows": []}
    for shape in options.shapes.split(","):
        result["rows"] += time_shape(shape, tokens)
        Path(options.out).write_text(json.dumps(result, indent=1))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
