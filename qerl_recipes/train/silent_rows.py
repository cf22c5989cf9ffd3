"""Completions whose advantage is 0: they have no gradient, and need neither a forward nor a backward.

In a group whose rewards are all equal every advantage is exactly 0, and each of TRL's losses multiplies by it. Such
rows are left out before packing; their place in the loss is taken by a constant. The loss, and with it every divisor
(the tokens of the batch, of a sequence), stays what it was. For the same log-probabilities the loss and its gradient by
them are equal to the bit; over a model both differ by the order of its sums, in fp32 by less than 1e-4 of them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.train.importance import mask_of


def reason_to_keep(args: GRPOConfig) -> str | None:
    """The key by which a row without advantage has a gradient, or is part of another figure; None if there is none."""
    reasons = {
        "pack_tokens: 0": not args.pack_tokens,
        f"beta: {args.beta:g}": args.beta != 0,
        f"entropy_coef: {args.entropy_coef}": bool(args.entropy_coef),
        "use_adaptive_entropy": args.use_adaptive_entropy,
        f"top_entropy_quantile: {args.top_entropy_quantile:g}": args.top_entropy_quantile != 1,
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "loss_type: vespo": args.loss_type == "vespo",  # its metric is a mean over all rows
    }
    return next((key for key, applies in reasons.items() if applies), None)


def silent(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Which rows of TRL's micro-batch have an advantage of 0 and are left out: (B,) bool.

    Where all have, the first that has tokens stays: without it engine and trainer would not be compared in that step.
    """
    advantages: torch.Tensor = inputs["advantages"]
    has_none = advantages == 0
    rows = torch.arange(len(has_none), device=has_none.device)
    first = (mask_of(inputs).sum(dim=1) > 0).int().argmax()  # no branch: that would wait for the GPU
    return has_none & ~(has_none.all() & (rows == first))


def computed(inputs: Mapping[str, Any]) -> torch.Tensor:
    """(B, C) bool: the tokens of a micro-batch that are learned from, those of rows ``left_out`` apart."""
    mask = mask_of(inputs).bool()
    return mask & ~inputs["left_out"][:, None] if "left_out" in inputs else mask


def with_constants(
    logps: torch.Tensor, entropies: torch.Tensor, inputs: Mapping[str, Any], left_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logps`` and ``entropies``: (B, C), with values for the rows ``left_out``: (B,), which nobody has computed.

    Their log-probabilities are those before the step, so that every ratio is 1 and finite. Their entropies are the mean
    over the tokens that were computed, so that a mean over all is that mean; NaN where none was.
    """
    before = inputs["old_per_token_logps"] if "old_per_token_logps" in inputs else inputs["sampling_per_token_logps"]
    mask = computed({**inputs, "left_out": left_out})
    mean = (entropies * mask).sum() / mask.sum()
    rows = left_out[:, None]
    return torch.where(rows, before.nan_to_num(nan=0.0), logps), torch.where(rows, mean, entropies)
