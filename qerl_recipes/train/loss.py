"""Compute what the loss needs of one micro-batch, and measure it: functions over tensors.

B is the number of completions in a micro-batch, C the length of the longest. TRL's ``_compute_loss`` multiplies, clips
and sums. ``train.parts`` says what parts of a micro-batch are.

**Importance weights** say how the trainer's log-probabilities differ from those that the engine sampled with. Where a
rollout serves one step they come from the loss's own forward, which saves a sixth of a GRPO step of a 7B model. Where
it serves several steps, they come from before the first one.

**Rows with an advantage of 0** have no gradient and are not computed; constants take their place, and the loss's
divisors stay. For the same log-probabilities loss and gradient are equal bit for bit. Over a model both differ by the
order of its sums, in fp32 by less than 1e-4 relative.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import PeftModel

from qerl_recipes.model import logprobs
from qerl_recipes.model.packing import PackedRow, pack
from qerl_recipes.recipe.batches import AS_MANY_AS_FIT, FAST_TOKENS
from qerl_recipes.recipe.checks import CLIPPING_LOSSES, needs_every_completion
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.train.half_precision import HalfPrecision

# the names under which TRL's log has these figures; the last two are ours, for TRL logs a clip ratio of its own, too
MISMATCH, LARGEST_MISMATCH = "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"
WEIGHTS = "sampling/importance_sampling_ratio/"
STALENESS, STALE_CLIPPED = "staleness/logp_difference/mean", "staleness/clip_ratio"

SEQUENCE_MODES = ("sequence_mask", "sequence_truncate")
MASK_MODES = ("sequence_mask", "token_mask")

Sums = Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]]  # metric -> sum of its values, their number


@dataclass(frozen=True)
class Measured:
    """Hold figures of one micro-batch, which ``metrics.StepSums`` joins: means, largest and smallest values."""

    sums: Sums = field(default_factory=dict)
    largest: Mapping[str, torch.Tensor] = field(default_factory=dict)
    smallest: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatch:
    """Hold one micro-batch of completions; tensors are (B, C) unless they say otherwise.

    ``mask`` is 1 where the policy sampled the token and it counts in the loss. ``sampled`` are the engine's
    log-probabilities, NaN where it has none. ``old`` are the trainer's from before the first step of a rollout that
    serves several. ``advantages`` are (B,), ``lengths: (B,)`` the tokens of prompt and completion. ``skipped: (B,)``
    marks rows that are not computed, and is None if all are.
    """

    mask: torch.Tensor
    sampled: torch.Tensor
    advantages: torch.Tensor
    lengths: torch.Tensor
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    skipped: torch.Tensor | None = None

    @staticmethod
    def of(batch: Mapping[str, torch.Tensor], *, skips_zero_advantage: bool) -> "MicroBatch":
        """Return the values of TRL's micro-batch."""
        mask, advantages = mask_of(batch), batch["advantages"]
        return MicroBatch(
            mask,
            batch["sampling_per_token_logps"],
            advantages,
            batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1),
            old=batch.get("old_per_token_logps"),
            reference=batch.get("ref_per_token_logps"),
            skipped=zero_advantage(advantages, mask) if skips_zero_advantage else None,
        )

    def computed(self) -> torch.Tensor:
        """Mark the tokens that are learned from, without those of skipped rows: (B, C) bool."""
        mask = self.mask.bool()
        return mask if self.skipped is None else mask & ~self.skipped[:, None]

    def computed_tokens(self) -> torch.Tensor:
        """Return the number of prompt and completion tokens that go through the model: ()."""
        return (self.lengths if self.skipped is None else self.lengths * ~self.skipped).sum()

    def before(self) -> torch.Tensor:
        """Return the log-probabilities from before the step, as constants for rows without a gradient: (B, C)."""
        return (self.sampled if self.old is None else self.old).nan_to_num(nan=0.0)


def mask_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return TRL's (B, C) mask, which is 1 where the policy sampled the token and it counts in the loss."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


@dataclass(frozen=True)
class LossSettings:
    """Say how log-probabilities are computed, in packed rows of ``pack_tokens``; 0 keeps TRL's padded batch.

    With ``splits`` each packed row, or as many padded ones as have ``FAST_TOKENS``, is a part. ``half`` is for float16.
    """

    pack_tokens: int
    skips_zero_advantage: bool
    splits: bool
    half: HalfPrecision | None

    @staticmethod
    def of(args: GRPOConfig, policy: PeftModel) -> "LossSettings":
        """Prepare ``policy``, which has its adapter and trainable norms, for the loss's forward; warn if it pads."""
        pack_tokens = FAST_TOKENS if args.pack_tokens == AS_MANY_AS_FIT else args.pack_tokens or 0
        is_half = policy.get_output_embeddings().weight.dtype == torch.float16
        half = HalfPrecision(policy, args) if is_half else None
        with nullcontext() if half is None else half.watched():
            reason = logprobs.prepare(policy) if pack_tokens else None
        if reason is not None:
            warnings.warn(f"pack_tokens is without effect, the batches stay padded: {reason}", stacklevel=3)
            pack_tokens = 0
        may_skip = pack_tokens > 0 and needs_every_completion(args) is None
        skips = may_skip and args.skip_zero_advantage is not False
        return LossSettings(pack_tokens, skips, args.splits_by_tokens, half)


