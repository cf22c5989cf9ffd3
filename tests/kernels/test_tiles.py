"""Test that the tiled layout loses nothing, decodes every code and block scale exactly, and refuses bad input."""

import re
from pathlib import Path

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


def test_no_table_is_kept_where_a_model_is_being_loaded():
    """Check that tables cached during loading stay off the default device.

    vLLM loads with the GPU as torch's default device, into memory that its sleep mode frees. The meta device stands in
    for it here.
    """
    tables = nvfp4._byte_values, tiles._stored_scales
    expected = [table() for table in tables]
    for table in tables:
        table.cache_clear()
    codes, scales = (part.to("meta") for part in random_weight(64, 64, 0))
    with torch.device("meta"):
        nvfp4.dequantize(codes, scales)
        tiles._stored_scales()
    for table, kept in zip(tables, expected, strict=True):
        found, kept = (part if isinstance(part, tuple) else (part,) for part in (table(), kept))
        assert all(map(torch.equal, found, kept)) and found[0].device == torch.device("cpu"), table


@pytest.mark.parametrize("operand", tiles.ORDERS, ids=str)
def test_every_code_and_block_scale_is_exact(operand):
    """Decode all 16 codes under each of the 254 scale bytes that are numbers, including zero, subnormal and negative
    ones.
    """
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).repeat(256, 1)
    scale_bytes = torch.arange(256, dtype=torch.uint8)
    scale_bytes[(scale_bytes & 0x7F) == 0x7F] = 1
    scales = scale_bytes.view(torch.float8_e4m3fn)[:, None]
    weight = tiles.tile_weight(codes, scales, torch.ones(()), operand)
    values = torch.tensor(nvfp4.MAGNITUDES + tuple(-m for m in nvfp4.MAGNITUDES))
    found = tiles.dequantize(weight.tiles, 256, 16, operand)
    assert found.dtype == operand and torch.equal(found.float(), values * scales.float())


@pytest.mark.parametrize("operand", tiles.ORDERS, ids=str)
def test_the_kernels_decode_takes_the_steps_of_the_layout(operand):
    """Read ``decode.cuh`` as text and compare its shifts, masks and constants with ``ORDERS``, which the test above
    proves.
    """
    text = Path(tiles.__file__).with_name("decode.cuh").read_text()
    order = tiles.ORDERS[operand]
    first, second = re.findall(r"#if HALF\n(.*?)#else\n(.*?)#endif", text, flags=re.DOTALL)
    constants, decode = (branches[0 if operand == torch.float16 else 1] for branches in (first, second))
    step, base = re.search(r"SCALE_STEP = (\d+), SCALE_BASE = (0x[0-9A-F]+)u", constants).groups()
    assert int(step) == 1 << order.scale_shift and int(base, 16) == order.scale_base * 0x10001
    expressions = re.findall(r"a\[\d\] = multiply\((.*), (upper|lower)\);", decode)
    assert [scale for _, scale in expressions] == ["upper", "lower", "upper", "lower"]
    for (expression, _), steps in zip(expressions, order.steps, strict=True):
        terms = re.findall(r"\(?word(?: (<<|>>) (\d+)\)?)? & (0x[0-9A-F]+)u", expression)
        shifts = [(int(by or 0) * (-1 if way == ">>" else 1), int(mask, 16)) for way, by, mask in terms]
        assert tuple(shifts) == steps and expression.count("|") == len(steps) - 1


def test_each_type_has_an_order_of_its_own_and_no_other_has_any():
    codes, scales = random_weight(64, 128, 4)
    ours, theirs = (tiles.tile_weight(codes, scales, torch.ones(()), operand) for operand in tiles.ORDERS)
    assert ours.operand != theirs.operand and not torch.equal(ours.tiles, theirs.tiles)
    with pytest.raises(ValueError, match=r"not as torch\.float32"):
        tiles.tile_weight(codes, scales, torch.ones(()), torch.float32)


@settings(max_examples=25, deadline=None)
@given(N=st.integers(1, 12), K=st.integers(1, 20), seed=st.integers(0, 2**16))
def test_any_multiple_of_16_survives_the_rearrangement(N, K, seed):
    N, K = 16 * N, 16 * K
    codes, scales = random_weight(N, K, seed)
    expected = nvfp4.dequantize(codes, scales)
    for operand in tiles.ORDERS:
        weight = tiles.tile_weight(codes, scales, torch.ones(()), operand)
        assert weight.tiles.shape == (-(-N // 64), 2 * -(-K // 128), tiles.TILE_BYTES)
        assert torch.equal(tiles.dequantize(weight.tiles, N, K, operand).float(), expected.float())


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
