import torch
from hypothesis import given
from hypothesis import strategies as st
from qerl_kernels.marlin_layout import repack, unpack_words


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31))
def test_repacking_is_a_permutation_that_unpacking_inverts(n_blocks: int, k_blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (64 * n_blocks, 8 * k_blocks), dtype=torch.uint8, generator=generator)
    words = repack(codes)
    assert words.shape == (k_blocks, 128 * n_blocks) and words.dtype == torch.int32
    assert torch.equal(unpack_words(words), codes)


def test_each_nibble_lies_where_the_published_marlin_permutation_puts_it() -> None:
    """The permutation of the Marlin paper's kernel for 4-bit weights, written out independently."""
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
