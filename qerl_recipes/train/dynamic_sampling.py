"""Replace groups without signal by completions of fresh prompts: dynamic sampling, as in DAPO.

Source: DAPO (arXiv 2503.14476), section 3.2: the objective has only groups with 0 < right answers < group size. Other
rewards (format, length) do not count: they would keep a group without a right answer.

The fresh prompts come from a second seeded stream of the training set, whose position is part of the checkpoint. DAPO
samples until the batch is full; here the number of rounds is limited. A group that could not be replaced stays, with
advantages and a completion mask of 0. Its tokens then count neither in the loss nor in its divisor, as in DAPO;
``loss_type: grpo`` still counts its sequences. If no group of any process has a signal, the masks stay.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from qerl_vllm_plugin.noise import seed_of

DEFAULT_METRIC, TOTAL = "accuracy", "total"
SPREAD = 1e-6  # rewards of one group that differ by no more than this count as equal

# the entries of TRL's batch of completions, by the side on which their rows are padded
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
    """Draw row numbers of the training set without end: one seeded permutation after another."""

    def __init__(self, rows: int, seed: int, position: int = 0) -> None:
        self.rows, self.seed, self.position = rows, seed, position
        self._round, self._order = -1, torch.empty(0)

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` row numbers."""
        rows = []
        for position in range(self.position, self.position + count):
            if position // self.rows != self._round:
                self._round = position // self.rows
                generator = torch.Generator().manual_seed(seed_of("dynamic sampling", self.seed, self._round))
                self._order = torch.randperm(self.rows, generator=generator)
            rows.append(int(self._order[position % self.rows]))
        self.position += count
        return rows


def judged_by(
    per_reward: torch.Tensor, weights: torch.Tensor, names: Sequence[str], metric: str | None
) -> torch.Tensor:
    """Return the value by which dynamic sampling compares completions: (completions,), NaN where there is none.

    It is the column of ``per_reward: (completions, rewards)`` that ``metric`` names, or for ``total`` their weighted
    sum. None means accuracy if ``names`` have it, else the sum.
    """
    if metric is None:
        metric = DEFAULT_METRIC if DEFAULT_METRIC in names else TOTAL
    if metric != TOTAL:
        return per_reward[:, list(names).index(metric)]
    total = (per_reward * weights.to(per_reward.device)).nansum(dim=1)
    return total.masked_fill(per_reward.isnan().all(dim=1), torch.nan)


def informative_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Mark the groups whose rewards differ, NaN left out: (groups * num_generations,) -> bool (groups,)."""
    grouped = rewards.view(-1, num_generations)
    largest = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    smallest = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
    return largest - smallest > SPREAD


def refill(
    batch: dict[str, Any],
    judged: torch.Tensor,
    stream: PromptStream,
    score: Callable[[list[int]], tuple[dict[str, Any], torch.Tensor]],
    gather_object: Callable[[list[Any]], list[Any]],
    *,
    num_generations: int,
    max_rounds: int,
    pad_token_id: int,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Replace the groups of ``batch`` without signal by fresh prompts of ``stream``, in at most ``max_rounds`` rounds.

    Returns this process's batch, and the counts to log. ``judged`` covers all ``ranks``, whose groups are numbered rank
    after rank. ``score(rows)`` returns TRL's batch of this process, and what ``judged_by`` returns for those of all.
    """
    groups = len(batch["advantages"]) // num_generations
    first_group = rank * groups
    rounds = 0
    without_signal = _without_signal(judged, num_generations)
    dropped = len(without_signal)
    while without_signal and rounds < max_rounds:
        needed, share = len(without_signal), -(-len(without_signal) // ranks)
        rows = stream.take(needed)
        rows += rows[-1:] * (share * ranks - needed)  # gathering needs equal sizes; these extra rows are not used
        fresh, fresh_judged = score(rows[rank * share :][:share])
        useless = set(_without_signal(fresh_judged, num_generations))
        pairs = list(zip(without_signal, (j for j in range(needed) if j not in useless), strict=False))
        for source, scored in enumerate(_gather_batches(fresh, ranks, gather_object) if pairs else []):
            from_source = [(i - first_group, j - source * share) for i, j in pairs if j // share == source]
            if local_pairs := [(i, j) for i, j in from_source if 0 <= i < groups]:
                batch = replace_groups(batch, scored, local_pairs, num_generations, pad_token_id)
        without_signal = without_signal[len(pairs) :]
        rounds += 1
    local_groups = [group - first_group for group in without_signal if 0 <= group - first_group < groups]
    filled_rows = [row for group in local_groups for row in _rows(group, num_generations)]
    accepted = groups * ranks - len(without_signal)
    batch["advantages"][filled_rows] = 0.0
    if accepted:  # without any signal the loss is 0 whatever its divisor, so the masks may stay
        batch["completion_mask"][filled_rows] = 0
    counts = {"accepted_groups": accepted, "dropped_groups": dropped, "filled_groups": len(without_signal)}
    return batch, {**counts, "rounds": rounds}


def _without_signal(judged: torch.Tensor, num_generations: int) -> list[int]:
    return [group for group, differs in enumerate(informative_groups(judged, num_generations).tolist()) if not differs]


def _gather_batches(
    fresh: dict[str, Any], ranks: int, gather_object: Callable[[list[Any]], list[Any]]
) -> list[dict[str, Any]]:
    """Return the fresh batches of all processes, in the order of their ranks."""
    if ranks == 1:
        return [fresh]
    device = fresh["prompt_ids"].device
    sent = {name: value.cpu() for name, value in fresh.items() if isinstance(value, torch.Tensor)}
    return [{name: value.to(device) for name, value in part.items()} for part in gather_object([sent])]


def replace_groups(
    batch: Mapping[str, Any],
    fresh: Mapping[str, Any],
    pairs: list[tuple[int, int]],
    num_generations: int,
    pad_token_id: int,
) -> dict[str, Any]:
    """Return ``batch`` with group i overwritten by group j of ``fresh`` for each (i, j) of ``pairs``."""
    if unknown := sorted(set(batch) - {*PADDED_LEFT, *PADDED_RIGHT, *ROWS, *SCALARS}):
        raise ValueError(f"dynamic_sampling does not know what to do with {unknown[0]!r} of the batch; turn it off")
    target_rows = [row for i, _ in pairs for row in _rows(i, num_generations)]
    source_rows = [row for _, j in pairs for row in _rows(j, num_generations)]
    merged = dict(batch)
    for name in (*PADDED_LEFT, *PADDED_RIGHT, *ROWS):
        if name in batch:
            kept, new = batch[name], fresh[name]
            if kept.dim() == 2 and kept.shape[1] != new.shape[1]:
                width, left = max(kept.shape[1], new.shape[1]), name in PADDED_LEFT
                value = pad_token_id if name in ("prompt_ids", "completion_ids") else 0
                kept, new = _pad(kept, width, left, value), _pad(new, width, left, value)
            merged[name] = kept.clone()
            merged[name][target_rows] = new[source_rows]
    return merged


def _pad(x: torch.Tensor, width: int, left: bool, value: int) -> torch.Tensor:
    missing = width - x.shape[1]
    return torch.nn.functional.pad(x, (missing, 0) if left else (0, missing), value=value)


def _rows(group: int, size: int) -> range:
    return range(group * size, (group + 1) * size)
