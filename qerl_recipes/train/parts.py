"""Let TRL compute the loss of a micro-batch part by part, on packed rows or padded ones.

Each part has a forward and a backward of its own. TRL computes the loss of the whole micro-batch for each of them, with
the log-probabilities of other completions as constants. So the parts' gradients add up to the whole's, whatever TRL
divides by. With the last part all numbers are known: loss and metrics are the whole's, too.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator

from qerl_recipes.model import logprobs
from qerl_recipes.model.packing import even_micro_batches, pack
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.recipe.keys import means_of_a_micro_batch
from qerl_recipes.train import loss, metrics

GATHERS = ("gather", "reduce")  # of accelerate, with which TRL's loss joins its metrics over the processes


class PartsTrainer(GRPOTrainer):
    """Compute the loss of a micro-batch in parts, with importance weights from the loss's own forward."""

    args: GRPOConfig
    loss_settings: loss.LossSettings
    _keeping: Sequence[torch.nn.Module]  # the blocks that keep their activations
    _values: metrics.StepValues
    _sums: metrics.StepSums
    _buffered_inputs: Any
    _entropy_window_stats: Any
    _trl_batch: dict[str, Any]  # that of the loss being computed
    _micro_batch: loss.MicroBatch | None = None  # the same as values; None outside a loss
    _part: loss.Part | None = None  # the part of it that is being computed
    # log-probabilities and entropies of the parts before, 0 for other completions
    _known: tuple[torch.Tensor, torch.Tensor]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Return TRL's micro-batch, after evening out the tokens per micro-batch where that cannot change the step."""
        before, window = self._buffered_inputs, self.args.gradient_accumulation_steps
        inputs = super()._prepare_inputs(generation_batch)
        is_sum_over_rows = not any(means_of_a_micro_batch(vars(self.args)))  # another loss would change
        is_new = self._buffered_inputs is not before
        if self.loss_settings.pack_tokens and window > 1 and is_new and is_sum_over_rows:
            skips = self.loss_settings.skips_zero_advantage
            self._buffered_inputs = even_micro_batches(self._buffered_inputs, window, skips_zero_advantage=skips)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss of TRL's micro-batch, of which the last part has yet to be differentiated."""
        for block in self._keeping:  # each rollout and the start of training turn checkpointing on in all blocks
            block.gradient_checkpointing = False
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        skips = self.loss_settings.skips_zero_advantage
        batch = self._micro_batch = loss.MicroBatch.of(inputs, skips_zero_advantage=skips)
        self._trl_batch = dict(inputs)  # TRL reads the importance weights from it after the forward
        self._sums.add(loss.sampled_entropy(batch))
        self._known = torch.zeros_like(batch.sampled), torch.zeros_like(batch.sampled)
        try:
            if batch.old is not None:  # the rollout serves several steps; these are from before the first
                self._sums.add(self._weigh(batch.old))
            *earlier, last = self._parts(inputs, batch)
            for self._part in earlier:
                with self._gradient_alone(model):
                    self.accelerator.backward(super().compute_loss(model, self._trl_batch, *args, **kwargs))
            self._part = last
            micro_loss = super().compute_loss(model, self._trl_batch, *args, **kwargs)
        finally:
            self._micro_batch, self._part, self._trl_batch = None, None, {}
        self._values.add(micro_loss, batch.computed_tokens())
        return micro_loss

    def _parts(self, inputs: dict[str, Any], batch: loss.MicroBatch) -> list[loss.Part]:
        """Split TRL's micro-batch into parts; other processes may have another number."""
        settings = self.loss_settings
        if settings.pack_tokens:
            shares = logprobs.shares_prompts(self.accelerator.unwrap_model(self.model))
            rows, measured = loss.packed_rows(inputs, batch, settings.pack_tokens, share_prompts=shares)
            self._sums.add(measured)
            parts = [loss.Part(packed=[row]) for row in rows] if settings.splits else [loss.Part(packed=rows)]
        else:
            ids = inputs["prompt_ids"]  # a single part, unless the settings split it
            width = ids.shape[1] + inputs["completion_ids"].shape[1]
            size = loss.padded_at_once(width) if settings.splits else len(ids)
            parts = [loss.Part(padded=rows) for rows in torch.arange(len(ids), device=ids.device).split(size)]
        return loss.in_order(parts, batch.mask.shape)

    @contextmanager
    def _gradient_alone(self, model: Any) -> Iterator[None]:
        """Let TRL's loss of a part, and its backward, leave nothing but the gradient of this process."""
        logged, entropy_window = self._metrics["train"], self._entropy_window_stats
        accelerator, state = self.accelerator, self.accelerator.gradient_state
        is_last_micro_batch = state.sync_gradients
        self._metrics["train"] = defaultdict(list)
        state._set_sync_gradients(False)  # TRL adapts its entropy coefficient where this is True
        for name in GATHERS:  # for metrics, in as many parts as this process has
            setattr(accelerator, name, lambda own, **_: own)
        try:
            with accelerator.no_sync(model):
                yield
        finally:
            for name in GATHERS:
                delattr(accelerator, name)
            self._metrics["train"], self._entropy_window_stats = logged, entropy_window
            state._set_sync_gradients(is_last_micro_batch)

    def _weigh(self, logps: torch.Tensor) -> loss.Measured:
        """Give TRL's batch the importance weights that follow from the trainer's ``logps: (B, C)``; measure them."""
        assert self._micro_batch is not None
        weights, measured = loss.weigh(logps, self._micro_batch, self.args)
        self._trl_batch["importance_sampling_ratio"] = weights
        return measured

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
        batch, part, half = self._micro_batch, self._part, self.loss_settings.half  # None outside of a loss's forward
        with nullcontext() if half is None or batch is None else half.first_watched():
            forward = self._packed_forward if self.loss_settings.pack_tokens else self._padded_forward
            arguments = (input_ids, attention_mask, logits_to_keep)
            logps, entropies = forward(model, *arguments, batch_size, compute_entropy, **others)
        if batch is not None and part is not None:
            logps, entropies = logps + self._known[0], entropies + self._known[1]
            self._known = logps.detach(), entropies.detach()
            logps, entropies = loss.fill_skipped(logps, entropies, batch)
            logps = loss.fill_pending(logps, batch, part)
            if half is not None:
                logps, entropies = half.scaled(logps, entropies)
            compared = loss.Measured() if batch.old is not None else self._weigh(logps.detach())
            if part.pending is None:
                self._sums.add(compared)
                self._sums.add(loss.token_means(logps.detach(), entropies.detach(), batch, self.args))
        return logps, entropies if compute_entropy else None, None

    def _packed_forward(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion: int, *_: Any, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies, (B, C) each, of the part in progress or of all completions."""
        unwrapped, half = self.accelerator.unwrap_model(model), self.loss_settings.half
        if self._part is not None:
            rows = list(self._part.packed)
        else:
            shares, size = logprobs.shares_prompts(unwrapped), self.loss_settings.pack_tokens
            rows = pack(input_ids.cpu(), attention_mask.cpu(), completion, size, share_prompts=shares)
        return logprobs.completion_logprobs(
            model,
            unwrapped,
            rows,
            (len(input_ids), completion),
            self.temperature,
            self.accelerator.autocast if half is None else half.autocast,
            has_entropy_gradient=self._entropy_bonus_enabled,
        )

    def _padded_forward(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        completion: int,
        batch_size: int | None,
        compute_entropy: bool,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what ``_packed_forward`` does, by TRL's own forward; accelerate has put its autocast around it."""
        half, padded = self.loss_settings.half, super()._get_per_token_logps_and_entropies
        rows = None if self._part is None else self._part.padded
        if batch_size is not None and self.loss_settings.splits:  # a rollout is scored, all of it in one call
            batch_size = min(batch_size, loss.padded_at_once(input_ids.shape[1]))
        if rows is not None:
            input_ids, attention_mask = input_ids[rows], attention_mask[rows]
        with nullcontext() if half is None else half.autocast():
            values = padded(model, input_ids, attention_mask, completion, batch_size, compute_entropy, **others)[:2]
        if rows is None:
            return values
        logps, entropies = (torch.zeros_like(self._known[0]).index_copy(0, rows, value) for value in values)
        return logps, entropies
