"""Leave out completions whose advantage is 0: they have no gradient, and need neither a forward nor a backward.

In a group whose rewards are all equal every advantage is exactly 0, and each of TRL's losses multiplies by it. Such
rows ("silent rows") are left out before packing, and constants take their place in the loss. The loss and its divisors
(the tokens of the batch, or of a sequence) stay what they were. For the same log-probabilities the loss and its
gradient with respect to them are equal bit for bit. Over a model both differ by the order of its sums, in fp32 by less
than 1e-4 relative.
"""

from collections.abc import Mapping
from typing import Any

import torch

from qerl_recipes.train.importance import mask_of


def silent(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Mark the rows of TRL's micro-batch that have an advantage of 0 and are left out: (B,) bool.

    If all rows have 0, the first one with tokens stays, so that the step still compares engine and trainer.
    """
    advantages: torch.Tensor = inputs["advantages"]
    has_none = advantages == 0
    rows = torch.arange(len(has_none), device=has_none.device)
    first = (mask_of(inputs).sum(dim=1) > 0).int().argmax()  # a branch in Python would wait for the GPU
    return has_none & ~(has_none.all() & (rows == first))


def computed(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Mark the tokens of a micro-batch that are learned from, without those of rows ``left_out``: (B, C) bool."""
    mask = mask_of(inputs).bool()
    return mask & ~inputs["left_out"][:, None] if "left_out" in inputs else mask


def with_constants(
    logps: torch.Tensor, entropies: torch.Tensor, inputs: Mapping[str, Any], left_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``logps`` and ``entropies``, (B, C) each, with constants in the rows ``left_out``: (B,).

    The log-probabilities there become those from before the step, so that every ratio is 1 and finite. The entropies
    become the mean over the computed tokens, so that the mean over all tokens stays the same; NaN if none was computed.
    """
    before = inputs["old_per_token_logps"] if "old_per_token_logps" in inputs else inputs["sampling_per_token_logps"]
    mask = computed({**inputs, "left_out": left_out})
    mean = (entropies * mask).sum() / mask.sum()
    rows = left_out[:, None]
    return torch.where(rows, before.nan_to_num(nan=0.0), logps), torch.where(rows, mean, entropies)
