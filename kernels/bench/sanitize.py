"""Run one kernel of a kind at a small size, for compute-sanitizer to look at: sanitize.sh.

    python kernels/bench/sanitize.py KIND [OPERAND]      # KIND of KINDS, OPERAND bfloat16 or float16

Raises AssertionError where a product is wrong; what else is wrong is for the tool to say.
"""

import sys

import gate
import torch
from qerl_kernels import gemm, nvfp4, tiles
from qerl_kernels.adapter import VARIANTS, Shrink
from qerl_kernels.counters import counters_for
from qerl_kernels.driver import current_stream

# (configuration, rows, tokens): so many rows that a kind does its work on any number of multiprocessors
KINDS = {
    "runs": (gemm.deepest(64, 4, 2, 1, 4, 4, 0), 320, 64),  # equal runs of a tile, two groups share the columns
    "long_runs": (gemm.deepest(128, 2, 1, 1, 2, 4, 0), 64 * 2 * 150, 128),  # runs longer than tiles go on from sums
    "cluster": (gemm.deepest(64, 4, 2, 1, 4, 4, 0, cluster=4), 320, 64),
    "synchronous": (gemm.deepest(8, 4, 4, 1, 4, 2, 0, 1), 320, 8),
}


def product(kind: str, operand: torch.dtype, adapted: bool) -> None:
    """Compute one product with random tokens, a bias, and an adapter of two parts where ``adapted``."""
    configuration, N, tokens = KINDS[kind]
    K, M = 1024, tokens + 3
    codes, scales = gate.every_product(N, K, "cuda")
    row_scale = torch.rand(N, device="cuda") * 1e-3 + 1e-4
    weight, bias = tiles.tile_weight(codes, scales, row_scale, operand), torch.randn(N, device="cuda")
    x = torch.randn(M, K, device="cuda").to(operand)
    adapter = gate.two_parts(N, K, 32, operand) if adapted else None
    y = gemm.product(x, weight, configuration, bias, adapter, Shrink(VARIANTS[0], 4) if adapted else None)
    exact = (x.double() @ nvfp4.dequantize(codes, scales).double().t()) * row_scale.double() + bias.double()
    if adapter is not None:
        exact += (x.double() @ adapter.a.double().t()).to(operand).double() @ adapter.b.double().t()
    gate.agree(y, exact, kind)
    assert not counters_for(weight.counters, current_stream(0)).any(), "counters are not zero after a call"


def main() -> None:
    """Run the kind that the command line names."""
    kinds = *KINDS, "shrink", "dequantize"
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        sys.exit(f"which kernel: one of {', '.join(kinds)}; then, if you like, float16")
    kind, operand = sys.argv[1], getattr(torch, sys.argv[2] if len(sys.argv) > 2 else "bfloat16")
    torch.manual_seed(0)
    if kind == "shrink":
        gate.check_shrink(70, 1040, 64, Shrink(VARIANTS[3], 2), operand)
    elif kind == "dequantize":
        codes, scales = gate.every_product(320, 1024, "cuda")
        weight = tiles.tile_weight(codes, scales, torch.ones((), device="cuda"), operand)
        expected = nvfp4.dequantize(codes, scales).to(operand) * nvfp4.expanded_factor(operand)
        assert torch.equal(gemm.dequantize(weight), expected)
    else:
        product(kind, operand, adapted=True)
    torch.cuda.synchronize()
    print(f"{kind} in {operand}: right")


if __name__ == "__main__":
    main()
