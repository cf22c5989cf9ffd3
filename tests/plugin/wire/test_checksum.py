"""Test the checksum of tensors: every bit counts, and so does every position."""

import math

import pytest
import torch

from qerl_vllm_plugin.wire.checksum import BATCH, checksums


def splitmix(x: int) -> int:
    """Compute splitmix64 (Steele, Lea, Flood 2014), written again here with Python's integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def by_hand(data: bytes) -> tuple[int, int]:
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    width = len(words) if len(words) <= 2048 else math.gcd(len(words), 2048)
    rows = [sum(words[i : i + width]) for i in range(0, len(words), width)]
    columns = [sum(words[c::width]) for c in range(width)]
    return mixed(rows), mixed(columns)


def mixed(sums: list[int]) -> int:
    return sum(splitmix((total + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i, total in enumerate(sums)) % 2**64


def noise(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_first_words_of_splitmix64():
    """Check the constants of the reference above by its published outputs for the seed 1234567."""
    state, golden = 1234567, 0x9E3779B97F4A7C15
    assert [splitmix((state + (i + 1) * golden) % 2**64) for i in range(2)] == [
        6457827717110365317,
        3203168211198807973,
    ]


@pytest.mark.parametrize("size", [1, 7, 8, 72, 16384, 16392, 3 * 16384, 8 * 2050], ids=str)
def test_a_checksum_is_the_one_computed_by_hand(size):
    tensor = noise(size)
    assert checksums([tensor]) == [by_hand(bytes(tensor.tolist()))]


def test_the_golden_value():
    assert checksums([torch.arange(5000, dtype=torch.int32)]) == [(1471783553284387990, 8917474301821366)]


def test_many_tensors_at_once_are_those_one_by_one():
    tensors = [noise(64 + i).clone() for i in range(BATCH + 5)]
    tensors += [torch.randn(30, 20).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)]
    tensors += [torch.tensor(1.5), torch.empty(0)]
    together = checksums(tensors)
    assert together == [checksums([tensor])[0] for tensor in tensors]
    assert len(set(together)) == len(tensors)


def test_the_whole_storage_of_a_view_counts():
    whole = torch.randn(64, 32)
    assert checksums([whole.t()[3:5]]) == checksums([whole])


@pytest.mark.parametrize("size", [37, 3 * 16384], ids=["one_row", "three_rows"])
def test_every_flipped_bit_is_found(size):
    tensor = noise(size)
    before = checksums([tensor])
    places = range(size) if size < 100 else range(5, size, 1711)
    for byte in places:
        for bit in range(8):
            tensor[byte] ^= 1 << bit
            assert checksums([tensor]) != before, (byte, bit)
            tensor[byte] ^= 1 << bit
    assert checksums([tensor]) == before


TOP_BIT = -(2**63)


@pytest.mark.parametrize("words", [(3, 5), (3, TOP_BIT + 3), (0, -1), (0, 2**40)], ids=str)
@pytest.mark.parametrize("places", [(0, 2), (0, 2048), (1, 4097), (100, 6143)], ids=str)
def test_words_that_trade_places_are_found(words, places):
    tensor = noise(3 * 16384).view(torch.int64)
    tensor[list(places)] = torch.tensor(words)
    before = checksums([tensor])
    tensor[list(places)] = torch.tensor(words[::-1])
    assert checksums([tensor]) != before


def test_rows_that_trade_places_are_found():
    tensor = noise(3 * 16384).view(3, -1)
    assert checksums([tensor]) != checksums([tensor[[0, 2, 1]]])
