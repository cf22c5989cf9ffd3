"""Keep the policy's adapter in buffers of each linear that carries it: no slots, no per-token index, always on.

    vllm serve MODEL --quantization qerl_nvfp4 --additional-config '{"qerl": {"policy_adapter": {"rank": 32}}}'

Reinforcement learning uses one adapter for all tokens. A layer with P parts (q, k, v: 3) gets two buffers of rank R:

    A: (P R, K)   the parts' A stacked by rows, so that one product x A^T serves all parts
    B: (N, P R)   block diagonal: the rows of part i read columns i R .. (i+1) R; B is stored scaled

It computes y = x W^T + bias + (x A^T) B^T. Zeros fill what an adapter of a smaller rank leaves free, and the padding of
P R to a multiple of 32. Without an adapter both buffers are zero. The buffers never move, so CUDA graphs see every
swap.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from qerl_kernels.adapter import Adapter, padded, spans
from torch.nn.functional import linear
from vllm.model_executor.parameter import ModelWeightParameter

from qerl_vllm_plugin.adapter.check import CheckedAdapter, Target, converted
from qerl_vllm_plugin.compat import layers as vllm_layers

Pair = tuple[torch.Tensor, torch.Tensor]  # A and B of one linear


@dataclass(frozen=True)
class _Share:
    """Describe the share that this tensor-parallel rank keeps of one part, or of one piece of a part.

    ``rows`` of the buffer hold B's rows from ``first_row`` on. A is kept from column ``first_column`` on.
    """

    rows: slice
    first_row: int
    first_column: int


@dataclass(frozen=True)
class Room:
    """Hold the buffers' views that an adapter of one LoRA rank and one set of linears is copied into.

    Each place in ``places`` has an A and a B in ``targets``: A, B, A, B and so on. ``zeros`` are the views to set to
    zero.
    """

    places: list["_Place"]
    targets: list[torch.Tensor]
    zeros: list[torch.Tensor]


@dataclass(frozen=True)
class Copies:
    """Hold a staged change: ``sources`` are copied into ``room``. ``strength`` is that of ``Converted``."""

    room: Room
    sources: list[torch.Tensor]
    strength: float = 0.0


@dataclass(frozen=True)
class _Place:
    """Hold the views of the buffers with the linear ``name``, ``a: (R, K)`` and ``b: (rows, R)``.

    ``share`` says which share of the linear's A and B they hold. ``is_whole`` is true if that is all of both.
    A linear whose rows come to this rank in pieces has a place for each, with its own ``key`` and the same A.
    """

    key: str
    name: str
    a: torch.Tensor
    b: torch.Tensor
    share: _Share
    is_whole: bool

    def cut(self, pair: Pair) -> Pair:
        """Cut this rank's share out of a whole (A, B). Return ``pair`` itself if the share is all of it."""
        if self.is_whole:
            return pair
        rows = slice(self.share.first_row, self.share.first_row + self.b.shape[0])
        return pair[0][:, self.share.first_column : self.share.first_column + self.a.shape[1]], pair[1][rows]


def create(layer: torch.nn.Module, widths: list[int], K: int, names: list[str], rank: int, dtype: torch.dtype) -> None:
    """Give ``layer`` zero buffers for adapters of up to ``rank``.

    ``names`` are the checkpoint's names of its parts. ``widths`` are the rows of each of vLLM's parts on this
    tensor-parallel rank.
    """
    columns = padded(len(names) * rank)
    layer.register_buffer("policy_a", torch.zeros(columns, K, dtype=dtype), persistent=False)
    layer.register_buffer("policy_b", torch.zeros(sum(widths), columns, dtype=dtype), persistent=False)
    # where vLLM's parts are not the checkpoint's, the rows of each part are not known here: all rows read all columns
    own = spans(widths, rank) if len(widths) == len(names) else spans([sum(widths)], columns)
    layer.register_buffer("policy_spans", own.to(layer.policy_a.device), persistent=False)
    layer.qerl_parts, layer.qerl_rank = names, rank


def of(layer: torch.nn.Module) -> Adapter | None:
    """Return the layer's buffers in the form that the kernels take, or None if it has none."""
    if not hasattr(layer, "policy_a"):
        return None
    return Adapter(layer.policy_a, layer.policy_b, layer.policy_spans)


