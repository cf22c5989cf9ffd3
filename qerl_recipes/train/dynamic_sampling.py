"""Dynamic sampling (DAPO): groups without signal are replaced by completions of fresh prompts.

Source: DAPO (arXiv 2503.14476), section 3.2: the objective has only groups with 0 < right answers < group size. With a
reward of 0 or 1, such as ``accuracy``, these are the groups in which that reward differs. Other rewards (format,
length) do not count: they would keep a group without a right answer. A recipe without ``accuracy`` compares the
weighted sum, unless ``dynamic_sampling_metric`` names another reward.

The fresh prompts come from a second seeded stream of the training set, whose position is part of the checkpoint. DAPO
samples until the batch is full. Here the number of rounds is limited, and the shape of the batch does not change. A
group that could not be replaced stays, with advantages and a completion mask of 0. Its tokens then count neither in
the loss nor in the loss's divisor, as in DAPO; losses that average over sequences (``loss_type: grpo``) still count
its sequences. If no group of any process has a signal, the masks stay as they are.
"""

import contextlib
import copy
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from qerl_recipes.train.loss import mask_of
from qerl_vllm_plugin.noise import seed_of

if TYPE_CHECKING:
    from qerl_recipes.train.trainer import QerlGRPOTrainer

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
    """An endless stream of row numbers of the training set: one seeded permutation after another."""

    def __init__(self, rows: int, seed: int, position: int = 0) -> None:
        self.rows, self.seed, self.position = rows, seed, position
        self._round, self._order = -1, torch.empty(0)

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` row numbers."""
        rows = [self._row_at(self.position + i) for i in range(count)]
        self.position += count
        return rows

    def _row_at(self, position: int) -> int:
        if position // self.rows != self._round:
            self._round = position // self.rows
            generator = torch.Generator().manual_seed(seed_of("dynamic sampling", self.seed, self._round))
            self._order = torch.randperm(self.rows, generator=generator)
        return int(self._order[position % self.rows])


def judged_by(
    per_reward: torch.Tensor, weights: torch.Tensor, names: Sequence[str], metric: str | None
) -> torch.Tensor:
    """Return the value by which dynamic sampling compares the completions of a group: (completions,).

    This is the column of ``per_reward: (completions, rewards)`` that ``metric`` names. For ``total`` it is the sum
    weighted by ``weights: (rewards,)``. None means accuracy if ``names`` have it, else the sum. NaN marks a completion
    without a value.
    """
    if metric is None:
        metric = DEFAULT_METRIC if DEFAULT_METRIC in names else TOTAL
    if metric != TOTAL:
        return per_reward[:, list(names).index(metric)]
    total = (per_reward * weights.to(per_reward.device)).nansum(dim=1)
    return total.masked_fill(per_reward.isnan().all(dim=1), torch.nan)


def informative_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Mark the groups whose rewards differ: ``rewards: (groups * num_generations,)`` -> bool ``(groups,)``.

    NaN marks a completion without a value; it is left out.
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
    """Return ``batch`` with group i overwritten by group j of ``fresh`` for each (i, j) of ``pairs``.

    Both batches are what ``GRPOTrainer._generate_and_score_completions`` returns. Rows are padded to the wider of the
    two. Raises ValueError for an entry of ``batch`` that this function does not know.
    """
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


def replace_logged(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    pairs: Sequence[tuple[int, int]],
    fresh_groups: int,
    num_generations: int,
) -> None:
    """Update TRL's table of completions in place, so that ``before`` shows the completions that are trained on.

    Both tables are a trainer's ``_logs`` (columns, or mappings of columns), before and after ``fresh_groups`` groups of
    all processes were scored. The fresh rows are the last ones of ``after``. ``pairs`` are as in ``replace_groups``,
    numbered over all processes.
    """
    for column, scored in _columns(before, after):
        fresh = list(scored)[-fresh_groups * num_generations :]
        if len(fresh) < fresh_groups * num_generations or len(column) < len(fresh):
            continue  # no reward has filled this column
        for i, j in pairs:
            for k in range(num_generations):
                column[i * num_generations + k] = fresh[j * num_generations + k]


def _columns(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[deque[Any], deque[Any]]]:
    for name, column in before.items():
        if isinstance(column, Mapping):
            yield from _columns(column, after[name])
        else:
            yield column, after[name]


def _pad(x: torch.Tensor, width: int, left: bool, value: int) -> torch.Tensor:
    missing = width - x.shape[1]
    return torch.nn.functional.pad(x, (missing, 0) if left else (0, missing), value=value)


def refill(trainer: "QerlGRPOTrainer", batch: dict[str, Any], groups: int) -> dict[str, Any]:
    """Return ``batch`` with its groups without signal replaced, in as many rounds as the recipe allows.

    ``batch`` holds ``groups`` groups of this process. Groups are numbered over all processes, rank after rank, so the
    fresh prompts do not depend on the number of processes. Each process scores an equal share of the fresh prompts,
    whichever process needs them.
    """
    accelerator, size = trainer.accelerator, trainer.num_generations
    ranks, first_group = accelerator.num_processes, accelerator.process_index * groups
    without_signal = [i for i, differs in enumerate(informative_groups(trainer.judged, size).tolist()) if not differs]
    dropped, tokens_before, rounds = len(without_signal), trainer.vllm_generation.tokens, 0
    while without_signal and rounds < trainer.args.dynamic_sampling_max_rounds:
        rounds += 1
        needed, share = len(without_signal), -(-len(without_signal) // ranks)
        rows = trainer.stream.take(needed)
        rows += rows[-1:] * (share * ranks - needed)  # gathering needs equal sizes; these extra rows are not used
        local_rows = rows[accelerator.process_index * share :][:share]
        inputs = [dict(trainer.train_dataset[row]) for row in local_rows for _ in range(size)]
        with _logs_set_aside(trainer) as fresh_logs:
            fresh = trainer.score(inputs)
        informative = informative_groups(trainer.judged, size)[:needed].tolist()
        with_signal = [j for j, differs in enumerate(informative) if differs]
        pairs = list(zip(without_signal, with_signal, strict=False))
        for source, scored in enumerate(_gather_batches(fresh, ranks) if pairs else []):
            from_source = [(i - first_group, j - source * share) for i, j in pairs if j // share == source]
            if local_pairs := [(i, j) for i, j in from_source if 0 <= i < groups]:
                batch = replace_groups(batch, scored, local_pairs, size, trainer._tokenizer.pad_token_id)
        without_signal = without_signal[len(pairs) :]
        if trainer.log_completions:
            replace_logged(trainer._logs, fresh_logs, pairs, share * ranks, size)
    for group in without_signal:
        for row in _rows(group, size):
            trainer._logs["advantages"][row] = 0.0
    local_groups = [group - first_group for group in without_signal if 0 <= group - first_group < groups]
    filled_rows = [row for group in local_groups for row in _rows(group, size)]
    batch["advantages"][filled_rows] = 0.0
    extra = torch.tensor([trainer.vllm_generation.tokens - tokens_before], device=accelerator.device)
    counts = {
        "accepted_groups": groups * ranks - len(without_signal),
        "dropped_groups": dropped,
        "filled_groups": len(without_signal),
        "extra_tokens": int(accelerator.gather(extra).sum()),
        "rounds": rounds,
    }
    for name, count in counts.items():
        trainer._metrics["train"][f"dynamic_sampling/{name}"].append(count)
    if counts["accepted_groups"] > 0:  # without any signal the loss is 0 whatever its divisor, so the masks may stay
        batch["completion_mask"][filled_rows] = 0
    batch["num_items_in_batch"] = accelerator.gather(mask_of(batch).sum()).sum()
    return batch


def _rows(group: int, size: int) -> range:
    return range(group * size, (group + 1) * size)


def _gather_batches(fresh: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Return the fresh batches of all processes, in the order of their ranks."""
    if ranks == 1:
        return [fresh]
    device = fresh["prompt_ids"].device
    sent = {name: value.cpu() for name, value in fresh.items() if isinstance(value, torch.Tensor)}
    return [{name: value.to(device) for name, value in part.items()} for part in gather_object([sent])]


@contextlib.contextmanager
def _logs_set_aside(trainer: "QerlGRPOTrainer") -> Iterator[dict[str, Any]]:
    """Keep what is scored inside the block out of the trainer's metrics and its table of completions.

    Metrics describe the prompts in the data set's order, without the bias of groups picked because their rewards
    differ. Yields a copy of the table to which the block's completions are added, for ``replace_logged``.
    """
    metrics, logs = trainer._metrics["train"], trainer._logs
    trainer._metrics["train"] = defaultdict(list)
    trainer._logs = copy.deepcopy(logs)
    try:
        yield trainer._logs
    finally:
        trainer._metrics["train"], trainer._logs = metrics, logs
