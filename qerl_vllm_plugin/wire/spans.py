"""Copy pieces of one memory in few copies: neighbours go together, with the small gaps between them.

A tensor-parallel rank takes some rows of one tensor and some columns of the next. One by one, these are hundreds of
copies, each of which takes longer to start than to run.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

GAP = 128 << 10  # bytes; a gap up to this size is cheaper to copy than to leave out
ALIGNED = 16  # bytes; spans begin at multiples of it in memory and copy, so that values of any dtype stay aligned
MOST = 0.9  # share of all bytes; from it on one copy takes the whole, because planning takes longer


class Span(NamedTuple):
    """Copy ``size`` bytes from byte ``source`` of the memory to byte ``target`` of its copy."""

    source: int
    target: int
    size: int


class Plan(NamedTuple):
    """Copy ``spans`` into ``size`` bytes, where piece i then begins at byte ``starts[i]``."""

    spans: list[Span]
    starts: list[int]
    size: int


def plan(pieces: Sequence[torch.Tensor], size: int) -> Plan:
    """Plan the copies of ``pieces`` of a memory of ``size`` bytes, which lie at their storage offsets."""
    begins = [piece.storage_offset() * piece.element_size() for piece in pieces]
    if sum(piece.nbytes for piece in pieces) >= MOST * size:
        return Plan([Span(0, 0, size)], begins, size)
    spans: list[Span] = []
    starts = [0] * len(pieces)
    for i in sorted(range(len(pieces)), key=begins.__getitem__):
        if not (length := _extent(pieces[i])):
            continue
        end = begins[i] + length
        last = spans[-1] if spans else Span(0, 0, 0)
        if spans and begins[i] <= last.source + last.size + GAP:
            spans[-1] = last._replace(size=max(last.size, end - last.source))
        else:
            source = begins[i] // ALIGNED * ALIGNED
            spans.append(Span(source, -(-(last.target + last.size) // ALIGNED) * ALIGNED, end - source))
        starts[i] = spans[-1].target + begins[i] - spans[-1].source
    return Plan(spans, starts, spans[-1].target + spans[-1].size if spans else 0)


class Copied(NamedTuple):
    """Hold copies of ``pieces`` of a memory: piece i begins at byte ``starts[i]`` of ``room``, which is uint8."""

    pieces: Sequence[torch.Tensor]
    starts: Sequence[int]
    room: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """Return the copied pieces with their original shapes and strides."""
        return self._views(0, len(self.pieces))

    def flat(self, first: int, end: int) -> torch.Tensor:
        """Return the values of pieces ``first`` to ``end`` (exclusive), one behind the other.

        Pieces that lie so in ``room`` are taken from it together, and all are returned without a copy if one view
        covers them. A view of each of hundreds of pieces takes longer than copying them all.
        """
        typed = {dtype: as_type(self.room, dtype) for dtype in {piece.dtype for piece in self.pieces[first:end]}}
        flat: list[torch.Tensor] = []
        dtype, start, reached = torch.uint8, 0, -1  # dtype, start and end of the run of neighbours so far

        def end_piece() -> None:
            if reached >= 0:
                flat.append(typed[dtype][start // dtype.itemsize : reached // dtype.itemsize])

        for i in range(first, end):
            piece, at, is_whole = self.pieces[i], self.starts[i], self.pieces[i].is_contiguous()
            if at == reached and is_whole and piece.dtype is dtype:
                reached += piece.nbytes
                continue
            end_piece()
            dtype, start, reached = piece.dtype, at, at + piece.nbytes if is_whole else -1
            if not is_whole:
                flat.append(self._views(i, i + 1)[0].flatten())
        end_piece()
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def _views(self, first: int, end: int) -> list[torch.Tensor]:
        pieces = self.pieces[first:end]
        typed = {dtype: as_type(self.room, dtype) for dtype in {piece.dtype for piece in pieces}}
        return [
            typed[piece.dtype].as_strided(piece.shape, piece.stride(), start // piece.element_size())
            for piece, start in zip(pieces, self.starts[first:end], strict=True)
        ]


# copies tensors, or parts of them, whose memory belongs to another process to a device
Fetch = Callable[[Sequence[torch.Tensor], torch.device], Copied]


def all_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as bytes: ``(n,)`` uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def as_type(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as values of ``dtype``, from the first byte on; leftover bytes are dropped."""
    return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)


def _extent(piece: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last byte of a piece."""
    if piece.is_contiguous():
        return piece.nbytes
    if not piece.numel():
        return 0
    last = sum((length - 1) * stride for length, stride in zip(piece.shape, piece.stride(), strict=True))
    return (last + 1) * piece.element_size()
