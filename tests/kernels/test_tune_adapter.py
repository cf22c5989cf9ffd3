"""What the tuner of the adapter tries."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qerl_kernels.adapter import SMALL_M, SPLITS, VARIANTS

BENCH = Path(__file__).parents[2] / "kernels" / "bench"


@pytest.fixture(scope="module")
def tune_adapter():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import tune_adapter

        yield tune_adapter


@given(M=st.integers(1, SMALL_M), R=st.sampled_from([32, 64, 96]), takes_all=st.booleans())
def test_launches_differ_and_are_of_loaded_variants(tune_adapter, M, R, takes_all):
    found = tune_adapter.launches(M, R, takes_all)
    assert found and len(set(found)) == len(found)
    for how in found:
        assert how.variant in VARIANTS and 1 <= how.most <= -(-M // how.variant.tokens)
        assert not how.beside or (
            takes_all and how.left_free(M, R, 132) == SPLITS * (R // 16 // how.variant.groups) * how.most
        )


def test_only_what_is_near_the_fastest_is_timed_again(tune_adapter):
    names = [f"[{tokens}, 4, 1, 1, 4, 4, 0, 1, 4, 0, 0]" for tokens in (8, 16, 24)]
    row = {"us": dict(zip([*names, "bf16", "expand"], [10.0, 10.4, 10.6, 1.0, 2.0], strict=True))}
    assert [c.tokens for c in tune_adapter.near(row)] == [8, 16]


@given(tokens=st.sampled_from([8, 32, 64, 128, 256]), N=st.integers(1, 4000), M=st.integers(1, SMALL_M))
def test_configurations_with_room_leave_a_cluster_of_the_small_kernel_its_multiprocessors(tune_adapter, tokens, N, M):
    c = tune_adapter.gemm.deepest(tokens, 2, 1, 1, 2, 2, 0)
    for one in tune_adapter.with_room(c, 16 * N, M):
        tiles = -(-16 * N // 128) * -(-M // tokens)
        blocks = tiles * (one.cluster if one.cluster > 1 else one.splits)
        assert 0 < blocks <= 132 - SPLITS and (one.tokens, one.depth, one.group) == (c.tokens, c.depth, c.group)


def test_the_parts_of_a_fused_layer(tune_adapter):
    assert tune_adapter.widths("7B qkv") == [3584, 512, 512] and tune_adapter.widths("32B qkv") == [5120, 1024, 1024]
    assert tune_adapter.widths("7B gate_up") == [18944, 18944] and tune_adapter.widths("14B down") == [5120]
