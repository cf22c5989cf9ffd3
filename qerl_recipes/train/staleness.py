"""Measure how far the policy has moved since the first of the optimizer steps that one rollout serves."""

from collections.abc import Mapping
from typing import Any

import torch

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.train.importance import log_ratio, mask_of
from qerl_recipes.train.silent_rows import computed

DIFFERENCE, CLIPPED = "staleness/logp_difference/mean", "staleness/clip_ratio"  # TRL logs a clip ratio of its own, too
CLIPPING_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # they clip at 1 - epsilon and at 1 + epsilon_high


def measured(
    logps: torch.Tensor, inputs: Mapping[str, Any], args: GRPOConfig
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return for each metric of a micro-batch its sum and the number of values; {} where a rollout serves one step.

    ``logps: (B, C)`` are the trainer's current log-probabilities. ``DIFFERENCE`` is their distance, in nats, from those
    before the first step, over the computed tokens. In the first step it shows how much two passes of one policy
    differ.

    ``CLIPPED`` is the share that the loss clips at 1 - epsilon and 1 + epsilon_high, as in TRL's
    ``clip_ratio/region_mean``, which is a mean over micro-batches. It is of all sampled tokens or, with
    ``importance_sampling_level: sequence``, of all sequences. A loss that does not clip so has none.
    """
    if "old_per_token_logps" not in inputs:
        return {}
    change, is_computed = (logps - inputs["old_per_token_logps"]).abs(), computed(inputs)
    metrics = {DIFFERENCE: (torch.where(is_computed, change, 0.0).sum(), is_computed.sum())}
    if args.loss_type not in CLIPPING_LOSSES:
        return metrics
    ratio, advantages = log_ratio(logps, inputs, args).exp(), inputs["advantages"][:, None]  # (B, C or 1), (B, 1)
    counted = torch.ones_like(ratio) if args.importance_sampling_level == "sequence" else mask_of(inputs)
    above = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.delta is not None:
        ratio = ratio.clamp(max=args.delta)
    clipped = ((ratio < 1 - args.epsilon) & (advantages < 0)) | ((ratio > 1 + above) & (advantages > 0))
    return {**metrics, CLIPPED: ((clipped * counted).sum(), counted.sum())}