def add(layer: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add (x A^T) B^T, of ``x: (..., K)``, to ``y: (..., N)`` in place if the layer has buffers; return ``y``."""
    if not hasattr(layer, "policy_a"):
        return y
    shrunk = linear(x.reshape(-1, x.shape[-1]), layer.policy_a)  # (M, P R)
    y.view(-1, y.shape[-1]).addmm_(shrunk, layer.policy_b.t())
    return y


class ResidentAdapter:
    """Keep the adapter in the buffers of all layers of one model."""

    def __init__(self, layers: list[Any]) -> None:
        """Take the layers with buffers, at least one."""
        self._layers, first = {layer.qerl_prefix: layer for layer in layers}, layers[0]
        self.max_rank = first.qerl_rank
        self.dtype = first.policy_a.dtype
        self.device = first.policy_a.device
        self._last: tuple[tuple[Any, ...], Room] | None = None
        self._places = [place for layer in self._layers.values() for place in _places(layer, self.max_rank)]
        self._targets = {
            part: Target(name, i, layer.input_size, outputs)
            for name, layer in self._layers.items()
            for i, (part, outputs) in enumerate(
                zip(layer.qerl_parts, vllm_layers.output_sizes(layer, len(layer.qerl_parts)), strict=True)
            )
        }

    def prepare(self) -> None:
        """Do nothing: the buffers exist since the model was built."""

    def targets(self) -> dict[str, Target]:
        """Return every linear that can carry an adapter, by its checkpoint name."""
        return self._targets

    def stage(self, adapter: CheckedAdapter | None) -> Copies:
        """Put this rank's share of the adapter on the device and list the buffers that ``commit`` sets to zero."""
        rank, pairs = (adapter.rank, adapter.pairs) if adapter is not None else (0, {})
        key = (rank, *pairs)
        if self._last is None or self._last[0] != key:  # a policy in training names the same linears each time
            self._last = key, self._room(rank, pairs)
        room = self._last[1]
        if adapter is None:
            return Copies(room, [])
        cut = {place.key: place.cut(pairs[place.name]) for place in room.places}
        new = converted(CheckedAdapter(rank, adapter.scaling, cut, adapter.fetch), self.dtype, self.device)
        return Copies(room, [half for place in room.places for half in new[place.key]], new.strength)

    def _room(self, rank: int, names: Collection[str]) -> Room:
        room = Room([], [], [])
        for place in self._places:
            a, b = place.a, place.b
            if place.name not in names:
                room.zeros.extend([a, b])
                continue
            if rank < self.max_rank:  # an earlier adapter may have had a larger rank
                room.zeros.extend([a[rank:], b[:, rank:]])
                a, b = a[:rank], b[:, :rank]
            room.targets.extend([a, b])
            room.places.append(place)
        return room

    def commit(self, copies: Copies) -> None:
        """Copy the staged tensors into the buffers in place, without allocating memory."""
        if copies.room.zeros:
            torch._foreach_zero_(copies.room.zeros)
        pairs = list(zip(copies.room.targets, copies.sources, strict=True))
        # one launch copies all contiguous views; in one list with strided ones they would take a launch each, too
        for is_whole in (True, False):
            if alike := [pair for pair in pairs if pair[0].is_contiguous() is is_whole]:
                torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])

    def answering(self, tokens: int) -> AbstractContextManager[None]:
        """Do nothing: the layers apply the adapter in every forward."""
        return nullcontext()

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield all A and B buffers, in a fixed order."""
        for _, layer in sorted(self._layers.items()):
            yield layer.policy_a
            yield layer.policy_b


def _places(layer: Any, rank: int) -> Iterator[_Place]:
    a, b = layer.policy_a, layer.policy_b
    outputs = vllm_layers.output_sizes(layer, len(layer.qerl_parts))
    for i, (shares, whole) in enumerate(zip(_shares(layer), outputs, strict=True)):
        columns, name = slice(i * rank, (i + 1) * rank), layer.qerl_parts[i]
        for share in shares:
            room = a[columns], b[share.rows, columns]
            is_whole = (a.shape[1], room[1].shape[0]) == (layer.input_size, whole)
            key = name if len(shares) == 1 else f"{name} from row {share.first_row}"
            yield _Place(key, name, *room, share, is_whole)


def _shares(layer: Any) -> list[list[_Share]]:
    """Return for each part the rows of B and the columns of A that belong to this tensor-parallel rank.

    A part has one share for each piece that is contiguous in the checkpoint. It has several where vLLM splits a linear
    of the checkpoint into several (Phi-3).

    To find out, vLLM's own weight loader loads a weight that holds its row (or column) numbers. So the adapter is cut
    as the base weight is, replicated key/value heads included.
    """
    parts, N, K = len(layer.qerl_parts), layer.policy_b.shape[0], layer.policy_a.shape[1]
    if not hasattr(layer, "weight_loader_v2"):  # a replicated layer: every rank has all of it
        return [[_Share(slice(0, N), 0, 0)]]
    outputs = vllm_layers.output_sizes(layer, parts)
    shares: list[list[_Share]] = []
    for i in range(parts):
        shard = () if parts == 1 else (vllm_layers.shard_id(layer, i, parts),)
        if parts == 1 and layer.input_size != K:  # row parallel: the input is cut
            columns = _probe(layer, (1, K), torch.arange(layer.input_size)[None, :], shard)
            shares.append([_Share(slice(0, N), 0, int(columns[0, 0]))])
            continue
        if parts == 1 and outputs[0] == N:
            shares.append([_Share(slice(0, N), 0, 0)])
            continue
        rows = _probe(layer, (N, 1), torch.arange(outputs[i])[:, None], shard)[:, 0]
        mine = (rows >= 0).nonzero()[:, 0]
        # a piece ends where the buffer's next row is not loaded, or does not hold the checkpoint's next row
        ends = (((mine.diff() != 1) | (rows[mine].diff() != 1)).nonzero()[:, 0] + 1).tolist()
        pieces = [mine[first:last] for first, last in zip([0, *ends], [*ends, len(mine)], strict=True)]
        shares.append([_Share(slice(int(p[0]), int(p[-1]) + 1), int(rows[p[0]]), 0) for p in pieces])
    return shares


def _probe(layer: Any, shape: tuple[int, int], numbers: torch.Tensor, shard: tuple[Any, ...]) -> torch.Tensor:
    probe = ModelWeightParameter(
        data=torch.full(shape, -1.0, dtype=torch.float64, device="cpu"),
        input_dim=1,
        output_dim=0,
        weight_loader=layer.weight_loader_v2,
    )
    layer.weight_loader_v2(probe, numbers.double(), *shard)
    return probe.data
