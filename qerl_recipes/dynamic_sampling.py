"""Dynamic sampling (DAPO): groups whose rewards are all equal teach nothing and are replaced by fresh prompts.

Source: DAPO (arXiv 2503.14476), section 3.2. The fresh prompts come from a second seeded stream of the training set,
whose position is part of the checkpoint. The shape of the batch does not change.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

SPREAD = 1e-6  # rewards of one group that differ by less are equal

# what TRL's batch of completions holds, by how its rows are padded to one width
PADDED_LEFT = ("prompt_ids", "prompt_mask")
PADDED_RIGHT = (
    "completion_ids",
    "completion_mask",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "ref_per_token_logps",
    "importance_sampling_ratio",
    "tool_mask",
)
ROWS = ("advantages",)
SCALARS = ("num_items_in_batch",)


class PromptStream:
    """Row numbers of the training set in an endless order of its own: one permutation after another."""

    def __init__(self, rows: int, seed: int, position: int = 0) -> None:
        self.rows, self.seed, self.position = rows, seed, position
        self._round, self._order = -1, torch.empty(0)

    def take(self, count: int) -> list[int]:
        """The next ``count`` row numbers."""
        taken = [self._at(self.position + i) for i in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> int:
        if position // self.rows != self._round:
            self._round = position // self.rows
            key = hashlib.sha256(f"dynamic sampling:{self.seed}:{self._round}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
            self._order = torch.randperm(self.rows, generator=generator)
        return int(self._order[position % self.rows])


def informative_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Which groups have rewards that differ: ``rewards: (groups * num_generations,)`` -> bool ``(groups,)``.

    NaN marks a completion that no reward function could score; it is left out.
    """
    grouped = rewards.view(-1, num_generations)
    largest = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    smallest = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
    return largest - smallest > SPREAD


def replace_groups(
    batch: Mapping[str, Any],
    fresh: Mapping[str, Any],
    pairs: list[tuple[int, int]],
    num_generations: int,
    pad_token_id: int,
) -> dict[str, Any]:
    """``batch`` with group i overwritten by group j of ``fresh`` for each (i, j) of ``pairs``.

    Both are what ``GRPOTrainer._generate_and_score_completions`` returns; rows are padded to the wider of the two.
    Raises ValueError for an entry that this function does not know.
    """
    if unknown := sorted(set(batch) - {*PADDED_LEFT, *PADDED_RIGHT, *ROWS, *SCALARS}):
        raise ValueError(f"dynamic_sampling does not know what to do with {unknown[0]!r} of the batch; turn it off")
    to = [i * num_generations + k for i, _ in pairs for k in range(num_generations)]
    come_from = [j * num_generations + k for _, j in pairs for k in range(num_generations)]
    merged = dict(batch)
    for name in (*PADDED_LEFT, *PADDED_RIGHT, *ROWS):
        if name in batch:
            ours, theirs = batch[name], fresh[name]
            if ours.dim() == 2 and ours.shape[1] != theirs.shape[1]:
                width, left = max(ours.shape[1], theirs.shape[1]), name in PADDED_LEFT
                value = pad_token_id if name in ("prompt_ids", "completion_ids") else 0
                ours, theirs = _pad(ours, width, left, value), _pad(theirs, width, left, value)
            merged[name] = ours.clone()
            merged[name][to] = theirs[come_from]
    return merged


def _pad(x: torch.Tensor, width: int, left: bool, value: int) -> torch.Tensor:
    missing = width - x.shape[1]
    return torch.nn.functional.pad(x, (missing, 0) if left else (0, missing), value=value)