# parts


@dataclass(frozen=True)
class Part:
    """Hold the completions of one part, packed or ``padded: (b,)``; ``pending: (B,)`` marks those of later parts."""

    packed: Sequence[PackedRow] = ()
    padded: torch.Tensor | None = None
    pending: torch.Tensor | None = None


def packed_rows(
    inputs: Mapping[str, torch.Tensor], batch: MicroBatch, pack_tokens: int, *, share_prompts: bool
) -> tuple[list[PackedRow], Measured]:
    """Pack the completions of TRL's micro-batch that are computed, and measure which share of it these are."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1).cpu()
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).cpu()
    completion = inputs["completion_ids"].shape[1]
    measured: dict[str, Any] = {}
    if batch.skipped is not None:
        mask[batch.skipped.cpu(), -completion:] = 0
        measured["packing/frac_zero_advantage"] = (batch.skipped.sum(), len(batch.skipped))
    rows = pack(ids, mask, completion, pack_tokens, share_prompts=share_prompts)
    measured["packing/share"] = (sum(row.tokens.shape[1] for row in rows), ids.numel())
    return rows, Measured(measured)


def padded_at_once(width: int) -> int:
    return max(1, FAST_TOKENS // width)


def in_order(parts: Sequence[Part], shape: tuple[int, ...]) -> list[Part]:
    """Return the ``parts`` of a micro-batch of (B, C) completions, each with what comes after it."""
    pending, ordered = torch.zeros(shape[0], dtype=torch.bool), [parts[-1]]
    for later, part in zip(parts[:0:-1], parts[-2::-1], strict=True):
        rows = later.packed[0].places // shape[1] if later.padded is None else later.padded.cpu()
        pending = pending.index_fill(0, rows, True)
        ordered.append(replace(part, pending=pending))
    return ordered[::-1]


def fill_pending(logps: torch.Tensor, batch: MicroBatch, part: Part) -> torch.Tensor:
    """Return ``logps: (B, C)`` with those from before the step, as constants, in the rows of later parts."""
    if part.pending is None:
        return logps
    return torch.where(part.pending.to(logps.device)[:, None], batch.before(), logps)


# rows with an advantage of 0


def zero_advantage(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mark the rows to leave out, with an advantage of 0: ``advantages: (B,)``, ``mask: (B, C)`` -> (B,) bool.

    If all have 0, the first one with tokens stays, so that the step still compares engine and trainer.
    """
    has_none = advantages == 0
    rows = torch.arange(len(has_none), device=has_none.device)
    first = (mask.sum(dim=1) > 0).int().argmax()  # a branch in Python would wait for the GPU
    return has_none & ~(has_none.all() & (rows == first))


