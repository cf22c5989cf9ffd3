"""Test what the driver is told about a product, against figures worked out by hand, and that one plan serves many
products.
"""

import gc
import threading
import weakref

import pytest
import torch
from qerl_kernels import counters, gemm, linear_tiles, nvfp4, rule, tiles
from qerl_kernels.adapter import VARIANTS, Adapter, Shrink, spans

C = gemm.deepest(64, 2, 1, 1, 2, 2, 0)  # tiles of 128 rows and 64 tokens; each stage has 2 tiles of 64 columns


def problem(N=192, K=512, R=32, operand=torch.bfloat16):
    """Return a weight, an adapter and a bias; their values do not matter here."""
    packed = nvfp4.quantize(torch.randn(N, K).bfloat16())
    weight = tiles.tile_weight(packed.codes, packed.block_scales, torch.tensor(1.0), operand)
    return weight, Adapter(torch.randn(R, K).to(operand), torch.randn(N, R).to(operand), spans([N], R)), torch.randn(N)


def tokens(M, K=512, operand=torch.bfloat16):
    return torch.randn(M, K).to(operand)


@pytest.mark.parametrize("operand", tiles.ORDERS, ids=str)
def test_the_kernel_is_told_how_its_work_is_divided_and_where_everything_lies(operand, recorded):
    """Check the grid, tiles, runs, adapter, and the attribute that lets a kernel start before the one ahead ends."""
    weight, adapter, bias = problem(operand=operand)
    x = tokens(100, operand=operand)
    results = [
        gemm.product(x, weight, C, bias, used, how)
        for used, how in ((None, None), (adapter, None), (adapter, Shrink(VARIANTS[2], 1)))
    ]
    assert [one.kernel for one in recorded.launched] == ["nvfp4_gemm", *["adapter_shrink", "nvfp4_gemm"] * 2]
    products = [one for one in recorded.launched if one.kernel == "nvfp4_gemm"]
    for y, one in zip(results, products, strict=True):
        assert y.shape == (100, 192) and y.dtype == operand
        # 2 tiles of rows x 2 of tokens with 4 stages each make sixteen runs of one stage.
        assert (one.grid, one.threads, one.shared_memory) == ((16, 1, 1), 384, C.shared_memory())
        assert one.attributes == {6: (1, 0, 0)} and f"'HALF': {int(operand == torch.float16)}" in one.code
        p = one.problem
        assert (p.M, p.N, p.blocks, p.k_tiles, p.n_tiles, p.m_tiles, p.shared_tiles) == (100, 192, 3, 8, 2, 2, 4)
        assert (p.adapter_columns, p.tokens_ready) == ((0, 0) if one is products[0] else (32, 1))
        for by, divisor in ((p.by_steps, 4), (p.by_units, 16), (p.by_blocks, 16)):
            assert [n * by.magic >> by.shift for n in (divisor - 1, divisor, 7 * divisor)] == [0, 1, 7]
        at = one.pointers
        given = {"tiles": weight.tiles, "row_scale": weight.row_scale, "bias": bias, "y": y}
        assert {name: at[name] for name in given} == {name: tensor.data_ptr() for name, tensor in given.items()}
        assert at["counters"] == counters.counters_for(weight.counters, 0).data_ptr() != weight.counters.data_ptr()
        assert one.map[:6] == (x.data_ptr(), {torch.float16: 6, torch.bfloat16: 9}[operand], 2, 512, 100, 1024)
        assert one.map[6:8] == (64, 64), "boxes of 64 columns and the tokens of a tile"
        if one is products[0]:
            assert (at["s"], at["b"], at["spans"]) == (0, 0, 0)
            continue
        assert (at["b"], at["spans"]) == (adapter.b.data_ptr(), adapter.spans.data_ptr())
        # Each of 16 blocks has fp32 sums of a tile of 128 rows and 64 tokens; s lies behind them.
        assert at["s"] == at["partials"] + 4 * 128 * 64 * 16
    sizes = 192, 512, 100, 32, None, operand, True
    assert gemm.plan(threading.get_ident(), C, None, *sizes).room == 4 * 128 * 64 * 16 + 2 * 100 * 32
    small = [one for one in recorded.launched if one.kernel == "adapter_shrink"]
    # The grid has 8 blocks of columns, and blocks of 16 or 32 rows of A and 32 or 16 tokens. Shared memory holds 17
    # times what a block adds up.
    assert [(one.grid, one.threads, one.shared_memory) for one in small] == [
        ((8, 1, 4), 512, 4 * 17 * 32 * 32),
        ((8, 2, 1), 512, 4 * 17 * 16 * 16),
    ]
    for one, product in zip(small, products[1:], strict=True):
        assert one.arguments == (x.data_ptr(), adapter.a.data_ptr(), product.pointers["s"], 100, 512, 32, 512)
        assert one.attributes == {6: (1, 0, 0), 4: (8, 1, 1)}


