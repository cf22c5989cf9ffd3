"""Test which variant the rule chooses for each layer and number of tokens, and refit its coefficients from the
committed times.
"""

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qerl_kernels import cost, gemm, rule
from qerl_kernels.adapter import SPLITS, VARIANTS, Shrink
from qerl_kernels.compiler import CompileError

KERNELS = Path(__file__).parents[2] / "kernels"
TIMES = sorted((KERNELS / "results").glob("tune_*_NVIDIA_H200.json"))
H200 = rule.rule().machine
COLUMNS = st.sampled_from([0, 32, 64, 96])


@pytest.fixture(scope="module")
def bench():
    """Import the bench modules that fit the rule, and forget them afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(KERNELS / "bench"))
        import fit
        import layers
        import tune

        yield {"fit": fit, "layers": layers, "tune": tune}
        for name in ("fit", "layers", "tune", "gate", "timing"):
            sys.modules.pop(name, None)


def valid(c: gemm.Configuration, K: int) -> None:
    """Assert that the kernel can run this variant for a weight of K columns."""
    assert 2 * -(-K // 128) % c.depth == 0
    assert c.depth % c.kgroups == 0 and c.warpgroups % c.kgroups == 0 and 4 * c.rows % c.group == 0
    in_turns = c.depth // c.kgroups * (4 * c.rows // c.group) % 2 == 0
    assert c.synchronous or in_turns, "fragments would be overwritten while in use"
    assert c.shared_memory() <= gemm.SHARED_MEMORY and c.stages >= 2 and c.tokens % 8 == 0
    sums = 4 * 64 * c.tile_blocks() * c.tokens * c.kgroups
    assert c.cluster == 1 or sums <= c.stages * c.depth * (128 * c.tokens + 2304 * c.tile_blocks())
    assert 1 <= c.cluster <= 8, "more blocks in a cluster are not portable"


@settings(max_examples=150, deadline=None)
@given(N=st.integers(1, 4000), K=st.integers(1, 2000), M=st.integers(1, 16384), columns=COLUMNS, one=st.booleans())
def test_any_layer_gets_a_variant_that_fits(N, K, M, columns, one):
    chosen = rule.choose(16 * N, 16 * K, M, columns, may_expand=one)
    assert chosen.microseconds > 0
    c = chosen.configuration
    if c is None:
        assert one, "rows with scales of their own cannot be multiplied by cuBLAS"
        return
    valid(c, 16 * K)
    assert gemm.replace(c, splits=0) in rule.rule().variants, "only these are loaded"
    covered = -(-M // c.tokens) * c.tokens
    assert covered <= max(1.5 * M, M + 48), "most of the work would be for no token"


@pytest.mark.parametrize("M", [1, 256, 257, 511, 513, 1025, 2049, 16384])
def test_edges_of_every_listed_layer(bench, M):
    for layer in bench["layers"].all_layers()[::6]:
        for columns in (0, 32):
            chosen = rule.choose(layer.N, layer.K, M, columns)
            # The cost stays within a factor of what bytes and operations alone take.
            least = max(layer.N * layer.K * 0.5625 / 4.9e6, 2e-6 * M * layer.N * layer.K / 990)
            assert least < chosen.microseconds < 2.2 * least + 22, (layer, M, columns, chosen)


def test_more_tokens_never_cost_much_less(bench):
    """Check that costs have no hole between points: the kernel of a larger product could always take a smaller one."""
    for layer in bench["layers"].all_layers()[::27]:
        costs = [rule.choose(layer.N, layer.K, M).microseconds for M in (*range(8, 513, 8), *range(544, 2049, 32))]
        assert all(later >= 0.82 * now for now, later in itertools.pairwise(costs)), layer


@given(M=st.integers(1, 4096), R=st.integers(1, 12))
def test_launches_of_the_small_kernel_cover_the_tokens(M, R):
    found = rule.launches(M)
    assert found or M > 4096 - 64
    for how, index in found:
        splits, of_rows, of_tokens = how.grid(M, 32 * R)
        assert how.variant == VARIANTS[index] and splits == SPLITS and of_rows * 16 * how.variant.groups == 32 * R
        assert 1 <= of_tokens <= how.most and (of_tokens == how.most or of_tokens * how.variant.tokens >= M)
        free = [how._replace(beside=True).left_free(M, 32 * R, count) for count in (16, 78, 132)]
        assert free[0] == 0 and free[1] <= 15 and free[2] <= 26, "the product would have too few multiprocessors"


def test_rounding_up_adds_at_most_an_eighth():
    for M in range(57, 20000):
        assert M <= rule.rounded(M) <= 1.125 * M
    assert [rule.rounded(M) for M in (1, 8, 9, 512, 513, 2048, 2049)] == [8, 8, 16, 512, 544, 2048, 2304]


def test_another_gpu_has_fewer_blocks_and_slower_memory():
    h100 = cost.Machine("NVIDIA H100 PCIe", 114, tuple(count * 114 // 132 for count in H200.clusters), 2.0)
    for M in (1, 64, 256):
        here, there = (rule.choose(37888, 3584, M, machine=machine).microseconds for machine in (H200, h100))
        assert 1.1 * here < there < 2.5 * here


def test_the_rule_says_where_it_was_not_fitted(monkeypatch):
    class There:
        name, multi_processor_count, memory_clock_rate, memory_bus_width = "NVIDIA H100 80GB HBM3", 132, 2619000, 5120

    monkeypatch.setattr(rule.torch.cuda, "get_device_properties", lambda device: There)
    rule.machine_of.cache_clear()
    assert "NVIDIA H200" in (message := rule.untuned()) and "H100 80GB" in message
    assert 0.6 * H200.rate < rule.machine_of(0).rate < 0.8 * H200.rate
    assert rule.memory_rate(There) == pytest.approx(3.35, abs=0.01), "TB/s of NVIDIA's data sheet"
    assert rule.memory_rate(object()) == 0 and rule.machine_of(0).clusters == H200.clusters
    assert rule.choose(4096, 4096, 64, machine=rule.machine_of(0)).shrink is None
    There.name = H200.gpu
    rule.machine_of.cache_clear()
    assert rule.untuned() is None
    rule.machine_of.cache_clear()


def test_the_coefficients_follow_from_the_times(bench):
    """Refit every ninth variant, since refitting all of them takes too long for a test."""
    fit = bench["fit"]
    times = fit.Times([json.loads(file.read_text()) for file in TIMES])
    assert times.machine == H200
    found = fit.fit_all(times, only=list(rule.rule().variants)[::9])
    assert len(found) >= 7
    for c, by in found.items():
        assert by == pytest.approx(rule.rule().variants[c], rel=2e-3, abs=2e-3), c
    assert fit.fit_expand(times) == pytest.approx(rule.rule().expand, rel=2e-3, abs=2e-3)


def test_costs_with_an_adapter_are_near_the_times(bench):
    """Check the launches whose product waits for the small kernel, and those where both run side by side."""
    times, by = bench["fit"].Times([json.loads(file.read_text()) for file in TIMES]), rule.rule().shrink
    ratios = {True: [], False: []}
    for row in times.adapted:
        K, M, R = (row[name] for name in "KMR")
        for (c, listed), us in row["ours"].items():
            how = Shrink.read(json.loads(listed)) if listed not in ("", "null") else None
            if how is None or how.beside:
                continue
            w, index = times.work(c, row), VARIANTS.index(how.variant)
            room = how.blocks(M, R) <= H200.multiprocessors - w.streaming
            small = by.alone(how, index, M, K, R, H200.multiprocessors)
            ratios[room].append(by.together(row["ours"][c, ""], small, room, c.tokens, R, w.ends) / us)
    for of in map(sorted, ratios.values()):
        tenth = len(of) // 10
        assert of[tenth] > 0.9 and of[-tenth] < 1.12 and 0.98 < of[len(of) // 2] < 1.02


def test_a_choice_takes_about_as_long_as_the_quickest_that_was_timed(bench):
    """Compare products alone, then products with an adapter. With an adapter the rule chooses both kernels itself,
    whichever small kernel was timed.
    """
    times = bench["fit"].Times([json.loads(file.read_text()) for file in TIMES])
    alone = sorted(
        min(row["ours"].values()) / rule.choose(row["N"], row["K"], row["M"], may_expand=False).microseconds
        for row in times.points[::11]
    )
    tenth = len(alone) // 10
    assert alone[tenth] > 0.9 and alone[-tenth] < 1.2 and 0.97 < alone[len(alone) // 2] < 1.06
    ratios, slower, by_cublas = [], [], set()
    for row in times.adapted[::8]:
        N, K, M, R = (row[name] for name in "NKMR")
        chosen = rule.choose(N, K, M, R, may_expand=False)
        assert chosen.microseconds > rule.choose(N, K, M, may_expand=False).microseconds
        timed = {
            (c, Shrink.read(json.loads(how)) if how != "null" else None): us
            for (c, how), us in row["ours"].items()
            if how
        }
        ratios.append(min(timed.values()) / chosen.microseconds)
        if (us := timed.get(chosen[:2])) is not None:
            slower.append(us / min(timed.values()))
        if chosen.shrink is None:
            by_cublas.add(M)
    ratios.sort()
    tenth = len(ratios) // 10
    assert ratios[tenth] > 0.9 and ratios[-tenth] < 1.2 and 0.97 < ratios[len(ratios) // 2] < 1.06
    assert len(slower) > 15 and sum(slower) / len(slower) < 1.04
    assert by_cublas and min(by_cublas) > 512


def test_the_weight_is_expanded_only_where_no_kernel_is_clearly_quicker(bench):
    times = bench["fit"].Times([json.loads(file.read_text()) for file in TIMES])
    rows = [row for row in times.points if "expand" in row["us"]]
    expanded = [row for row in rows if rule.choose(row["N"], row["K"], row["M"]).configuration is None]
    assert len(expanded) > 15
    assert all(row["us"]["expand"] < 1.1 * min(row["ours"].values()) for row in expanded)
    for row in expanded:
        kernel = rule.choose(row["N"], row["K"], row["M"], may_expand=False)
        assert kernel.configuration is not None, "rows with scales of their own cannot be multiplied by cuBLAS"
        N, K, M = (row[name] for name in "NKM")
        assert rule._expanded(N, K, M, 32, H200).microseconds > rule._expanded(N, K, M, 0, H200).microseconds + 7
    assert rule.choose(4096, 4096, 8192, 32, may_expand=False).shrink is None, "not timed with so many tokens"


def test_the_small_kernel_goes_through_its_tokens_and_columns_in_rounds():
    """Count the rounds by hand: 132 multiprocessors run 16 clusters of 8 blocks at a time, and a warp takes 32 columns
    at once.
    """
    for how, M, K, R in [
        (Shrink(VARIANTS[0], 1), 8, 3584, 32),
        (Shrink(VARIANTS[0], 3), 64, 4096, 32),
        (Shrink(VARIANTS[1], 64), 512, 4097, 96),
        (Shrink(VARIANTS[2], 33), 528, 18944, 64),
        (Shrink(VARIANTS[5], 64), 4096, 2048, 64),
    ]:
        tokens, groups, warps = how.variant
        parts, loops = -(-M // tokens), [0] * min(how.most, -(-M // tokens))
        for part in range(parts):
            loops[part % len(loops)] += 1
        waiting, waves = len(loops) * R // (16 * groups), 0  # in clusters
        while waiting > 0:
            waiting, waves = waiting - 16, waves + 1
        chunks = [0] * (SPLITS * warps)
        for chunk in range(0, K, 32):
            chunks[chunk // 32 % len(chunks)] += 1
        assert cost.shrink_work(how, M, K, R, 132) == (max(loops) * waves, max(chunks)), how


def test_expanding_takes_rounds_of_tiles_of_128_rows_and_256_tokens():
    """Count rounds on ten multiprocessors: one more row or one more token makes one more tile."""
    rounds = [cost.expand_features(N, 4000, M, 10)[3] / 4 for N, M in ((1280, 256), (1280, 257), (1281, 256), (1, 1))]
    assert rounds == [1, 2, 2, 1]
    # 0.5625 bytes read and 2 written per weight; 2 M N K operations
    assert cost.expand_features(1000, 2000, 500, 10)[1:3] == pytest.approx((5.125, 2.0))


def test_weight_tiles_are_shared_by_as_many_token_tiles_as_the_kernel_runs_one_after_another():
    text = (Path(cost.__file__).with_name("schedule.cuh")).read_text()
    assert f"constexpr int RUN_ROWS = {cost.NEIGHBOURS};" in text


def within_ten_percent(by, points, work):
    """Return how much slower, on average, the variant preferred by ``by`` is than the fastest timed one.

    Also return in how many percent of the points it is at most 10 % slower. Both figures are given for up to 64, 256,
    1024 and more tokens.
    """
    found = {}
    for row in points:
        costs = [
            (cost.product(c, by[gemm.replace(c, splits=0)], work(c, row), row["M"], H200.rate), us)
            for (c, _), us in row["ours"].items()
            if gemm.replace(c, splits=0) in by
        ]
        limit = next(limit for limit in (64, 256, 1024, 8192) if row["M"] <= limit)
        found.setdefault(limit, []).append(min(costs)[1] / min(row["ours"].values()))
    slower = [f"{100 * (sum(of) / len(of) - 1):.1f}" for _, of in sorted(found.items())]
    return slower, [f"{sum(100 * (one <= 1.1) for one in of) / len(of):.0f}" for _, of in sorted(found.items())]


def check_said(by, points, work):
    """Check that the README states the shares within 10 %, and return how much slower the preferred variants are."""
    slower, (a, b, c, d) = within_ten_percent(by, points, work)
    assert min(map(float, (a, b, c, d))) >= 85 and max(map(float, slower)) < 5
    assert f"{a}, {b}, {c} and {d} % are within 10 %" in " ".join((KERNELS / "README.md").read_text().split())
    return slower


def test_what_is_preferred_is_nearly_the_fastest_of_what_was_timed(bench):
    second = bench["fit"].Times([json.loads(TIMES[1].read_text())])
    check_said(rule.rule().variants, second.points, second.work)


@pytest.mark.slow
def test_that_holds_on_layers_that_a_rule_was_not_fitted_to(bench):
    fit = bench["fit"]
    first, second = (fit.Times([json.loads(file.read_text())]) for file in TIMES)
    seen = {(row["N"], row["K"]) for row in first.points}
    new = [row for row in second.points if (row["N"], row["K"]) not in seen]
    fitted = fit.fit_all(first)
    a, b, c, d = check_said({c: fitted[c] for c in fit.useful(first, fitted)}, new, second.work)
    page = " ".join((KERNELS / "README.md").read_text().split())
    assert f"({len(new)} points) {a}, {b}, {c} and {d} % slower" in page


@settings(max_examples=100, deadline=None)
@given(N=st.integers(1, 4000), K=st.integers(1, 2000), M=st.integers(1, 16384), columns=COLUMNS)
def test_in_a_fixed_order_no_tile_is_cut_and_one_block_adds_up_a_tile(N, K, M, columns):
    chosen = rule.choose_fixed(16 * N, 16 * K, rule.rounded(M), columns, H200)
    c = chosen.configuration
    valid(c, 16 * K)
    assert (c.cluster, c.kgroups, c.synchronous, c.splits) == (1, 1, 0, gemm.WHOLE)
    d = gemm.divide(c, 16 * N, 16 * K, M, H200.multiprocessors)
    assert d.shared == 0 and d.grid == min(d.tiles, H200.multiprocessors)
    w = cost.work(c, 16 * N, 16 * K, M, H200.multiprocessors)
    assert w.stages * d.grid >= d.tiles * d.steps and w.sums == 0, "the busiest block has at least the mean"
    if columns:
        assert chosen.shrink.variant.warps == 16, "another number of warps divides the columns otherwise"
    else:
        assert chosen.shrink is None


def test_where_no_variant_of_one_order_is_left_that_is_said():
    there = gemm.replace(H200, refused=frozenset(c for c in rule.rule().variants if rule.has_fixed_order(c)))
    assert rule.choose(192, 512, 8, machine=there).configuration is not None
    with pytest.raises(CompileError, match="one order of sums"):
        rule.choose_fixed(192, 512, 8, 0, there)


def test_a_sweep_without_a_rule_draws_from_what_could_be_the_fastest(bench):
    """Hold the share of ways whose cost is near the least, for a sweep times few of them at each point."""
    tune = bench["tune"]
    every, near, known = tune.every_variant(), 0, 0
    for layer, M in bench["layers"].random_points(60, 3, 8, 8192):
        N, K, M = layer.N, layer.K, rule.rounded(M)
        costs = {c: microseconds for microseconds, c in rule.ranked(N, K, M, H200)}
        ways = [c for c in tune.could_be_fastest(every, N, K, M, H200) if c in costs]
        near += sum(costs[c] < 1.3 * min(costs.values()) for c in ways)
        known += len(ways)
    assert near > 0.48 * known
