"""How the trainer's log-probabilities of a rollout differ from those that the engine has sampled from.

TRL computes them once before training, to weigh each token by trainer over engine, and once more for the loss. Where
every rollout is trained on within one optimizer step the two are the same numbers: the weights are taken from the
loss's own forward, and the one before is saved, a sixth of a GRPO step of a 7B model. Where a rollout serves several
steps the weights of each are from before the first, and are measured on the completions that the step trains on.
"""

from collections.abc import Mapping
from typing import Any

import torch

from qerl_recipes.recipe.configs import GRPOConfig

PREFIX = "sampling/"  # of TRL's names for what is measured here
SEQUENCE_MODES = ("sequence_mask", "sequence_truncate")
MASK_MODES = ("sequence_mask", "token_mask")


def mask_of(inputs: Mapping[str, Any]) -> torch.Tensor:
    """(B, C), 1 where a token was sampled by the policy."""
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
    """Importance weights exp(logps - sampled), TRL's ``vllm_importance_sampling_mode``: (B, C), or (B, 1) by sequence.

    ``logps``, ``sampled``, ``mask``: (B, C). A weight outside of [``smallest``, ``largest``] is cut off there, or is 0
    in the mask modes. Where the engine has no log-probability (NaN) the trainer's stands for it.
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
    """Under TRL's name the estimate k3 of each token's divergence from the reference of ``beta``: (B, C); or nothing.

    With ``use_bias_correction_kl`` times the ratio to the policy from before the rollout's first step, as in the loss.
    """
    if "ref_per_token_logps" not in inputs:
        return {}
    difference = inputs["ref_per_token_logps"] - logps
    estimate = difference.exp() - difference - 1
    if args.use_bias_correction_kl:
        estimate = estimate * log_ratio(logps, inputs, args).exp()
    return {"kl": estimate}


def log_ratio(logps: torch.Tensor, inputs: Mapping[str, Any], args: GRPOConfig) -> torch.Tensor:
    """Of ``logps: (B, C)`` to the policy from before the rollout's first step, as in the loss: (B, C), or (B, 1) by
    sequence, whose mean it is then."""
    change, mask = logps - inputs.get("old_per_token_logps", logps), mask_of(inputs)
    if args.importance_sampling_level == "sequence":
        change = (change * mask).sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return change


class Differences:
    """Sums over the micro-batches of a step; nothing waits for the GPU before ``take``."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None  # of |difference|, of tokens, of weights, of their number
        self._largest = self._smallest = torch.empty(0)

    def add(self, logps: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor) -> None:
        """One micro-batch: (B, C) each, ``ratio`` (B, C) or (B, 1)."""
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
        """What was added since the last call, over all processes, under TRL's names; empty if no token was.

        ``gather`` is the accelerator's: a tensor of one process to those of all, one below the other.
        """
        if self._sums is None:
            return {}
        own = torch.cat([self._sums, self._largest.double(), self._smallest.double()[None]])
        self._sums = None
        everywhere = gather(own[None])
        delta, tokens, ratios, number = everywhere[:, :4].sum(dim=0).tolist()
        if not tokens:
            return {}  # a difference of 0 would say that they agree
        largest_delta, largest_ratio = everywhere[:, 4:6].amax(dim=0).tolist()
        return {
            f"{PREFIX}sampling_logp_difference/mean": delta / tokens,
            f"{PREFIX}sampling_logp_difference/max": largest_delta,
            f"{PREFIX}importance_sampling_ratio/min": everywhere[:, 6].min().item(),
            f"{PREFIX}importance_sampling_ratio/mean": ratios / max(number, 1),
            f"{PREFIX}importance_sampling_ratio/max": largest_ratio,
        }
