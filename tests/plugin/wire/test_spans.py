"""Test pieces of one memory that are copied and joined: which bytes land where."""

import pytest
import torch

from qerl_vllm_plugin.wire import gpu_memory, spans
from qerl_vllm_plugin.wire.spans import Copied

MEMORY = torch.arange(6 * 64, dtype=torch.float32)
FLOAT, HALF = MEMORY[:256], MEMORY[256:].view(torch.bfloat16)


def matrices(flat, *columns):
    """Return consecutive views of ``flat``, each with 4 rows and the given number of columns."""
    found, at = [], 0
    for number in columns:
        found.append(flat[at : at + 4 * number].view(4, number))
        at += 4 * number
    return found


A, B, C, D = matrices(FLOAT, 16, 8, 8, 32)
E, F = matrices(HALF, 32, 32)
CASES = {
    "neighbours": [A, B, C, D],
    "one": [C],
    "in_another_order": [B, A, D],
    "every_other_one": [A, C],
    "rows": [A[:2], A[2:], B[1:]],
    "columns": [D[:, :4], D[:, 4:]],
    "columns_between_neighbours": [A, B[:, :4], C, D],
    "other_type": [E, F],
    "two_types": [C, D, E],
    "empty": [A, B[:0], C],
}


def copied(pieces):
    planned = spans.plan(pieces, MEMORY.nbytes)
    room, raw = torch.full((planned.size,), 0xFF, dtype=torch.uint8), MEMORY.view(torch.uint8)
    for source, target, size in planned.spans:
        room[target : target + size] = raw[source : source + size]
    return Copied(pieces, planned.starts, room)


@pytest.mark.parametrize("gap", [0, 1 << 20])
@pytest.mark.parametrize("case", CASES)
def test_joined_pieces_have_their_values_in_order(case, gap, monkeypatch):
    monkeypatch.setattr(spans, "GAP", gap)
    pieces = CASES[case]
    found = copied(pieces)
    for first in range(len(pieces)):
        for end in range(first + 1, len(pieces) + 1):
            expected = torch.cat([piece.flatten() for piece in pieces[first:end]])
            assert found.flat(first, end).dtype == expected.dtype and found.flat(first, end).equal(expected)


def test_neighbours_are_not_copied_again():
    found = copied(CASES["neighbours"])
    assert found.flat(1, 4).data_ptr() == found.room.data_ptr() + A.nbytes
    apart = copied([A, C])
    assert apart.flat(0, 2).data_ptr() != apart.room.data_ptr()


def test_each_half_of_an_adapter_lies_in_one_piece_a_width():
    """Otherwise worker and sender would have to handle hundreds of pieces."""
    shapes = {"q": (64, 64), "k": (16, 64), "down": (64, 128)}
    kinds = []
    for layer in range(3):
        for module, (N, K) in shapes.items():
            kinds += [(f"{layer}.{module}.A", torch.float32, torch.Size((8, K)))]
            kinds += [(f"{layer}.{module}.B", torch.float32, torch.Size((N, 8)))]
    table = gpu_memory._table(tuple(kinds))
    assert [(part.row, {name[-1] for name in part.names}) for part in table.parts] == [
        ((64,), {"A"}),
        ((8,), {"B"}),
        ((128,), {"A"}),
    ]
    assert [part.begin for part in table.parts] == [0, *(part.end for part in table.parts[:-1])]
    assert table.parts[-1].end == table.size == 4 * sum(shape.numel() for _, _, shape in kinds)


def pieces_at(*places):
    """Return views of the bytes from first to end of one memory."""
    memory = torch.zeros(1000, dtype=torch.uint8)
    return [memory[first:end] for first, end in places]


def test_near_pieces_are_copied_together(monkeypatch):
    """Compute the plan by hand: gaps of 20 bytes are copied, gaps of 120 are not. A copy starts with the alignment of
    its memory."""
    monkeypatch.setattr(spans, "GAP", 32)
    planned = spans.plan(pieces_at((200, 210), (60, 80), (0, 40), (500, 500)), 1000)
    assert planned == ([(0, 0, 80), (192, 80, 18)], [88, 60, 0, 0], 98)
    assert spans.plan(pieces_at((0, 40), (72, 80)), 1000).spans == [(0, 0, 80)]
    assert spans.plan(pieces_at((0, 40), (73, 80)), 1000).spans == [(0, 0, 40), (64, 48, 16)]
    assert spans.plan(pieces_at((0, 40), (10, 20)), 1000).spans == [(0, 0, 40)], "one within another"
    assert spans.plan(pieces_at((7, 7)), 1000) == ([], [0], 0) and spans.plan([], 1000).size == 0


def test_nearly_all_of_a_memory_goes_in_one_copy(monkeypatch):
    monkeypatch.setattr(spans, "GAP", 0)
    assert spans.plan(pieces_at((0, 450), (550, 1000)), 1000) == ([(0, 0, 1000)], [0, 550], 1000)
    assert len(spans.plan(pieces_at((0, 450), (551, 1000)), 1000).spans) == 2
