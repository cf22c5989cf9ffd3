"""Pack the sequences of a padded batch into rows of real tokens.

A packed row is a sequence of trees, one for each prompt: the prompt's tokens, then those of its completions, one after
the other. In each completion positions continue from the prompt, and a completion sees its prompt and itself. Without
sharing every completion has its own prompt. All of this is computed on the CPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch


class Segment(NamedTuple):
    """Locate one sequence in a packed row: ``prompt`` tokens from ``prompt_start`` on, and ``own`` from ``start`` on.

    In the first sequence of a tree, which computes the prompt, ``start`` follows the prompt directly.
    """

    prompt_start: int
    prompt: int
    start: int
    own: int

    @property
    def is_first(self) -> bool:
        """Return True if this sequence computes the prompt, False if an earlier one of its tree does."""
        return self.prompt_start + self.prompt == self.start


@dataclass(frozen=True)
class PackedRow:
    """Hold one packed row: its ``segments``, and ``tokens`` and ``positions``, (1, T) int64 each.

    The others, (S,) int64 each, describe the S completion tokens: ``targets``, the indices ``sources`` in the row whose
    hidden states predict them, and their ``places`` in the flattened (B, C) completions of the batch.
    """

    segments: tuple[Segment, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor

    def to(self, device: torch.device) -> "PackedRow":
        """Copy the row's tensors to another device, without waiting for it."""
        tensors = (self.tokens, self.positions, self.sources, self.targets, self.places)
        return PackedRow(self.segments, *(tensor.to(device, non_blocking=True) for tensor in tensors))

    def starts(self) -> torch.Tensor:
        """Return where each sequence starts and the last ends, (sequences + 1,) int32; for unshared prompts."""
        return torch.tensor([s.prompt_start for s in self.segments] + [self.tokens.shape[1]], dtype=torch.int32)


class Tree(NamedTuple):
    """Hold rows of the batch that share a prompt; ``size`` counts their tokens, the prompt's once."""

    rows: tuple[int, ...]
    size: int


def pack(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, completion: int, pack_tokens: int, *, share_prompts: bool
) -> list[PackedRow]:
    """Pack the sequences of a batch into rows of at most ``pack_tokens`` tokens; a longer sequence has its own row.

    ``input_ids`` and ``attention_mask`` are (B, P + C) on the CPU, with C = ``completion``. Sequences whose completion
    is masked out are left out; if all are, the first one is kept, so that there is something to differentiate. Raises
    ValueError for a completion without a prompt: no hidden state predicts its first token.
    """
    is_real = attention_mask.bool()
    prompts = is_real[:, :-completion].sum(dim=1).tolist()
    completions = is_real[:, -completion:].sum(dim=1).tolist()
    rows = [row for row, own in enumerate(completions) if own] or [0]
    for row in rows:
        if not prompts[row]:
            raise ValueError(f"sequence {row} of the batch has no prompt; give its problem one token at least")
    groups: dict[Any, list[int]] = {}
    for row in rows:
        ids = input_ids[row, :-completion][is_real[row, :-completion]]
        groups.setdefault(ids.numpy().tobytes() if share_prompts else row, []).append(row)
    bins = distribute(groups.values(), prompts, completions, pack_tokens)
    return [_packed_row(bin_, input_ids, is_real, completion) for bin_ in bins]


def distribute(
    groups: Iterable[Sequence[int]], prompts: Sequence[int], completions: Sequence[int], pack_tokens: int
) -> list[list[Tree]]:
    """Return the trees of each packed row, for ``groups`` of rows of the batch that have one prompt."""
    trees = chain.from_iterable(_trees(group, prompts, completions, pack_tokens) for group in groups)
    bins: list[list[Tree]] = []
    sizes: list[int] = []
    for tree in sorted(trees, key=lambda tree: -tree.size):  # the largest first, each into the first row with room
        fits = next((i for i, size in enumerate(sizes) if size + tree.size <= pack_tokens), None)
        if fits is None:
            bins.append([tree])
            sizes.append(tree.size)
        else:
            bins[fits].append(tree)
            sizes[fits] += tree.size
    return bins


