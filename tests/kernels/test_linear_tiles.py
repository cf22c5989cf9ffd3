"""The tiled linear layer on a CPU, and the sources that a GPU would compile."""

import functools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qerl_kernels import gemm, linear_tiles, nvfp4, rule, tiles
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


def test_an_adapter_adds_its_product_on_a_cpu_too():
    packed, row_scale, weight, x = example()
    dense = nvfp4.dequantize(packed.codes, packed.block_scales).double() * row_scale.double()[:, None]
    adapter = Adapter(torch.randn(32, 80), torch.randn(48, 32), spans([48], 32))
    exact = x.double() @ dense.t() + (x.double() @ adapter.a.double().t()) @ adapter.b.double().t()
    assert (linear_tiles.linear(x, weight, None, adapter).double() - exact).norm() < 1e-6 * exact.norm()


MANY = 300  # tokens for which the weight is expanded below


@pytest.fixture
def hopper(monkeypatch):
    """A GPU whose kernels are played by torch in fp32: what has been chosen for, and what has been launched."""
    asked, here = [], rule.rule().machine

    def product(x, weight, configuration, bias, adapter, how):
        asked.append((configuration, how))
        assert bias is None or bias.dtype == torch.float32
        y = (
            x
            @ (
                tiles.dequantize(weight.tiles, weight.N, weight.K, weight.operand).float() * weight.row_scale[:, None]
            ).t()
        )
        y = y if bias is None else y + bias
        return y if adapter is None else y + x @ adapter.a.t() @ adapter.b.t()

    def dequantize(weight, first=0, rows=None):
        w = tiles.dequantize(weight.tiles, weight.N, weight.K, weight.operand).float()[first:][:rows]
        return w * nvfp4.expanded_factor(weight.operand)

    def choose(N, K, M, columns, may_expand, machine):
        asked.append((N, K, M, columns, may_expand, machine))
        return rule.Choice(None, None, 1.0) if may_expand and M == MANY else rule.choose(N, K, M, columns)

    def choose_fixed(*given):
        asked.append(given)
        return rule.choose_fixed(*given)

    monkeypatch.setattr(gemm, "product", product)
    monkeypatch.setattr(gemm, "dequantize", dequantize)
    monkeypatch.setattr(linear_tiles, "supported", lambda device: True)
    monkeypatch.setattr(linear_tiles, "machine", lambda index, operand: here)
    choices = {"rounded": rule.rounded, "choose": choose, "choose_fixed": choose_fixed}
    monkeypatch.setattr(linear_tiles, "rule", SimpleNamespace(**choices))
    return asked


