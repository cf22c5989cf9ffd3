"""The forward pass of the loss: it computes a micro-batch's log-probabilities from packed rows.

The step's metrics of these log-probabilities are collected on the way.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel

from qerl_recipes.model import logprobs
from qerl_recipes.model.packing import pack
from qerl_recipes.recipe.checks import needs_every_completion
from qerl_recipes.train import importance, silent_rows, staleness
from qerl_recipes.train.half_precision import HalfPrecision
from qerl_recipes.train.step_metrics import StepMeans

if TYPE_CHECKING:
    from qerl_recipes.train.trainer import QerlGRPOTrainer

Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # as TRL: log-probabilities, entropies, loss


class LossForward:
    """The loss's forward pass for one trainer; create it once the policy has its adapter and trainable norms.

    ``pack_tokens`` is the number of tokens of a packed row; 0 keeps TRL's padded batch. ``half`` holds what a float16
    model needs, and is None for others. ``skips_silent_rows`` says whether completions with an advantage of 0 are left
    out.
    """

    def __init__(self, trainer: "QerlGRPOTrainer", policy: PeftModel) -> None:
        self._trainer, args = trainer, trainer.args
        # with the correction off in the recipe the weights are 1, and the difference is measured all the same
        self._weighs = bool(args.vllm_importance_sampling_correction)
        self._differences, self._means = importance.Differences(), StepMeans()
        self._inputs: dict[str, Any] | None = None  # the micro-batch whose loss is being computed
        self.pack_tokens = args.pack_tokens or 0
        is_half = policy.get_output_embeddings().weight.dtype == torch.float16
        self.half = HalfPrecision(policy, args) if is_half else None
        with nullcontext() if self.half is None else self.half.watched():
            reason = logprobs.prepare(policy) if self.pack_tokens else None
        if reason is not None:
            warnings.warn(f"pack_tokens is without effect, the batches stay padded: {reason}", stacklevel=3)
            self.pack_tokens = 0
        may_skip = self.pack_tokens > 0 and needs_every_completion(args) is None
        self.skips_silent_rows = may_skip and args.skip_silent_rows is not False

    @contextmanager
    def learning_from(self, micro_batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Open the block in which the loss of ``micro_batch`` is computed; yield the inputs that TRL gets.

        They hold the importance weights. Where a rollout serves one step, ``log_probabilities`` adds these later, from
        the loss's own forward.
        """
        inputs = self._inputs = dict(micro_batch)
        # estimates the entropy of the sampling distribution, from all rows, also those that are left out
        sampled, mask = inputs["sampling_per_token_logps"], importance.mask_of(inputs).bool()
        self._means.add("sampling/entropy", -torch.where(mask, sampled, 0.0).sum(), mask.sum())
        if self.skips_silent_rows:
            inputs["left_out"] = silent_rows.silent(inputs)
        if "old_per_token_logps" in inputs:  # the rollout serves several steps; these are from before the first
            inputs["importance_sampling_ratio"] = self.importance(inputs["old_per_token_logps"], inputs)
        try:
            yield inputs
        finally:
            self._inputs = None

    def log_probabilities(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *,
        wants_entropy: bool,
        padded: Callable[[], Results],
    ) -> Results:
        """Return TRL's three results from packed rows, or from ``padded``, TRL's own forward, where packing is off.

        ``input_ids`` and ``attention_mask`` are (B, P + C), with C = ``logits_to_keep``. The log-probabilities are
        (B, C), the entropies (B, C) or None.
        """
        inputs = self._inputs  # None if this is not the loss's own forward
        watched = nullcontext() if self.half is None or inputs is None else self.half.first_watched()
        with watched:
            if self.pack_tokens:
                results = self._packed(model, input_ids, attention_mask, logits_to_keep, wants_entropy)
            else:  # accelerate has put bfloat16's autocast around the model
                with nullcontext() if self.half is None else self.half.autocast():
                    results = padded()
        if self.half is not None and inputs is not None:
            results = *self.half.scaled(results[0], results[1]), results[2]
        if inputs is not None and "importance_sampling_ratio" not in inputs:
            inputs["importance_sampling_ratio"] = self.importance(results[0].detach(), inputs)
        if inputs is not None:
            for name, (total, number) in staleness.measured(results[0].detach(), inputs, self._trainer.args).items():
                self._means.add(name, total, number)
        if inputs is not None and results[1] is not None:
            args, computed = self._trainer.args, silent_rows.computed(inputs)
            kl = importance.reference_kl(results[0].detach(), inputs, args)
            for name, values in {"entropy": results[1].detach(), **kl}.items():
                self._means.add(name, torch.where(computed, values, 0.0).sum(), computed.sum())
        return results

    def _packed(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion: int, wants_entropy: bool
    ) -> Results:
        entropies: torch.Tensor | None
        trainer, inputs = self._trainer, self._inputs
        autocast = trainer.accelerator.autocast if self.half is None else self.half.autocast
        left_out = inputs.get("left_out") if inputs is not None else None
        unwrapped = trainer.accelerator.unwrap_model(model)
        sharing = logprobs.shares_prompts(unwrapped)
        ids, mask = input_ids.cpu(), attention_mask.cpu()
        if left_out is not None:
            mask[left_out.cpu(), -completion:] = 0
        rows = pack(ids, mask, completion, self.pack_tokens, share_prompts=sharing)
        if inputs is not None:
            self._means.add("packing/share", sum(row.tokens.shape[1] for row in rows), input_ids.numel())
        shape, bonus = (len(input_ids), completion), trainer._entropy_bonus_enabled
        logps, entropies = logprobs.completion_logprobs(
            model, unwrapped, rows, shape, trainer.temperature, autocast, has_entropy_gradient=bonus
        )
        if inputs is not None and left_out is not None:
            self._means.add("packing/silent_rows", left_out.sum(), len(left_out))
            logps, entropies = silent_rows.with_constants(logps, entropies, inputs, left_out)
        return logps, entropies if wants_entropy else None, None

    def importance(self, logps: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the importance weights of a micro-batch, and note them and the logprob differences for the log.

        ``logps: (B, C)`` are the trainer's log-probabilities. With the correction off in the recipe the weights are 1.
        """
        trainer, sampled, mask = self._trainer, inputs["sampling_per_token_logps"], importance.mask_of(inputs)
        limits = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        ratio = importance.weights(logps, sampled, mask, trainer.vllm_importance_sampling_mode, *limits)
        self._differences.add(logps, sampled, silent_rows.computed(inputs), ratio)
        return ratio if self._weighs else torch.ones_like(ratio)

    def take_measured(self) -> dict[str, float]:
        """Return the ending step's metrics under TRL's names; every process must call this."""
        accelerator = self._trainer.accelerator
        return {
            **self._differences.take(accelerator.gather),
            **self._means.take(accelerator.gather, accelerator.device),
        }
