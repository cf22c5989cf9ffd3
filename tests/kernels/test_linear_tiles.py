"""The tiled linear layer on a CPU, the table of variants, and the sources that a GPU would compile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qerl_kernels import gemm, linear_tiles, nvfp4, tiles
from qerl_kernels.adapter import SMALL_M, SPLITS, VARIANTS


def example(N: int = 48, K: int = 80):
    generator = torch.Generator().manual_seed(0)
    packed = nvfp4.quantize(torch.randn(N, K, generator=generator).bfloat16())
    row_scale = torch.rand(N, generator=generator) + 0.5
    x = torch.randn(2, 5, K, generator=generator)
    return packed, row_scale, tiles.tile_weight(packed.codes, packed.block_scales, row_scale), x


def test_linear_and_gradient_are_those_of_the_dense_layer():
    packed, row_scale, weight, x = example()
    dense = nvfp4.dequantize(packed.codes, packed.block_scales).double() * row_scale.double()[:, None]
    bias, dy = torch.randn(48), torch.randn(2, 5, 48)
    x.requires_grad_()
    y = linear_tiles.linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), dense, bias.double())
    assert (y.double() - exact).norm() < 1e-6 * exact.norm()
    y.backward(dy)
    exact = dy.double() @ dense
    assert (x.grad.double() - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_slabs_and_a_factor_give_the_product(biased, monkeypatch):
    packed, _, _, x = example(192, 80)
    weight = tiles.tile_weight(packed.codes, packed.block_scales, torch.tensor(0.37))
    assert weight.scale.item() == pytest.approx(0.37)
    monkeypatch.setattr(linear_tiles, "MOST_SLAB_ROWS", 128)
    dense = tiles.dequantize(weight.tiles, 192, 80)
    monkeypatch.setattr(gemm, "dequantize", lambda w, first, rows: dense[first : first + rows].float())
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


@settings(max_examples=200, deadline=None)
@given(N=st.integers(1, 4000), K=st.integers(1, 2000), M=st.integers(1, 16384), adapted=st.booleans())
def test_every_shape_gets_a_variant_that_fits(N, K, M, adapted):
    """Whatever the layer: stages divide its columns, shared memory suffices, a narrow tile for few tokens."""
    c = linear_tiles.choose(16 * N, 16 * K, M, adapted)
    assert 2 * -(-16 * K // 128) % c.depth == 0
    assert c.depth % c.kgroups == 0 and c.warpgroups % c.kgroups == 0 and 4 * c.rows % c.group == 0
    in_turns = c.depth // c.kgroups * (4 * c.rows // c.group) % 2 == 0
    assert c.synchronous or in_turns, "fragments would be overwritten while in use"
    assert c.shared_memory() <= gemm.SHARED_MEMORY and c.stages >= 2
    assert c.tokens % 8 == 0 and c.tokens >= min(M, 64)
    sums = 4 * 64 * c.tile_blocks() * c.tokens * c.kgroups
    assert c.cluster == 1 or sums <= c.stages * c.depth * (128 * c.tokens + 2304 * c.tile_blocks())
    assert 1 <= c.cluster <= 8, "more blocks in a cluster are not portable"


@given(N=st.integers(1, 4000), K=st.integers(1, 2000), M=st.integers(1, SMALL_M), R=st.integers(1, 12))
def test_every_shape_gets_a_launch_of_the_small_kernel_that_covers_it(N, K, M, R):
    how = linear_tiles.choose_shrink(16 * N, 16 * K, M)
    splits, of_rows, of_tokens = how.grid(M, 32 * R)
    assert how.variant in VARIANTS, "only these are loaded before CUDA graphs are captured"
    assert splits == SPLITS and of_rows * 16 * how.variant.groups == 32 * R
    assert 1 <= of_tokens <= how.most and (of_tokens == how.most or of_tokens * how.variant.tokens >= M)
    free = [how.left_free(M, 32 * R, multiprocessors) for multiprocessors in (16, 78, 132)]
    assert set(free) <= {0, splits * of_rows * of_tokens}
    assert free[0] == 0 and free[1] <= 15 and free[2] <= 26, (
        "the product would have too few, or none on a slice of a GPU"
    )


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


def test_a_weight_is_expanded_from_the_tokens_that_the_table_says():
    assert not linear_tiles.expands(37888, 3584, 4095) and linear_tiles.expands(37888, 3584, 4096)
    nearest = linear_tiles.table()[3584, 3584].expand_from
    assert not linear_tiles.expands(3600, 3568, nearest - 1) and linear_tiles.expands(3600, 3568, nearest)


def test_the_table_knows_the_layers_of_qwen():
    assert {(3584, 3584), (37888, 3584), (3584, 18944), (55296, 5120), (5120, 27648)} <= set(linear_tiles.table())


def test_the_matrix_instruction_names_every_register_once():
    text = gemm.wgmma_source(24)
    assert "m64n24k16" in text and text.count('"+f"') == 12 and text.count('"r"(a[') == 4
    assert all(f"%{i}" in text for i in range(17)) and "%17" not in text