@pytest.mark.parametrize("operand", tiles.ORDERS, ids=str)
@pytest.mark.parametrize("adapted", [False, True], ids=["no adapter", "adapter"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("M", [0, 3, MANY])
def test_a_gpu_runs_the_variant_that_the_rule_chooses_or_expands_the_weight(M, biased, adapted, operand, hopper):
    N, K, here = 192, 512, rule.rule().machine
    packed = nvfp4.quantize(torch.randn(N, K).bfloat16())
    x, bias = torch.randn(M, 1, K), torch.randn(N) if biased else None
    a, b = (torch.randn(32, K), torch.randn(N, 32)) if adapted else (None, None)
    for row_scale, fixed in ((torch.tensor(0.37), False), (torch.rand(N) + 0.5, False), (torch.tensor(0.37), True)):
        weight = tiles.tile_weight(packed.codes, packed.block_scales, row_scale, operand)
        parts = a, b, spans([N], 32) if adapted else None
        hopper.clear()
        y = linear_tiles._launch(
            x, weight.tiles, weight.row_scale, weight.counters, N, K, weight.scale, bias, *parts, operand, fixed
        )
        dense = nvfp4.dequantize(packed.codes, packed.block_scales).double() * row_scale.double().reshape(-1, 1)
        exact = x.double() @ dense.t() + (0 if bias is None else bias.double())
        exact = exact + (x.double() @ a.double().t() @ b.double().t() if adapted else 0)
        assert y.shape == (M, 1, N) and (y.double() - exact).norm() <= 1e-6 * exact.norm()
        given, *launched = hopper
        columns = 32 if adapted else 0
        if fixed:
            assert given == (N, K, rule.rounded(max(M, 1)), columns, here)
            chosen = rule.choose_fixed(*given)
        else:
            assert given == (N, K, max(M, 1), columns, row_scale.dim() == 0, here)
            chosen = rule.choose(N, K, max(M, 1), columns)
        is_expanded = M == MANY and row_scale.dim() == 0 and not fixed
        assert launched == ([] if is_expanded else [(chosen.configuration, chosen.shrink)])


@pytest.mark.parametrize("operand", tiles.ORDERS, ids=str)
def test_the_gradient_on_a_gpu_is_the_product_with_the_expanded_weight(operand, hopper, monkeypatch):
    monkeypatch.setattr(linear_tiles, "_matmul_fp32", lambda a, b: a.float() @ b.float())
    packed, row_scale, _, _ = example(operand=operand)
    dy = torch.randn(2, 5, 48)
    for scale in (torch.tensor(0.37), row_scale):
        weight = tiles.tile_weight(packed.codes, packed.block_scales, scale, operand)
        dx = linear_tiles._expand_backward(dy, weight.tiles, weight.row_scale, 48, 80, weight.scale, operand)
        exact = dy.double() @ (
            nvfp4.dequantize(packed.codes, packed.block_scales).double() * scale.double().reshape(-1, 1)
        )
        assert dx.shape == (2, 5, 80) and (dx.double() - exact).norm() < 1e-6 * exact.norm()


def test_tiles_on_another_gpu_are_refused_by_its_name(monkeypatch):
    _, _, weight, x = example()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match="Hopper GPUs only, not on NVIDIA A100: use the checkpoint's layout"):
        linear_tiles._launch(x, weight.tiles, weight.row_scale, weight.counters, 48, 80, *[None] * 5)


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
    monkeypatch.setattr(gemm, "_kernel", lambda *_: (lambda grid, *args, **_: calls.append((grid, args[-1])), 132))
    monkeypatch.setattr(gemm, "tensor_map", lambda *_: None)
    monkeypatch.setattr(gemm, "stream_of", lambda device: 0)
    monkeypatch.setattr(gemm, "counters_for", lambda weight, stream: weight.counters)
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


def test_rows_that_do_not_start_at_16_bytes_are_copied_before_the_kernel_reads_them_and_others_are_not(monkeypatch):
    seen = []
    monkeypatch.setattr(gemm, "_kernel", lambda *_: (lambda *_, **__: None, 132))
    monkeypatch.setattr(gemm, "tensor_map", lambda x, *_: seen.append(x))
    monkeypatch.setattr(gemm, "stream_of", lambda device: 0)
    monkeypatch.setattr(gemm, "counters_for", lambda weight, stream: weight.counters)
    packed = nvfp4.quantize(torch.randn(64, 128).bfloat16())
    weight = tiles.tile_weight(packed.codes, packed.block_scales, torch.tensor(1.0))
    c, wide = gemm.deepest(64, 2, 1, 1, 2, 2, 0), torch.randn(20, 144).bfloat16()
    right = (wide[:, 8:136], wide[:0, :128])
    wrong = (wide[:, 4:132], torch.randn(20, 132).bfloat16()[:, :128], torch.randn(128, 24).bfloat16().t()[:20])
    for x in (*right, *wrong):
        assert gemm.product(x, weight, c).shape == (len(x), 64)
    assert len(seen) == 4, "of no tokens nothing is launched"
    assert seen[0] is right[0]
    for x, copied in zip(wrong, seen[1:], strict=True):
        assert torch.equal(copied, x) and copied.is_contiguous() and copied.data_ptr() % 16 == 0
        assert copied.data_ptr() != x.data_ptr()


def test_the_kernel_that_expands_gets_a_block_for_each_128_columns_of_64_rows(monkeypatch):
    calls = []
    monkeypatch.setattr(
        gemm, "_dequantize_kernel", lambda *_: lambda grid, *args, stream: calls.append((grid, args[2:]))
    )
    monkeypatch.setattr(gemm, "stream_of", lambda device: 0)
    packed = nvfp4.quantize(torch.randn(208, 272).bfloat16())
    weight = tiles.tile_weight(packed.codes, packed.block_scales, torch.tensor(1.0))
    shapes = [gemm.dequantize(weight, *given).shape for given in ((), (64,), (128, 70), (0, None, 8))]
    assert shapes == [(208, 272), (144, 272), (70, 272), (208, 280)]
    assert [grid for grid, _ in calls] == [(3, 4, 1), (3, 3, 1), (3, 2, 1), (3, 4, 1)]
    # rows, columns, tiles of 64 columns (an even number), the first row, numbers from a row to the next
    assert [numbers for _, numbers in calls] == [
        (208, 272, 6, 0, 272),
        (144, 272, 6, 64, 272),
        (70, 272, 6, 128, 272),
        (208, 272, 6, 0, 280),
    ]
