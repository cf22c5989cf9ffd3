"""Test the policy adapter of a tiled layer: which columns of B a block of rows may use, and the product on a CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qerl_kernels import linear_tiles, nvfp4, tiles
from qerl_kernels.adapter import COLUMNS, Adapter, Shrink, Variant, padded, quickest, shrink, spans


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.sampled_from([8, 16, 24, 32, 64, 128]))
def test_outside_of_its_span_a_block_of_rows_has_no_columns(sixteens, rank):
    widths = [16 * n for n in sixteens]
    columns = padded(len(widths) * rank)
    b = torch.zeros(sum(widths), columns)
    for i, rows in enumerate(b.split(widths)):
        rows[:, i * rank : (i + 1) * rank] = 1
    table = spans(widths, rank)
    assert table.shape == (-(-sum(widths) // 64), 2) and table.dtype == torch.int32
    for (low, high), rows in zip(table.tolist(), b.split(64), strict=True):
        assert low % COLUMNS == 0 and high % COLUMNS == 0 and 0 <= low < high <= columns
        used = rows.any(dim=0).nonzero()[:, 0]
        assert low <= int(used[0]) < low + COLUMNS and high - COLUMNS <= int(used[-1]) < high


def example(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    packed = nvfp4.quantize(torch.randn(96, 80, generator=generator).bfloat16())
    weight = tiles.tile_weight(packed.codes, packed.block_scales, 1 / packed.divisor)
    dense = nvfp4.dequantize(packed.codes, packed.block_scales).double() / packed.divisor.double()
    a, b = torch.randn(32, 80, generator=generator).to(dtype), torch.randn(96, 32, generator=generator).to(dtype)
    x = torch.randn(3, 5, 80, generator=generator).to(dtype)
    return weight, dense, Adapter(a, b, spans([96], 32)), x


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_the_adapters_product_is_added_to_the_base(biased):
    weight, dense, adapter, x = example()
    bias = torch.randn(96) if biased else None
    exact = x.double() @ (dense + adapter.b.double() @ adapter.a.double()).t() + (bias.double() if biased else 0)
    y = linear_tiles.linear(x, weight, bias, adapter)
    assert (y.double() - exact).norm() < 1e-6 * exact.norm()


def test_the_sum_of_base_and_adapter_is_rounded_once():
    weight, dense, adapter, x = example(torch.bfloat16)
    s = shrink(x.view(-1, 80), adapter.a).view(3, 5, 32)
    exact = x.double() @ dense.t() + s.double() @ adapter.b.double().t()
    assert torch.equal(linear_tiles.linear(x, weight, None, adapter), exact.bfloat16())


def test_an_adapter_has_no_gradient_here():
    weight, _, adapter, x = example()
    with pytest.raises(ValueError, match="no gradient through an adapter"):
        linear_tiles.linear(x.requires_grad_(), weight, None, adapter)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda a: Adapter(a.a[:31], a.b, a.spans), r"must be \(R, K\) and \(N, R\)"),
        (lambda a: Adapter(a.a[:16], a.b[:, :16], a.spans), "a multiple of 32"),
        (lambda a: Adapter(a.a, a.b[:80], a.spans), r"must be \(R, K\) and \(N, R\)"),
        (lambda a: Adapter(a.a, a.b, a.spans[:1]), "spans are"),
        (lambda a: Adapter(a.a, a.b, a.spans.long()), "spans are torch.int64"),
    ],
    ids=["A too short", "rank of 16", "B too short", "spans too short", "spans of int64"],
)
def test_an_adapter_that_does_not_fit_is_refused(broken, message):
    weight, _, adapter, x = example()
    with pytest.raises(ValueError, match=message):
        linear_tiles.linear(x, weight, None, broken(adapter))


def test_the_operator_with_an_adapter_passes_torch_library_checks():
    w, _, adapter, x = example()
    arguments = (x, w.tiles, w.row_scale, w.counters, w.N, w.K, w.scale, None, adapter.a, adapter.b, adapter.spans)
    torch.library.opcheck(torch.ops.qerl.nvfp4_linear_tiles.default, arguments)


def test_the_quickest_launch_by_itself_has_a_block_for_every_tile_of_tokens():
    found = {M: (tuple(quickest(M).variant), quickest(M).most) for M in (1, 8, 9, 64, 65, 512)}
    assert found == {
        1: ((8, 1, 16), 1),
        8: ((8, 1, 16), 1),
        9: ((16, 1, 16), 1),
        64: ((16, 1, 16), 4),
        65: ((32, 2, 16), 3),
        512: ((32, 2, 16), 16),
    }


def test_a_product_leaves_multiprocessors_free_only_where_it_is_told_to_and_they_are_few():
    how = Shrink(Variant(8, 1, 16), 3)  # 8 blocks of columns, 2 of rows (R = 32) and 3 of tokens
    assert how.blocks(64, 32) == 48 and how.left_free(64, 32, 1000) == 0
    beside = how._replace(beside=True)
    assert (beside.left_free(64, 32, 240), beside.left_free(64, 32, 239)) == (48, 0)