def test_beyond_512_tokens_cublas_makes_s_and_does_not_say_when_x_is_complete(recorded):
    weight, adapter, _ = problem()
    x = tokens(600)
    assert gemm.product(x, weight, C, None, adapter).shape == (600, 192)
    (one,) = recorded.launched
    # 2 tiles of rows x 10 of tokens with 4 stages each make eighty runs.
    assert one.grid == (80, 1, 1) and one.problem.adapter_columns == 32 and not one.problem.tokens_ready
    assert one.pointers["s"] not in (0, one.pointers["partials"])
    with pytest.raises(ValueError, match="does not divide"):
        gemm.divide(gemm.deepest(64, 4, 4, 1, 4, 2, 0), 192, 640, 1, 132)


def test_where_no_tile_is_shared_there_is_no_memory_for_sums_and_a_kernel_beside_is_left_room(recorded):
    weight, adapter, _ = problem()
    x, whole = tokens(100), gemm.replace(C, splits=gemm.WHOLE)
    y = gemm.product(x, weight, whole, None, None, None, False)
    (one,) = recorded.launched
    assert one.grid == (4, 1, 1) and one.problem.shared_tiles == 0 and one.attributes == {}
    assert one.pointers["partials"] == y.data_ptr(), "which the kernel does not look at"
    how = Shrink(VARIANTS[1], 3, beside=True)  # 8 x 1 x 3 blocks
    gemm.product(tokens(2000), weight, C, None, adapter, how)
    # 2 x 32 tiles of 4 stages could take 256 runs, but 132 blocks run at one time, less these 24.
    assert recorded.launched[-1].grid == (108, 1, 1)


def test_a_plan_keeps_no_tensor_and_its_next_product_has_none_of_the_last(recorded):
    for overlap in range(2):  # the rule also goes through the operator's own kernel
        # slipcover sometimes keeps the frames it looks at, whereas a plan would keep tensors each time
        for _ in range(3):
            left = after_a_product(overlap)
            gc.collect()
            if all(part() is None for part in left):
                break
        assert [part() is None for part in left] == [True] * 3
        before = recorded.launched[-1]
        second, wide = problem(), torch.randn(100, 520).bfloat16()[:, :512]
        y = run(wide, *second, overlap)
        small, product = recorded.launched[-2:]
        weight, adapter, bias = second
        at = product.pointers
        assert product.problem.M == 100 and product.grid == before.grid and product.code == before.code
        expected = (weight.tiles, weight.row_scale, bias, y, adapter.b, adapter.spans)
        names = ("tiles", "row_scale", "bias", "y", "b", "spans")
        assert [at[name] for name in names] == [tensor.data_ptr() for tensor in expected]
        assert small.arguments == (wide.data_ptr(), adapter.a.data_ptr(), at["s"], 100, 512, 32, 520)
        assert (product.map[0], product.map[5]) == (wide.data_ptr(), 1040)
        run(wide, weight, adapter, None, overlap)
        assert recorded.launched[-1].pointers["bias"] == 0
    assert gemm.plan.cache_info().currsize == 2 and gemm.plan.cache_info().maxsize == gemm.PLANS


def after_a_product(through_operator):
    """Run a product and return weak references to its tensors.

    It has its own frame because coverage may keep frames alive.
    """
    weight, adapter, bias = problem()
    run(tokens(100), weight, adapter, bias, through_operator)
    return [weakref.ref(part) for part in (weight.tiles, adapter.a, adapter.b)]


def run(x, weight, adapter, bias, through_operator):
    if not through_operator:
        return gemm.product(x, weight, C, bias, adapter)
    parts = weight.tiles, weight.row_scale, weight.counters, weight.N, weight.K, None
    return linear_tiles._launch(x, *parts, bias, adapter.a, adapter.b, adapter.spans, weight.operand)