def _trees(group: Sequence[int], prompts: Sequence[int], completions: Sequence[int], pack_tokens: int) -> list[Tree]:
    """Split the rows of one prompt into trees of at most ``pack_tokens``, longest first; a longer row has its own."""
    trees: list[Tree] = []
    for row in sorted(group, key=lambda row: -completions[row]):
        if trees and trees[-1].size + completions[row] <= pack_tokens:
            trees[-1] = Tree((*trees[-1].rows, row), trees[-1].size + completions[row])
        else:
            trees.append(Tree((row,), prompts[row] + completions[row]))
    return trees


def _packed_row(trees: Sequence[Tree], input_ids: torch.Tensor, is_real: torch.Tensor, completion: int) -> PackedRow:
    segments: list[Segment] = []
    parts: list[tuple[torch.Tensor, ...]] = []  # tokens, positions, sources and places
    none, end = torch.empty(0, dtype=torch.int64), 0
    for tree in trees:
        prompt_ids = input_ids[tree.rows[0], :-completion][is_real[tree.rows[0], :-completion]]
        prompt_start, prompt = end, len(prompt_ids)
        parts.append((prompt_ids, torch.arange(prompt), none, none))
        end += prompt
        for row in tree.rows:
            (columns,) = is_real[row, -completion:].nonzero(as_tuple=True)
            own = len(columns)
            segments.append(Segment(prompt_start, prompt, end, own))
            sources = torch.arange(end - 1, end + own - 1)
            sources[:1] = prompt_start + prompt - 1
            tokens = input_ids[row, -completion:][columns]
            parts.append((tokens, torch.arange(prompt, prompt + own), sources, row * completion + columns))
            end += own
    tokens, positions, sources, places = map(torch.cat, zip(*parts, strict=True))
    targets = input_ids[:, -completion:].reshape(-1)[places]
    return PackedRow(tuple(segments), tokens[None], positions[None], sources, targets, places)


def even_micro_batches(
    batches: Sequence[Mapping[str, Any]], window: int, *, skips_zero_advantage: bool = False
) -> list[dict[str, Any]]:
    """Redistribute the rows of a rollout's micro-batches, so that each has about as many tokens.

    Rows stay in their step, of ``window`` micro-batches, each of which keeps its number of rows. Equal prompts stay
    together if micro-batches hold whole groups of them. Rows that the loss skips count as empty.
    """
    even: list[dict[str, Any]] = []
    for first in range(0, len(batches), window):
        part = batches[first : first + window]
        whole = {key: _joined([batch[key] for batch in part]) for key in part[0]}
        sizes = [len(batch["completion_ids"]) for batch in part]
        for rows in _deal(whole, sizes, skips_zero_advantage):
            even.append({key: value[rows] if _has_rows(value) else value for key, value in whole.items()})
    return even


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _joined(values: list[Any]) -> Any:
    return torch.cat(values) if _has_rows(values[0]) else values[0]


def _deal(batch: Mapping[str, Any], sizes: list[int], skips_zero_advantage: bool) -> list[torch.Tensor]:
    """Return each micro-batch's rows: the longest unit of one prompt goes first, to the emptiest with room."""
    prompt_ids, prompt_mask = batch["prompt_ids"].cpu(), batch["prompt_mask"].cpu().bool()
    lengths = prompt_mask.sum(dim=1) + batch["completion_mask"].cpu().sum(dim=1)
    if skips_zero_advantage:
        lengths = lengths * (batch["advantages"].cpu() != 0)
    tokens = lengths.tolist()
    groups: dict[bytes, list[int]] = {}
    for row in range(len(tokens)):
        groups.setdefault(prompt_ids[row][prompt_mask[row]].numpy().tobytes(), []).append(row)
    together = min(len(group) for group in groups.values())  # a prompt drawn twice has twice as many rows
    if any(size % together for size in (*sizes, *map(len, groups.values()))):
        together = 1
    units = [group[i : i + together] for group in groups.values() for i in range(0, len(group), together)]
    dealt: list[list[int]] = [[] for _ in sizes]
    loads = [0] * len(sizes)
    for unit in sorted(units, key=lambda unit: -sum(tokens[row] for row in unit)):
        room = [i for i, size in enumerate(sizes) if len(dealt[i]) + len(unit) <= size]
        lightest = min(room, key=lambda i: loads[i])
        dealt[lightest] += unit
        loads[lightest] += sum(tokens[row] for row in unit)
    device = batch["prompt_ids"].device
    return [torch.tensor(sorted(rows), device=device) for rows in dealt]
