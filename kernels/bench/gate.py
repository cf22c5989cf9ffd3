"""Check that a configuration of the product is right before it is timed.

* one-hot activations give the dequantized weight bit for bit, over all 16 codes and every block scale that is a number;
* random activations agree with float64;
* two runs give the same bits, and memory full of NaN changes nothing;
* odd numbers of tokens, rows and columns off the tile, activations with a stride;
* an adapter of two parts, its rank off the 32 columns that the kernel takes at a time.

``check_layer`` asks the same of a layer as the rule runs it, at numbers of tokens where the choice changes.
"""

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from qerl_kernels import gemm, linear_tiles, nvfp4, rule, tiles
from qerl_kernels.adapter import Adapter, Shrink, Variant, padded, shrink, spans
from qerl_kernels.counters import counters_for
from qerl_kernels.driver import current_stream

ROUNDING = {torch.bfloat16: 2.5e-3, torch.float16: 3.2e-4}  # relative error of outputs that are rounded once or twice
EDGES = (1, 8, 9, 255, 256, 257, 258, 447, 511, 512, 513, 640, 1023, 2049, 8193)  # tokens around which choices change


def every_product(N: int, K: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and block scales: each block holds all 16 codes, and the blocks go through all scale bytes."""
    blocks = N * K // 16
    order = torch.rand(blocks, 16, device=device).argsort(dim=1).to(torch.uint8)
    scale_bytes = torch.arange(blocks, device=device).remainder(256).to(torch.uint8)
    scale_bytes = torch.where((scale_bytes & 0x7F) == 0x7F, torch.zeros_like(scale_bytes), scale_bytes)
    return nvfp4.pack(order.view(N, K)), scale_bytes.view(N, K // 16).view(torch.float8_e4m3fn)


def poison(megabytes: int = 64) -> None:
    """Leave NaN in the memory that the next allocations get."""
    dirty = [torch.full((2**18,), float("nan"), device="cuda") for _ in range(megabytes)]
    large = torch.full((megabytes * 2**18,), float("nan"), device="cuda")
    del dirty, large


def two_parts(N: int, K: int, rank: int, operand: torch.dtype = torch.bfloat16) -> Adapter:
    """Return a random adapter of a layer whose first 80 rows are one part and the others another."""
    widths, columns = [80, N - 80], padded(2 * rank)
    a, b = torch.zeros(columns, K, device="cuda"), torch.zeros(N, columns, device="cuda")
    a[: 2 * rank] = torch.randn(2 * rank, K, device="cuda") / K**0.5
    b[:80, :rank] = torch.randn(80, rank, device="cuda")
    b[80:, rank : 2 * rank] = torch.randn(N - 80, rank, device="cuda")
    return Adapter(a.to(operand), b.to(operand), spans(widths, rank).cuda())


def agree(y: torch.Tensor, exact: torch.Tensor, what: str, limit: float | None = None) -> None:
    """Raise AssertionError where ``y`` is further from ``exact`` than rounding, or the relative ``limit``, explains."""
    error = ((y.double() - exact).norm() / exact.norm()).item()
    assert error < (limit or ROUNDING[y.dtype]), f"{what}: relative error {error:.1e}"


def check_shrink(M: int, K: int, rank: int, how: Shrink | None = None, operand: torch.dtype = torch.bfloat16) -> None:
    """Raise AssertionError where the adapter's first product is wrong or not the same twice."""
    a = torch.randn(padded(rank), K, device="cuda").to(operand)
    x = torch.randn(M, K + 48, device="cuda").to(operand)[:, 16 : 16 + K]
    poison(8)
    s, exact = shrink(x, a, how), x.double() @ a.double().t()
    agree(s, exact, f"s = x A^T for {(M, K, rank, how)}")
    assert torch.equal(s, shrink(x, a, how)), f"s = x A^T is not the same twice for {(M, K, rank, how)}"


def check_launch(how: Shrink, operand: torch.dtype = torch.bfloat16) -> None:
    """Check one launch on few columns, columns off the warps' share, and more tokens than one round takes."""
    for M, K, rank in ((1, 16, 8), (70, 3600, 64), (140, 18944, 96)):
        check_shrink(M, K, rank, how, operand)


@contextmanager
def within_a_minute() -> Iterator[None]:
    """End the program if a kernel hangs in the block."""
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def check(configuration: gemm.Configuration, operand: torch.dtype = torch.bfloat16) -> None:
    """Raise AssertionError, which names what is wrong, for a configuration that fails."""
    torch.manual_seed(0)
    tokens = configuration.tokens
    for N, K in ((192, 768), (144, 208 if configuration.depth < 4 else 512), (2064, 1280)):
        codes, scales = every_product(N, K, "cuda")
        w = nvfp4.dequantize(codes, scales).to(operand)  # exact in either type
        one = tiles.tile_weight(codes, scales, torch.ones((), device="cuda"), operand)
        expanded = w * nvfp4.expanded_factor(operand)
        assert torch.equal(gemm.dequantize(one), expanded), f"dequantize of ({N}, {K}) is not exact"
        assert torch.equal(gemm.dequantize(one, room=24)[:, :K], expanded), f"dequantize of ({N}, {K}) with room"
        # the last takes more tiles than the GPU has multiprocessors: runs are longer than tiles
        most = tokens * -(-150 // -(-N // (64 * configuration.tile_blocks()))) - 5
        for M in (K, 1, tokens - 1, tokens + 1, *[most] * (N > 2000)):
            poison()
            x = torch.eye(K, dtype=operand, device="cuda").roll(3, 0)[torch.arange(M, device="cuda") % K]
            y = gemm.product(x, one, configuration)
            wrong = (y != w.t().roll(3, 0)[torch.arange(M, device="cuda") % K]).sum().item()
            assert wrong == 0, f"one-hot ({M}, {N}, {K}): {wrong} of {y.numel()} outputs differ"

        row_scale = torch.rand(N, device="cuda") * 1e-3 + 1e-4
        bias = torch.randn(N, device="cuda") * 0.1
        scaled = tiles.tile_weight(codes, scales, row_scale, operand)
        for M in (1, tokens, 2 * tokens + 3):
            wide = torch.randn(M, K + 48, device="cuda").to(operand)
            for x in (wide[:, :K].contiguous(), wide[:, 16 : 16 + K]):
                poison()
                y = gemm.product(x, scaled, configuration, bias)
                exact = (x.double() @ w.double().t()) * row_scale.double() + bias.double()
                agree(y, exact, f"random ({M}, {N}, {K})")
                for _ in range(3):
                    poison(8)
                    again = gemm.product(x, scaled, configuration, bias)
                    assert torch.equal(y, again), f"({M}, {N}, {K}): two runs give different bits"
                adapter = two_parts(N, K, 24 if M == 1 else 32, operand)
                expected = exact + shrink(x, adapter.a).double() @ adapter.b.double().t()  # s is rounded
                for how in (None, Shrink(Variant(16, 2, 16), 1, beside=True)):
                    y = gemm.product(x, scaled, configuration, bias, adapter, how)
                    agree(y, expected, f"adapter ({M}, {N}, {K}), {how}")
                    again = gemm.product(x, scaled, configuration, bias, adapter, how)
                    assert torch.equal(y, again), f"adapter ({M}, {N}, {K}), {how}: two runs give different bits"
                for splits in (1, 3):
                    y = gemm.product(x, scaled, replace(configuration, splits=splits), bias)
                    agree(y, exact, f"random ({M}, {N}, {K}) in {splits} runs")
        assert not counters_for(scaled.counters, current_stream(0)).any(), "counters are not zero after a call"


def check_layer(
    N: int, K: int, tokens: tuple[int, ...] = EDGES, rank: int = 32, operand: torch.dtype = torch.bfloat16
) -> None:
    """Check a layer as ``linear_tiles.linear`` runs it, without and with an adapter, with one tensor scale and several.

    Raises AssertionError.
    """
    torch.manual_seed(0)
    codes, scales = every_product(N, K, "cuda")
    dense = nvfp4.dequantize(codes, scales).double()
    adapter = two_parts(N, K, rank, operand)
    for row_scale in (torch.full((), 7e-4, device="cuda"), torch.rand(N, device="cuda") * 1e-3 + 1e-4):
        weight = tiles.tile_weight(codes, scales, row_scale, operand)
        for M in tokens:
            x = torch.randn(M, K, device="cuda").to(operand)
            exact = (x.double() @ dense.t()) * row_scale.double()
            poison(8)
            y = linear_tiles.linear(x, weight)
            chosen = rule.choose(N, K, M, 0, weight.scale is not None, linear_tiles.machine(0, operand))
            agree(y, exact, f"({M}, {N}, {K}) by {chosen}")
            assert torch.equal(y, linear_tiles.linear(x, weight)), f"({M}, {N}, {K}) by {chosen}: twice, other bits"
            exact += (x.double() @ adapter.a.double().t()).to(operand).double() @ adapter.b.double().t()
            y = linear_tiles.linear(x, weight, None, adapter)
            agree(y, exact, f"({M}, {N}, {K}) with an adapter")
            assert torch.equal(y, linear_tiles.linear(x, weight, None, adapter)), f"adapter ({M}, {N}, {K}): other bits"