def test_threads_have_plans_of_their_own(recorded):
    """Check that each thread has its own plan, since otherwise one would overwrite what another is about to launch."""
    weight, adapter, bias = problem()
    inputs = [tokens(100) for _ in range(4)]
    ready, seen = threading.Barrier(4), []

    def often(x):
        ready.wait()
        for _ in range(25):
            y = run(x, weight, adapter, bias, True)
            seen.append((x.data_ptr(), y.data_ptr(), y))

    threads = [threading.Thread(target=often, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = {one.pointers["y"]: one.map[0] for one in recorded.launched if one.kernel == "nvfp4_gemm"}
    assert len(seen) == 100 and made == {y: x for x, y, _ in seen}
    assert gemm.plan.cache_info().currsize == linear_tiles._planned.cache_info().currsize == 4


def test_each_stream_has_counters_of_its_own_and_each_graph_the_weights(recorded):
    """Check the counters also for an existing plan, and after the streams' counters were given back."""
    weight, _, _ = problem()
    x = tokens(100)

    def counted(of=weight):
        gemm.product(x, of, C)
        return recorded.launched[-1].pointers["counters"], recorded.launched[-1].stream

    first = counted()
    assert counted(problem()[0]) == first != (weight.counters.data_ptr(), 0)
    recorded.stream = 2
    second = counted()
    assert second[1] == 2 and second[0] != first[0]
    recorded.capturing = True
    assert counted() == (weight.counters.data_ptr(), 2)
    recorded.capturing = False
    assert counted() == second
    kept = counters.counters_for(weight.counters, 2)  # keeps this memory from being reused
    counters.forget_counters()
    assert counted()[0] not in (kept.data_ptr(), weight.counters.data_ptr())


def test_rows_that_do_not_start_at_16_bytes_are_copied_before_the_kernel_reads_them_and_others_are_not(recorded):
    weight, _, _ = problem(64, 128)
    wide = torch.randn(20, 144).bfloat16()
    right = (wide[:, 8:136], wide[:0, :128])
    wrong = (wide[:, 4:132], torch.randn(20, 132).bfloat16()[:, :128], torch.randn(128, 24).bfloat16().t()[:20])
    for x in (*right, *wrong):
        assert gemm.product(x, weight, C).shape == (len(x), 64)
    seen = [(one.map[0], one.map[5]) for one in recorded.launched]
    assert len(seen) == 4, "of no tokens nothing is launched"
    assert seen[0] == (right[0].data_ptr(), 288)
    for x, (at, stride) in zip(wrong, seen[1:], strict=True):
        assert at % 16 == 0 and stride == 256 and at != x.data_ptr()


def test_the_copy_of_rows_is_what_they_hold(recorded, monkeypatch):
    weight, adapter, _ = problem(64, 128)
    x, copies = torch.randn(20, 144).bfloat16()[:, 4:132], []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, a: copies.append(x) or x @ a.t())
    gemm.product(x.repeat(30, 1)[:, :], weight, C, None, adapter)
    wide = torch.randn(600, 132).bfloat16()[:, :128]
    gemm.product(wide, weight, C, None, adapter)
    assert copies[1].is_contiguous() and torch.equal(copies[1], wide)
    assert copies[1].data_ptr() == recorded.launched[-1].map[0] != wide.data_ptr()


def test_the_operator_launches_what_the_rule_chooses_for_tokens_of_any_shape(recorded):
    weight, adapter, bias = problem()
    for shape in ((3, 7, 512), (21, 512), (512,), (2, 0, 512)):
        recorded.launched.clear()
        y = run(torch.randn(shape).bfloat16(), weight, adapter, bias, True)
        assert y.shape == (*shape[:-1], 192)
        M = y.numel() // 192
        assert [one.problem.M for one in recorded.launched[1:]] == [M] * bool(M)
        if M:
            chosen = rule.choose(192, 512, M, 32, False).configuration
            assert f"'TOKENS': {chosen.tokens}," in recorded.launched[1].code
    with pytest.raises(ValueError, match=r"needs \(M, 512\) torch.bfloat16"):
        run(torch.randn(3, 512), weight, adapter, bias, True)


def test_the_kernel_that_expands_gets_a_block_for_each_128_columns_of_64_rows(recorded):
    weight, _, _ = problem(208, 272)
    results = [gemm.dequantize(weight, *given) for given in ((), (64,), (128, 70), (0, None, 8))]
    assert [w.shape for w in results] == [(208, 272), (144, 272), (70, 272), (208, 280)]
    assert [one.grid for one in recorded.launched] == [(3, 4, 1), (3, 3, 1), (3, 2, 1), (3, 4, 1)]
    assert {(one.threads, len(one.attributes)) for one in recorded.launched} == {(256, 0)}
    assert [one.arguments[:2] for one in recorded.launched] == [
        (weight.tiles.data_ptr(), w.data_ptr()) for w in results
    ]
    # The arguments are rows, columns, tiles of 64 columns (an even number), the first row, and the row stride.
    numbers = [one.arguments[2:] for one in recorded.launched]
    assert numbers == [(208, 272, 6, 0, 272), (144, 272, 6, 64, 272), (70, 272, 6, 128, 272), (208, 272, 6, 0, 280)]
