"""Where the trainer's log-probabilities come from: packed rows instead of TRL's padded batches."""

import warnings
from typing import Any

import torch
from trl.extras.profiling import profiling_decorator

from qerl_recipes import logprobs
from qerl_recipes.checkpointing import Checkpointing
from qerl_recipes.packing import even_micro_batches, pack


class PackedTraining(Checkpointing):
    """TRL's GRPO trainer with checkpoints and with ``args.pack_tokens``; the loss stays TRL's."""

    _pack_tokens = 0  # of a row; 0 is TRL's padded batch
    _buffered_inputs: Any

    def _prepare_packing(self) -> None:
        """Pack if the recipe asks for it; warns with the reason where the model does not allow it."""
        if not self.args.pack_tokens:
            return
        reason = logprobs.prepare(self.accelerator.unwrap_model(self.model))
        if reason is None:
            self._pack_tokens = self.args.pack_tokens
        else:
            warnings.warn(f"pack_tokens is without effect, the batches stay padded: {reason}", stacklevel=3)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's micro-batch, from micro-batches of about equal numbers of tokens where that cannot change the step."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._pack_tokens and self._buffered_inputs is not before and self._step_is_a_sum_over_rows():
            window = self.args.gradient_accumulation_steps
            self._buffered_inputs = even_micro_batches(self._buffered_inputs, window)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _step_is_a_sum_over_rows(self) -> bool:
        """Not where a mean or a quantile over the tokens of one micro-batch is in the loss."""
        per_token_mean = self.loss_type == "bnpo" or self._entropy_bonus_enabled
        return not per_token_mean and self.top_entropy_quantile == 1.0

    @profiling_decorator
    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's three results, from packed rows; TRL's own way on the padded batch where packing is off.

        ``input_ids`` and ``attention_mask``: (B, P + C) with C = ``logits_to_keep`` -> (B, C) and (B, C) or None.
        """
        if not self._pack_tokens:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **others
            )
        unwrapped = self.accelerator.unwrap_model(model)
        rows = pack(
            input_ids.cpu(),
            attention_mask.cpu(),
            logits_to_keep,
            self._pack_tokens,
            share_prompts=logprobs.shares_prompts(unwrapped),
        )
        if self.model.training and torch.is_grad_enabled():
            computed = sum(row.tokens.shape[1] for row in rows)
            self._metrics["train"]["packing/share"].append(computed / input_ids.numel())
        logps, entropies = logprobs.completion_logprobs(
            model,
            unwrapped,
            rows,
            (len(input_ids), logits_to_keep),
            self.temperature,
            self.accelerator.autocast,
        )
        return logps, entropies if compute_entropy else None, None
