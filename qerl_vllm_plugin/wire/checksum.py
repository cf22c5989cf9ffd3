"""Compute exact checksums of tensors on the device where they lie.

Each tensor is read twice, and only the result is copied off the GPU. A tensor's bytes are read as a table of 64-bit
words, C to a row. Its checksum is a pair,

    sum over rows r     of mix((r + 1) G + sum of row r)        mod 2^64
    sum over columns c  of mix((c + 1) G + sum of column c)

``mix`` is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). It
maps no two words to the same word, so a change of one word, and so of one bit, is always found. A change of several
words, or an exchange of words, is missed with a probability of about 2^-64. The checksum guards against accidents, not
against attackers.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from qerl_vllm_plugin.wire.spans import all_bytes

ROW = 2048  # words in a row, where the length allows: the sums are then a thousandth of the tensor
STEP = 32  # rows that the first of two steps adds up
BATCH = 64  # tensors whose sums are mixed at once: few kernel launches, and a few MB
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # as signed 64-bit words

Checksum = tuple[int, int]


@torch.no_grad()
def checksums(tensors: Iterable[torch.Tensor]) -> list[Checksum]:
    """Return a checksum of the whole storage of each tensor; the host waits once for each batch on a device."""
    words = [_words(tensor) for tensor in tensors]
    found: list[Checksum] = [(0, 0)] * len(words)
    for device in {table.device for table in words}:
        places = [i for i, table in enumerate(words) if table.device == device]
        for first in range(0, len(places), BATCH):
            batch = places[first : first + BATCH]
            sums = [part for i in batch for part in (words[i].sum(1), _columns(words[i]))]
            mixed = _mixed(sums)
            for place, rows, columns in zip(batch, mixed[::2], mixed[1::2], strict=True):
                found[place] = (rows, columns)
    return found


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's storage as (rows, C) int64. Bytes that do not fill a word are copied and padded with zeros."""
    raw = all_bytes(tensor.untyped_storage())
    if missing := -len(raw) % 8:
        raw = torch.nn.functional.pad(raw, (0, missing))
    words = raw.view(torch.int64)
    width = max(len(words), 1) if len(words) <= ROW else math.gcd(len(words), ROW)
    return words.view(len(words) // width, width)


def _columns(words: torch.Tensor) -> torch.Tensor:
    """Return the sums of the columns of ``words: (rows, C)``, added up in two steps.

    In one step, torch takes twice the memory of a large ``words`` to pass partial sums between its thread blocks.
    """
    whole = len(words) // STEP * STEP
    first = words[:whole].unflatten(0, (-1, STEP)).sum(1) if whole else words[:0]
    return torch.cat([first, words[whole:]]).sum(0)


def _mixed(sums: Sequence[torch.Tensor]) -> list[int]:
    """Return, for each tensor in ``sums``, of shape (n,), the sum of its mixed words mod 2^64."""
    values = torch.cat(list(sums))
    lengths = torch.tensor([len(part) for part in sums], device=values.device)
    owner = torch.repeat_interleave(torch.arange(len(sums), device=values.device), lengths, output_size=len(values))
    place = torch.arange(1, len(values) + 1, device=values.device) - (lengths.cumsum(0) - lengths)[owner]
    x = values + place * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    x = x ^ _shifted(x, 31)
    totals = torch.zeros(len(sums), dtype=torch.int64, device=values.device).index_add_(0, owner, x)
    return [total % 2**64 for total in totals.tolist()]


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return x >> bits with zeros filled in from above, as for an unsigned word."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
