"""Dynamic sampling (DAPO): groups that teach nothing are replaced by fresh prompts.

Source: DAPO (arXiv 2503.14476), section 3.2: the objective has only groups with 0 < right answers < group size. With a
reward of 0 or 1, such as ``accuracy``, these are the groups whose values of that reward differ; other rewards (format,
length) do not count, or a group without a right answer would stay for its tags. A recipe without ``accuracy`` goes by
the weighted sum, unless ``dynamic_sampling_metric`` names another.

The fresh prompts come from a second seeded stream of the training set, whose position is part of the checkpoint. DAPO
samples until the batch is full; here the rounds are limited, and the shape of the batch does not change: a group that
could not be replaced is filled up with itself, with a completion mask of 0. Its tokens are then neither in the loss nor
in the number that the loss is divided by, as in DAPO (``loss_type: grpo`` and others that average over sequences still
count the sequence).
"""

import contextlib
import copy
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from qerl_vllm_plugin.noise import seed_of

if TYPE_CHECKING:
    from qerl_recipes.train.trainer import QerlGRPOTrainer

DEFAULT_METRIC, TOTAL = "accuracy", "total"
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
            generator = torch.Generator().manual_seed(seed_of("dynamic sampling", self.seed, self._round))
            self._order = torch.randperm(self.rows, generator=generator)
        return int(self._order[position % self.rows])


def judged_by(
    per_reward: torch.Tensor, weights: torch.Tensor, names: Sequence[str], metric: str | None
) -> torch.Tensor:
    """What tells groups apart: ``per_reward: (completions, rewards)``, ``weights: (rewards,)`` -> (completions,).

    The reward called ``metric``, or the weighted sum for ``total``; None is accuracy where ``names`` have it, else the
    sum. NaN marks a completion without a value.
    """
    if metric is None:
        metric = DEFAULT_METRIC if DEFAULT_METRIC in names else TOTAL
    if metric != TOTAL:
        return per_reward[:, list(names).index(metric)]
    total = (per_reward * weights.to(per_reward.device)).nansum(dim=1)
    return total.masked_fill(per_reward.isnan().all(dim=1), torch.nan)


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


def replace_logged(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    pairs: Sequence[tuple[int, int]],
    fresh_groups: int,
    num_generations: int,
) -> None:
    """TRL's table of completions as they are trained on: rows of ``before`` become those that ``after`` ends with.

    Both are a trainer's ``_logs`` (columns, or mappings of columns): before and after ``fresh_groups`` groups, of all
    processes, were scored. ``pairs`` are as in ``replace_groups``, over all processes.
    """
    for ours, theirs in _columns(before, after):
        fresh = list(theirs)[-fresh_groups * num_generations :]
        if len(fresh) < fresh_groups * num_generations or len(ours) < len(fresh):
            continue  # a column that a reward has not filled
        for i, j in pairs:
            for k in range(num_generations):
                ours[i * num_generations + k] = fresh[j * num_generations + k]


def _columns(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[deque[Any], deque[Any]]]:
    for name, column in before.items():
        if isinstance(column, Mapping):
            yield from _columns(column, after[name])
        else:
            yield column, after[name]


def _pad(x: torch.Tensor, width: int, left: bool, value: int) -> torch.Tensor:
    missing = width - x.shape[1]
    return torch.nn.functional.pad(x, (missing, 0) if left else (0, missing), value=value)


def _local_groups(trainer: "QerlGRPOTrainer", groups: int) -> list[bool]:
    """Which of this rank's ``groups`` groups of the last batch teach something."""
    everywhere = informative_groups(trainer.judged, trainer.num_generations).tolist()
    first = trainer.accelerator.process_index * groups
    return everywhere[first : first + groups]


def refill(trainer: "QerlGRPOTrainer", batch: dict[str, Any], groups: int) -> dict[str, Any]:
    """``batch`` of ``groups`` groups with fresh prompts for those that teach nothing, as often as the recipe allows."""
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    equal = [i for i, informative in enumerate(_local_groups(trainer, groups)) if not informative]
    dropped, tokens_before, rounds = len(equal), trainer.vllm_generation.tokens, 0
    while rounds < trainer.args.dynamic_sampling_max_rounds:
        # all ranks draw the same number of groups in the same number of rounds: their batches are gathered
        needed = int(trainer.accelerator.gather(torch.tensor([len(equal)], device=trainer.accelerator.device)).max())
        if needed == 0:
            break
        rounds += 1
        rows = trainer.stream.take(needed * ranks)[rank * needed : (rank + 1) * needed]
        inputs = [dict(trainer.train_dataset[row]) for row in rows for _ in range(trainer.num_generations)]
        with _apart_from_logs(trainer) as fresh_logs:
            fresh = trainer.score(inputs)
        usable = [j for j, informative in enumerate(_local_groups(trainer, needed)) if informative]
        pairs = list(zip(equal, usable, strict=False))
        size, padding = trainer.num_generations, trainer._tokenizer.pad_token_id
        batch = replace_groups(batch, fresh, pairs, size, padding)
        equal = equal[len(pairs) :]
        if trainer.log_completions:
            everywhere = gather_object([(rank * groups + i, rank * needed + j) for i, j in pairs])
            replace_logged(trainer._logs, fresh_logs, everywhere, needed * ranks, size)
    filled = [group * trainer.num_generations + i for group in equal for i in range(trainer.num_generations)]
    batch["advantages"][filled] = 0.0
    for row in gather_object([rank * groups * trainer.num_generations + i for i in filled]):
        trainer._logs["advantages"][row] = 0.0
    counts = {
        "accepted_groups": groups - len(equal),
        "dropped_groups": dropped,
        "filled_groups": len(equal),
        "extra_tokens": trainer.vllm_generation.tokens - tokens_before,
    }
    totals = trainer.accelerator.gather(torch.tensor([list(counts.values())], device=trainer.accelerator.device)).sum(0)
    for name, total in zip(counts, totals.tolist(), strict=True):
        trainer._metrics["train"][f"dynamic_sampling/{name}"].append(total)
    if totals[0] > 0:  # without any group that teaches there is no loss, whatever it is divided by
        batch["completion_mask"][filled] = 0
    batch["num_items_in_batch"] = trainer.accelerator.gather(batch["completion_mask"].sum()).sum()
    trainer._metrics["train"]["dynamic_sampling/rounds"].append(rounds)
    return batch


@contextlib.contextmanager
def _apart_from_logs(trainer: "QerlGRPOTrainer") -> Iterator[dict[str, Any]]:
    """Metrics describe the prompts of the data set's own order, not those picked for being uneven.

    The table of completions shows what is trained on: with what is scored inside it is given for
    ``replace_logged``, and stays as it was before.
    """
    metrics, logs = trainer._metrics["train"], trainer._logs
    trainer._metrics["train"] = defaultdict(list)
    trainer._logs = copy.deepcopy(logs)
    try:
        yield trainer._logs
    finally:
        trainer._metrics["train"], trainer._logs = metrics, logs
