"""The tiled linear layer on a CPU, and the sources that a GPU would compile."""

import contextlib
import functools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qerl_kernels import gemm, linear_tiles, nvfp4, tiles
from qerl_kernels.adapter import VARIANTS, Adapter, Shrink, spans
from qerl_kernels.linear import linear


def example(N: int = 48, K: int = 80, operand: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    packed = nvfp4.quantize(torch.randn(N, K, generator=generator).bfloat16())
    row_scale = torch.rand(N, generator=generator) + 0.5
    x = torch.randn(2, 5, K, generator=generator)
    return packed, row_scale, tiles.tile_weight(packed.codes, packed.block_scales, row_scale, operand), x


@pytest.mark.parametrize("operand", tiles.ORDERS, ids=str)
def test_linear_and_gradient_are_those_of_the_dense_layer(operand):
    packed, row_scale, weight, x = example(operand=operand)
    dense = nvfp4.dequantize(packed.codes, packed.block_scales).double() * row_scale.double()[:, None]
    bias, dy = torch.randn(48), torch.randn(2, 5, 48)
    x.requires_grad_()
    y = linear_tiles.linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), dense, bias.double())
    assert (y.double() - exact).norm() < 1e-6 * exact.norm()
    y.backward(dy)
    exact = dy.double() @ dense
    assert (x.grad.double() - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("operand", tiles.ORDERS, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_slabs_and_a_factor_give_the_product(biased, operand, monkeypatch):
    packed, _, _, x = example(192, 80)
    weight = tiles.tile_weight(packed.codes, packed.block_scales, torch.tensor(0.37), operand)
    assert weight.scale.item() == pytest.approx(0.37)
    monkeypatch.setattr(linear_tiles, "MOST_SLAB_ROWS", 128)
    dense = tiles.dequantize(weight.tiles, 192, 80, operand)
    expanded = dense * nvfp4.expanded_factor(operand)  # what the GPU's kernel gives
    assert torch.equal(expanded.double() / nvfp4.expanded_factor(operand), dense.double())
    monkeypatch.setattr(gemm, "dequantize", lambda w, first, rows: expanded[first : first + rows].float())
    bias = torch.randn(192) if biased else None
    rows = x.view(-1, 80)
    exact = (rows.double() @ dense.double().t()) * weight.scale + (0 if bias is None else bias.double())
    y = linear_tiles.expand_and_multiply(rows, weight, weight.scale.item(), bias)
    assert (y.double() - exact).norm() < 1e-6 * exact.norm()


def test_the_host_knows_a_scale_only_where_all_rows_share_it():
    packed, row_scale, weight, _ = example()
    assert weight.scale is None
    shared = tiles.tile_weight(packed.codes, packed.block_scales, torch.full_like(row_scale, 0.25))
    assert shared.scale == 0.25


def test_operators_pass_torch_library_checks():
    _, _, w, x = example()
    arguments = (x.requires_grad_(), w.tiles, w.row_scale, w.counters, w.N, w.K, None, None, None, None, None)
    torch.library.opcheck(torch.ops.qerl.nvfp4_linear_tiles.default, arguments)


def test_shapes_that_do_not_fit_are_refused():
    _, _, weight, x = example()
    with pytest.raises(ValueError, match=r"the weight is \(48, 80\)"):
        linear_tiles.linear(x[..., :-1], weight)
    with pytest.raises(ValueError, match=r"the weight is \(48, 80\)"):
        linear_tiles.linear(x, weight, torch.zeros(47))


@given(divisor=st.integers(1, 2**26), n=st.integers(0, 2**31 - 1))
def test_a_division_by_multiplying_is_exact(divisor, n):
    by = gemm.Divisor.of(divisor)
    for number in (n, n // divisor * divisor, max(n // divisor * divisor - 1, 0), 2**31 - 1):
        assert number * by.magic >> by.shift == number // divisor


@given(N=st.integers(1, 10**6))
def test_slabs_are_equal_and_cover_the_weight(N):
    rows = linear_tiles.slab_rows(N)
    slabs = -(-N // rows)
    assert rows % tiles.TILE == 0 and rows <= linear_tiles.MOST_SLAB_ROWS
    assert slabs == -(-N // linear_tiles.MOST_SLAB_ROWS) and (slabs - 1) * rows < N


@pytest.mark.parametrize("of_tiles", [False, True], ids=["canonical", "tiles"])
def test_sums_are_fp32_under_autocast_too(of_tiles):
    """Without its row scale a product of float16 may be beyond its end, which fp32 does not mind."""
    packed, _, weight, x = example(operand=torch.float16)
    x, small = (100 * x).half().requires_grad_(), torch.tensor(1e-5)
    weight = tiles.tile_weight(packed.codes, packed.block_scales, small, torch.float16)
    run = partial(linear_tiles.linear, weight=weight)
    if not of_tiles:
        run = partial(linear, codes=packed.codes, block_scales=packed.block_scales, row_scale=small)
    plain = run(x)
    plain.backward(torch.ones_like(plain))
    gradient, x.grad = x.grad, None
    with torch.autocast("cpu", torch.float16):
        y = run(x)
        y.backward(torch.ones_like(y))
    assert torch.equal(y, plain) and torch.equal(x.grad, gradient) and bool(torch.isfinite(y).all())
    dense = nvfp4.dequantize(packed.codes, packed.block_scales).float()
    assert (x.float() @ dense.t()).abs().max() > 65504


def test_an_activation_of_another_type_than_the_tiles_is_refused():
    _, _, weight, x = example(operand=torch.float16)
    with pytest.raises(ValueError, match=r"needs \(M, 80\) torch.float16"):
        gemm.product(x.view(-1, 80).bfloat16(), weight, gemm.deepest(64, 2, 1, 1, 2, 2, 0))


def test_the_matrix_instruction_names_every_register_once():
    text = gemm.wgmma_source(24)
    assert gemm.wgmma_source(24, torch.float16) == text.replace(".bf16.bf16", ".f16.f16") != text
    assert "m64n24k16" in text and text.count('"+f"') == 12 and text.count('"r"(a[') == 4
    assert all(f"%{i}" in text for i in range(17)) and "%17" not in text


def test_each_stream_has_counters_of_its_own_and_each_graph_the_weights(monkeypatch):
    _, _, weight, _ = example()
    now = {"stream": 1, "capturing": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=now["stream"]))
    monkeypatch.setattr(gemm, "_counters_of", functools.cache(lambda device, stream: torch.zeros(8)))
    first = gemm.counters_for(weight)
    assert gemm.counters_for(example()[2]) is first is not weight.counters
    now["stream"] = 2
    assert gemm.counters_for(weight) is not first
    now["capturing"] = True
    assert gemm.counters_for(weight) is weight.counters


def test_the_kernel_is_told_how_its_work_is_divided(monkeypatch):
    """The call as it goes to the driver, without a GPU: grid, tiles, runs, adapter, and who is ahead."""
    calls = []
    c = gemm.deepest(64, 2, 1, 1, 2, 2, 0)
    monkeypatch.setattr(gemm, "_kernel", lambda *_: (lambda grid, *args, overlap: calls.append((grid, args[-1])), 132))
    monkeypatch.setattr(gemm, "tensor_map", lambda *_: None)
    monkeypatch.setattr(gemm.torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(gemm, "counters_for", lambda weight: weight.counters)
    packed = nvfp4.quantize(torch.randn(192, 512).bfloat16())
    weight = tiles.tile_weight(packed.codes, packed.block_scales, torch.tensor(1.0))
    adapter = Adapter(torch.randn(32, 512).bfloat16(), torch.randn(192, 32).bfloat16(), spans([192], 32))
    x = torch.randn(100, 512).bfloat16()
    for used, how in ((None, None), (adapter, None), (adapter, Shrink(VARIANTS[2], 1))):
        assert gemm.product(x, weight, c, None, used, how).shape == (100, 192)
    assert gemm.product(torch.randn(600, 512).bfloat16(), weight, c, None, adapter, None).shape == (600, 192)
    grids, problems = zip(*calls, strict=True)
    # 2 tiles of rows x 2 of tokens, 4 stages each: sixteen runs of one stage
    assert grids[0] == (16, 1, 1) and grids[3] == (80, 1, 1)
    assert [(p.M, p.n_tiles, p.m_tiles, p.shared_tiles) for p in problems[:3]] == [(100, 2, 2, 4)] * 3
    assert [p.adapter_columns for p in problems] == [0, 32, 32, 32]
    assert [p.tokens_ready for p in problems] == [0, 1, 1, 0], "cuBLAS does not say when x is complete"
    with pytest.raises(ValueError, match="does not divide"):
        gemm.divide(gemm.deepest(64, 4, 4, 1, 4, 2, 0), 192, 640, 1, 132)
