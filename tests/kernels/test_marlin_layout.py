"""Test repacking weights and scales to Marlin's layout and back."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from marlin_packing import repack, store_scales
from qerl_kernels.marlin_layout import load_scales, scale_exponent, unpack_words

EXPONENTS = range(18)  # 17 is the largest exponent: it lifts the smallest E4M3 number, 2^-9, to 2^8


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31))
def test_repacking_is_a_permutation_that_unpacking_inverts(n_blocks, k_blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (64 * n_blocks, 8 * k_blocks), dtype=torch.uint8, generator=generator)
    words = repack(codes)
    assert words.shape == (k_blocks, 128 * n_blocks) and words.dtype == torch.int32
    assert torch.equal(unpack_words(words), codes)


def test_each_nibble_lies_where_the_published_marlin_permutation_puts_it():
    """Compare with the Marlin paper's permutation for 4-bit weights, written out independently."""
    order = []
    for i in range(32):
        column = i // 4
        one = [
            16 * row + column + 8 * block
            for block in (0, 1)
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1)
        ]
        for j in range(4):
            order.extend(position + 256 * j for position in one)
    perm = torch.tensor(order).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)  # 1024 positions of a 16 x 64 block
    w = torch.randint(0, 16, (16, 64))  # (k, n)
    tiles = w.view(1, 16, 4, 16).permute(0, 2, 1, 3).reshape(1, 1024)[:, perm].view(128, 8)
    expected = (tiles << (4 * torch.arange(8))).sum(-1)
    expected = torch.where(expected >= 2**31, expected - 2**32, expected).to(torch.int32)
    codes = w.T.contiguous().to(torch.uint8)  # (n, k)
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()
    assert torch.equal(repack(packed).view(-1), expected)


def all_scales():
    """Return the 127 E4M3 numbers from 0 to 448, ordered by their bytes."""
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)


def is_held(scales, exponent):
    """Return whether Marlin's format can hold each of these scales."""
    numbers = scales.double() * 2.0**exponent
    return (numbers == 0) | ((numbers >= 2.0**-6) & (numbers <= 448))


@given(st.integers(1, 3), st.integers(1, 5), st.sampled_from(EXPONENTS), st.integers(0, 2**31))
def test_storing_scales_is_a_permutation_that_loading_inverts(blocks, groups, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    held = all_scales().view(torch.uint8)[is_held(all_scales(), exponent)]
    N = 64 * blocks
    scales = held[torch.randint(0, len(held), (N, groups), generator=generator)].view(torch.float8_e4m3fn)
    stored = store_scales(scales, exponent)
    assert stored.shape == (groups, N) and stored.dtype == torch.uint8
    assert torch.equal(load_scales(stored, exponent).view(torch.uint8), scales.view(torch.uint8))
    assert scale_exponent(scales, stored) == exponent or not scales.view(torch.uint8).any()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
def test_columns_of_a_larger_weight_are_its_rows(first, blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = slice(64 * first, 64 * (first + blocks))
    codes = torch.randint(0, 256, (64 * 6, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 127, (64 * 6, 2), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    words, stored = repack(codes)[:, 2 * rows.start : 2 * rows.stop], store_scales(scales, 0)[:, rows]
    assert torch.equal(unpack_words(words), codes[rows])
    whole = load_scales(store_scales(scales, 0), 0).view(torch.uint8)
    assert torch.equal(load_scales(stored, 0).view(torch.uint8), whole[rows])


def test_scales_that_were_lost_or_negative_or_stored_otherwise_have_no_exponent():
    scales = torch.full((64, 2), 448.0).to(torch.float8_e4m3fn)
    assert scale_exponent(scales, store_scales(scales, 0)) == 0
    for lost in (2.0**-9, -1.0):
        scales[3, 1] = lost
        assert scale_exponent(scales, store_scales(scales, 0)) is None
    scales[3, 1] = 1.5
    assert scale_exponent(scales, store_scales(scales, 0)) == 0
    assert scale_exponent(scales, scales.view(torch.uint8).t()) is None
