"""Test the tiled linear layer on a CPU, and the sources that a GPU would compile."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qerl_kernels import gemm, linear_tiles, nvfp4, rule, tiles
from qerl_kernels.adapter import spans
from qerl_kernels.linear import linear


def example(N=48, K=80, operand=torch.bfloat16):
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
    expanded = dense * nvfp4.expanded_factor(operand)  # the GPU's kernel returns this scaled weight
    assert torch.equal(expanded.double() / nvfp4.expanded_factor(operand), dense.double())
    monkeypatch.setattr(gemm, "dequantize", lambda w, first, rows: expanded[first : first + rows].float())
    bias = torch.randn(192) if biased else None
    rows = x.view(-1, 80)
    exact = (rows.double() @ dense.double().t()) * weight.scale + (0 if bias is None else bias.double())
    y = linear_tiles.expand_and_multiply(rows, weight, weight.scale.item(), bias)
    assert (y.double() - exact).norm() < 1e-6 * exact.norm()


MANY = 300  # with this many tokens the tests below expand the weight


@pytest.fixture
def hopper(monkeypatch):
    """Replace a GPU's kernels by torch in fp32, and return the list of configurations that were chosen and launched."""
    asked, here = [], rule.rule().machine

    def plan(thread, configuration, how, N, K, M, columns, device, operand, overlap):
        def run(x, w, row_scale, counters, bias, a, b, spans):
            asked.append((configuration, how))
            assert bias is None or bias.dtype == torch.float32
            assert overlap and thread == threading.get_ident() and columns == (0 if a is None else 32)
            y = x @ (tiles.dequantize(w, N, K, operand).float() * row_scale[:, None]).t()
            y = y if bias is None else y + bias
            return y if a is None else y + x @ a.t() @ b.t()

        return run

    def dequantize(weight, first=0, rows=None):
        w = tiles.dequantize(weight.tiles, weight.N, weight.K, weight.operand).float()[first:][:rows]
        return w * nvfp4.expanded_factor(weight.operand)

    def choose(N, K, M, columns, may_expand, machine):
        asked.append((N, K, M, columns, may_expand, machine))
        return rule.Choice(None, None, 1.0) if may_expand and M == MANY else rule.choose(N, K, M, columns)

    def choose_fixed(*given):
        asked.append(given)
        return rule.choose_fixed(*given)

    monkeypatch.setattr(gemm, "plan", plan)
    monkeypatch.setattr(gemm, "check", lambda *_: None)  # fp32 operands make the products comparable
    monkeypatch.setattr(gemm, "dequantize", dequantize)
    monkeypatch.setattr(linear_tiles, "supported", lambda device: True)
    monkeypatch.setattr(linear_tiles, "machine", lambda index, operand: here)
    choices = {"rounded": rule.rounded, "choose": choose, "choose_fixed": choose_fixed}
    monkeypatch.setattr(linear_tiles, "rule", SimpleNamespace(**choices))
    linear_tiles._planned.cache_clear()
    yield asked
    linear_tiles._planned.cache_clear()


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
        assert launched == ([] if is_expanded or not M else [(chosen.configuration, chosen.shrink)])


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
    """Check that sums stay fp32 under autocast, since in float16 a product without its row scale may overflow."""
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