def fill_skipped(logps: torch.Tensor, entropies: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``logps`` and ``entropies``, (B, C) each, with constants in the skipped rows.

    Log-probabilities become those from before the step, so that ratios are 1; entropies the mean of computed tokens.
    """
    if batch.skipped is None:
        return logps, entropies
    computed, rows = batch.computed(), batch.skipped[:, None]
    mean = (entropies * computed).sum() / computed.sum()
    return torch.where(rows, batch.before(), logps), torch.where(rows, mean, entropies)


# importance weights


def importance_weights(
    logps: torch.Tensor,
    sampled: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    smallest: float | None,
    largest: float | None,
) -> torch.Tensor:
    """Return the importance weights exp(logps - sampled): (B, C), or (B, 1) in the sequence modes.

    A weight outside [``smallest``, ``largest``] is clamped, or set to 0 in the mask modes. A token without a
    log-probability from the engine (NaN) counts as equal on both sides.
    """
    difference = ((logps - sampled) * mask).nan_to_num(nan=0.0)
    if mode in SEQUENCE_MODES:
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = difference.exp()
    low, high = -torch.inf if smallest is None else smallest, torch.inf if largest is None else largest
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0) if mode in MASK_MODES else ratio.clamp(low, high)


def weigh(logps: torch.Tensor, batch: MicroBatch, args: GRPOConfig) -> tuple[torch.Tensor, Measured]:
    """Return the importance weights of the trainer's ``logps: (B, C)``, 1 without correction, and their figures."""
    limits = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    weights = importance_weights(logps, batch.sampled, batch.mask, args.vllm_importance_sampling_mode, *limits)
    mask = batch.computed()
    # completions of an earlier adapter differ by more than rounding: `staleness` and `train.overlap` measure them
    measured = of_weights(weights, mask) if args.overlap else agreement(logps, batch.sampled, mask, weights)
    return weights if args.vllm_importance_sampling_correction else torch.ones_like(weights), measured


def distance(logps: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> Measured:
    """Return by how much trainer and engine differ on the tokens of ``mask``, under TRL's names; all are (B, C)."""
    known = mask.bool() & ~sampled.isnan()
    difference = torch.where(known, (logps - sampled).abs(), 0.0)
    largest = torch.where(known, difference, -torch.inf).max()
    return Measured({MISMATCH: (difference.sum(), known.sum())}, {LARGEST_MISMATCH: largest})


def agreement(logps: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> Measured:
    """Return ``distance`` and ``of_weights`` together; ``weights`` is (B, C) or (B, 1), the others are (B, C)."""
    near, of = distance(logps, sampled, mask), of_weights(weights, mask)
    return Measured({**near.sums, **of.sums}, {**near.largest, **of.largest}, of.smallest)


def of_weights(weights: torch.Tensor, mask: torch.Tensor) -> Measured:
    """Return mean, largest and smallest of the weights; shapes and names are as in ``agreement``."""
    counted = torch.ones_like(weights, dtype=torch.bool) if weights.shape[1] == 1 < mask.shape[1] else mask.bool()
    return Measured(
        sums={f"{WEIGHTS}mean": (torch.where(counted, weights, 0.0).sum(), counted.sum())},
        largest={f"{WEIGHTS}max": torch.where(counted, weights, -torch.inf).max()},
        smallest={f"{WEIGHTS}min": torch.where(counted, weights, torch.inf).min()},
    )


# what a step measures


def sampled_entropy(batch: MicroBatch) -> Measured:
    """Estimate the entropy of the sampling distribution, from all rows, also those that are skipped."""
    mask = batch.mask.bool()
    return Measured({"sampling/entropy": (-torch.where(mask, batch.sampled, 0.0).sum(), mask.sum())})


def token_means(logps: torch.Tensor, entropies: torch.Tensor, batch: MicroBatch, args: GRPOConfig) -> Measured:
    """Return entropy, KL to the reference policy and staleness over the computed tokens; arguments are (B, C)."""
    computed, values = batch.computed(), {"entropy": entropies}
    if batch.reference is not None:
        values["kl"] = reference_kl(logps, batch, args)
    means = {name: (torch.where(computed, value, 0.0).sum(), computed.sum()) for name, value in values.items()}
    return Measured({**means, **staleness(logps, batch, args)})


def reference_kl(logps: torch.Tensor, batch: MicroBatch, args: GRPOConfig) -> torch.Tensor:
    """Return the KL estimate k3 to the reference policy, times the ratio with ``use_bias_correction_kl``: (B, C)."""
    assert batch.reference is not None
    difference = batch.reference - logps
    estimate = difference.exp() - difference - 1
    return estimate * log_ratio(logps, batch, args).exp() if args.use_bias_correction_kl else estimate


def log_ratio(logps: torch.Tensor, batch: MicroBatch, args: GRPOConfig) -> torch.Tensor:
    """Return the log-ratio to the policy before the rollout's first step: (B, C), or (B, 1) over sequences."""
    change = logps - (logps if batch.old is None else batch.old)
    if args.importance_sampling_level == "sequence":
        tokens = batch.mask.sum(dim=-1, keepdim=True).clamp(min=1)
        change = (change * batch.mask).sum(dim=-1, keepdim=True) / tokens
    return change


def staleness(logps: torch.Tensor, batch: MicroBatch, args: GRPOConfig) -> Sums:
    """Measure how far the policy has moved since the first step of its rollout; empty if that serves one step.

    ``STALENESS`` is the distance of ``logps: (B, C)`` from those before that step, or with ``overlap`` from the
    engine's. ``STALE_CLIPPED`` is the share of sampled tokens, or of sequences, that the loss clips.
    """
    before = batch.sampled if args.overlap else batch.old
    if before is None:
        return {}
    change, computed = (logps - before).abs(), batch.computed() & ~before.isnan()
    moved = {STALENESS: (torch.where(computed, change, 0.0).sum(), computed.sum())}
    if batch.old is None or args.loss_type not in CLIPPING_LOSSES:
        return moved
    ratio, advantages = log_ratio(logps, batch, args).exp(), batch.advantages[:, None]  # (B, C or 1), (B, 1)
    counted = torch.ones_like(ratio) if args.importance_sampling_level == "sequence" else batch.mask
    above = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.delta is not None:
        ratio = ratio.clamp(max=args.delta)
    clipped = ((ratio < 1 - args.epsilon) & (advantages < 0)) | ((ratio > 1 + above) & (advantages > 0))
    return {**moved, STALE_CLIPPED: ((clipped * counted).sum(), counted.sum())}
