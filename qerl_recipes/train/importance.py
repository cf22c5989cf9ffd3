"""Importance weights: how the trainer's log-probabilities differ from those that the engine sampled with.

TRL computes the trainer's log-probabilities once before training, for the weights, and once more for the loss. Where a
rollout serves one optimizer step, both are the same numbers. So the weights come from the loss's own forward; that
saves a sixth of a GRPO step of a 7B model. Where a rollout serves several steps, the weights come from before the first
step; each step measures them on the completions that it trains on.
"""

from collections.abc import Mapping
from typing import Any

import torch

from qerl_recipes.recipe.configs import GRPOConfig

PREFIX = "sampling/"  # begins TRL's names of these metrics
SEQUENCE_MODES = ("sequence_mask", "sequence_truncate")
MASK_MODES = ("sequence_mask", "token_mask")


def mask_of(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return a (B, C) mask that is 1 where the policy sampled the token and it counts in the loss."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def weights(
    logps: torch.Tensor,
    sampled: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    smallest: float | None,
    largest: float | None,
) -> torch.Tensor:
    """Return the importance weights exp(logps - sampled): (B, C), or (B, 1) in the sequence modes.

    ``mode`` is TRL's ``vllm_importance_sampling_mode``. ``logps``, ``sampled`` and ``mask`` are (B, C). A weight
    outside [``smallest``, ``largest``] is clamped, or set to 0 in the mask modes. A token without a log-probability
    from the engine (NaN) counts as equal on both sides.
    """
    difference = ((logps - sampled) * mask).nan_to_num(nan=0.0)
    if mode in SEQUENCE_MODES:
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = difference.exp()
    if mode not in MASK_MODES:
        return ratio if smallest is None and largest is None else ratio.clamp(smallest, largest)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if smallest is not None:
        outside |= ratio < smallest
    if largest is not None:
        outside |= ratio > largest
    return ratio.masked_fill(outside, 0.0)


def reference_kl(logps: torch.Tensor, inputs: Mapping[str, Any], args: GRPOConfig) -> dict[str, torch.Tensor]:
    """Return the KL estimate k3 to the reference policy for each token, (B, C), under TRL's name.

    The result is empty without a reference (``beta: 0``). With ``use_bias_correction_kl`` the estimate is multiplied by
    the ratio to the policy before the rollout's first step, as in the loss.
    """
    if "ref_per_token_logps" not in inputs:
        return {}
    difference = inputs["ref_per_token_logps"] - logps
    estimate = difference.exp() - difference - 1
    if args.use_bias_correction_kl:
        estimate = estimate * log_ratio(logps, inputs, args).exp()
    return {"kl": estimate}


def log_ratio(logps: torch.Tensor, inputs: Mapping[str, Any], args: GRPOConfig) -> torch.Tensor:
    """Return the log-ratio of ``logps: (B, C)`` to the policy before the rollout's first step, as in the loss.

    It is (B, C). With ``importance_sampling_level: sequence`` it is the mean over each sequence: (B, 1).
    """
    change, mask = logps - inputs.get("old_per_token_logps", logps), mask_of(inputs)
    if args.importance_sampling_level == "sequence":
        change = (change * mask).sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return change


class Differences:
    """The logprob differences and importance weights of a step's micro-batches; only ``take`` waits for the GPU."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None  # (4,): sum of |difference|, tokens, sum of weights, number of weights
        self._largest = self._smallest = torch.empty(0)

    def add(self, logps: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor) -> None:
        """Add one micro-batch: ``ratio`` is (B, C) or (B, 1), the others are (B, C)."""
        known = mask.bool() & ~sampled.isnan()
        delta = torch.where(known, (logps - sampled).abs(), 0.0)
        counted = torch.ones_like(ratio, dtype=torch.bool) if ratio.shape[1] == 1 < mask.shape[1] else mask.bool()
        sums = torch.stack([delta.sum(), known.sum(), torch.where(counted, ratio, 0.0).sum(), counted.sum()]).double()
        largest = torch.stack([delta.max(), torch.where(counted, ratio, -torch.inf).max()])
        smallest = torch.where(counted, ratio, torch.inf).min()
        if self._sums is None:
            self._sums, self._largest, self._smallest = sums, largest, smallest
        else:
            self._sums = self._sums + sums
            self._largest = torch.maximum(self._largest, largest)
            self._smallest = torch.minimum(self._smallest, smallest)

    def take(self, gather: Any) -> dict[str, float]:
        """Return the figures of what was added since the last call, over all processes, under TRL's names.

        The result is empty if no token had a log-probability from the engine. ``gather`` is the accelerator's; it
        stacks the tensors of all processes along the first dimension.
        """
        if self._sums is None:
            return {}
        local = torch.cat([self._sums, self._largest.double(), self._smallest.double()[None]])
        self._sums = None
        gathered = gather(local[None])
        delta, tokens, ratios, number = gathered[:, :4].sum(dim=0).tolist()
        if not tokens:
            return {}  # a difference of 0 would claim that engine and trainer agree
        largest_delta, largest_ratio = gathered[:, 4:6].amax(dim=0).tolist()
        return {
            f"{PREFIX}sampling_logp_difference/mean": delta / tokens,
            f"{PREFIX}sampling_logp_difference/max": largest_delta,
            f"{PREFIX}importance_sampling_ratio/min": gathered[:, 6].min().item(),
            f"{PREFIX}importance_sampling_ratio/mean": ratios / max(number, 1),
            f"{PREFIX}importance_sampling_ratio/max": largest_ratio,
        }
