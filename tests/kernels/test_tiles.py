"""The tiled layout: nothing is lost, every code and every block scale decodes exactly, bad input is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qerl_kernels import nvfp4, tiles


def random_weight(N: int, K: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (N, K // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 127, (N, K // 16), generator=generator, dtype=torch.uint8)
    return codes, scales.view(torch.float8_e4m3fn)


def test_every_code_and_block_scale_is_exact():
    """All 16 codes under each of the 254 scale bytes that are numbers: zero, subnormal and negative ones too."""
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).repeat(256, 1)
    scale_bytes = torch.arange(256, dtype=torch.uint8)
    scale_bytes[(scale_bytes & 0x7F) == 0x7F] = 1
    scales = scale_bytes.view(torch.float8_e4m3fn)[:, None]
    weight = tiles.tile_weight(codes, scales, torch.ones(()))
    values = torch.tensor(nvfp4.MAGNITUDES + tuple(-m for m in nvfp4.MAGNITUDES))
    assert torch.equal(tiles.dequantize(weight.tiles, 256, 16).float(), values * scales.float())


@settings(max_examples=25, deadline=None)
@given(N=st.integers(1, 12), K=st.integers(1, 20), seed=st.integers(0, 2**16))
def test_any_multiple_of_16_survives_the_rearrangement(N, K, seed):
    N, K = 16 * N, 16 * K
    codes, scales = random_weight(N, K, seed)
    weight = tiles.tile_weight(codes, scales, torch.ones(()))
    assert weight.tiles.shape == (-(-N // 64), 2 * -(-K // 128), tiles.TILE_BYTES)
    assert torch.equal(tiles.dequantize(weight.tiles, N, K), nvfp4.dequantize(codes, scales))


def test_rearranging_in_chunks_changes_nothing(monkeypatch):
    codes, scales = random_weight(192, 128, 0)
    whole = tiles.tile_weight(codes, scales, torch.ones(())).tiles
    monkeypatch.setattr(tiles, "CHUNK_ROWS", 64)
    assert torch.equal(tiles.tile_weight(codes, scales, torch.ones(())).tiles, whole)


def test_what_lies_beyond_the_weight_is_zero():
    codes, scales = random_weight(16, 48, 1)
    padded = tiles.dequantize(tiles.tile_weight(codes, scales, torch.ones(())).tiles, 64, 128)
    assert not padded[16:].any() and not padded[:, 48:].any() and padded[:16, :48].any()


def test_promise_07_callers_tensors_are_never_modified():
    codes, scales = random_weight(64, 128, 2)
    row_scale = torch.rand(64)
    before = codes.clone(), scales.view(torch.uint8).clone(), row_scale.clone()
    weight = tiles.tile_weight(codes, scales, row_scale)
    weight.row_scale.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, (codes, scales.view(torch.uint8), row_scale), strict=True))


def test_bad_weights_are_refused():
    codes, scales = random_weight(24, 32, 3)
    with pytest.raises(ValueError, match=r"24 rows.*multiple of 16"):
        tiles.tile_weight(codes, scales, torch.ones(()))
    codes, scales = random_weight(16, 32, 3)
    scales.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(ValueError, match="not numbers"):
        tiles.tile_weight(codes, scales, torch.ones(()))
