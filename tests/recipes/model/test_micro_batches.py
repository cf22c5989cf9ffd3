"""Test that the micro-batches of a step get rows evenly, in whole groups where these fit."""

import torch

from qerl_recipes.model.packing import even_micro_batches

P, C = 7, 9  # columns of prompts and of completions


def test_micro_batches_become_even_and_keep_groups():
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, C + 1, (32,), generator=generator)
    order = torch.randperm(32, generator=generator)
    whole = {
        "prompt_ids": (torch.arange(32) // 4)[:, None].expand(32, P)[order],
        "prompt_mask": torch.ones(32, P, dtype=torch.long),
        "completion_ids": torch.arange(32)[:, None].expand(32, C)[order],
        "completion_mask": (torch.arange(C) < lengths[:, None]).long()[order],
        "advantages": torch.arange(32.0)[order],
        "num_items_in_batch": torch.tensor(7),
        "absent": None,
    }
    split = [
        {k: v[i : i + 8] if torch.is_tensor(v) and v.dim() else v for k, v in whole.items()} for i in (0, 8, 16, 24)
    ]
    even = even_micro_batches(split, 2)
    for step in (slice(0, 2), slice(2, 4)):
        before, after = (torch.cat([b["advantages"] for b in batches[step]]) for batches in (split, even))
        assert sorted(before.tolist()) == sorted(after.tolist())
    for one in even:
        assert torch.equal(one["advantages"], one["completion_ids"][:, 0].float())
        assert torch.equal(one["completion_mask"].sum(1), lengths[one["completion_ids"][:, 0]])
        assert int(one["num_items_in_batch"]) == 7
        assert one["absent"] is None
    tokens = [int(one["completion_mask"].sum()) for one in even]
    assert max(abs(tokens[0] - tokens[1]), abs(tokens[2] - tokens[3])) <= C
    (together,) = [even_micro_batches(split, 4)]
    assert all(len(one["prompt_ids"][:, 0].unique()) == 2 for one in together)


def test_a_prompt_drawn_twice_keeps_other_groups_whole():
    """Check twelve rows in groups of four, with one prompt in two groups.

    The longest completions are dealt first, in whole groups.
    """
    prompts = torch.tensor([5, 6, 5]).repeat_interleave(4)[:, None]
    completions = torch.arange(12)[:, None].expand(12, 12)
    mask = (torch.arange(12) < torch.arange(12, 0, -1)[:, None]).long()
    rows = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": completions}
    batches = [
        {key: value[first : first + 4] for key, value in {**rows, "completion_mask": mask}.items()}
        for first in (0, 4, 8)
    ]
    even = even_micro_batches(batches, 3)
    assert sorted(one["prompt_ids"].unique().tolist() for one in even) == [[5], [5], [6]]
    assert sorted(torch.cat([one["completion_ids"][:, 0] for one in even]).tolist()) == list(range(12))


def micro_batches(prompts, lengths, sizes, advantages=None):
    """Return micro-batches with the given numbers of rows: prompts have one token, completions the given lengths."""
    lengths = torch.tensor(lengths)
    whole = {
        "prompt_ids": torch.tensor(prompts)[:, None],
        "prompt_mask": torch.ones(len(prompts), 1, dtype=torch.long),
        "completion_ids": torch.arange(len(prompts))[:, None].expand(-1, 12),
        "completion_mask": (torch.arange(12) < lengths[:, None]).long(),
        "advantages": torch.ones(len(prompts)) if advantages is None else torch.tensor(advantages),
    }
    parts = {key: value.split(sizes) for key, value in whole.items()}
    return [{key: value[i] for key, value in parts.items()} for i in range(len(sizes))]


def rows(batches):
    return [one["completion_ids"][:, 0].tolist() for one in batches]


def test_the_longest_rows_are_dealt_first():
    """By hand, without the prompt's token: 9 + 3 + 2 and 8 + 7 + 1; then 9 + 1 and 1 + 1, though 1 + 1 has fewer."""
    assert rows(even_micro_batches(micro_batches(range(6), [1, 9, 8, 2, 7, 3], [3, 3]), 2)) == [[1, 3, 5], [0, 2, 4]]
    assert rows(even_micro_batches(micro_batches(range(4), [1, 1, 1, 9], [2, 2]), 2)) == [[2, 3], [0, 1]]


def test_groups_that_do_not_fit_are_dealt_row_by_row():
    """Check groups of two in micro-batches of three."""
    batches = micro_batches([5, 5, 6, 6, 7, 7], [1, 9, 8, 2, 7, 3], [3, 3])
    assert rows(even_micro_batches(batches, 2)) == [[1, 3, 5], [0, 2, 4]]


def test_skipped_rows_without_an_advantage_count_as_empty():
    batches = micro_batches(range(4), [9, 8, 2, 1], [2, 2], [-0.5, 0.0, 1.0, 1.0])
    assert rows(even_micro_batches(batches, 2)) == [[0, 3], [1, 2]]  # sums 9 + 1 and 8 + 2
    assert rows(even_micro_batches(batches, 2, skips_zero_advantage=True)) == [[0, 1], [2, 3]]  # sums 9 and 2 + 1
