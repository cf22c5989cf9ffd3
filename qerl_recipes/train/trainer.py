"""Train with GRPO or DAPO on a frozen base: TRL's trainer with QeRL's rollout engine, noise and dynamic sampling.

One step, in the order in which it happens. What is called TRL's is inherited, not written here.

 1. prompts     TRL's sampler repeats each prompt num_generations times, shuffled by epoch: ``_get_train_sampler``
 2. policy      the engine takes over the adapter and the trained norms: ``_begin_rollout``, ``snapshot``
 3. noise       is drawn for this rollout in the engine and, if shared, in the trainer: ``_begin_rollout``
 4. rollout     TRL's ``_generate`` gets completions and their log-probabilities from the engine; with tools, the turns
                after the first are those of ``train.turns``
 5. rewards     TRL's ``_calculate_rewards``; the reward that dynamic sampling compares is kept in ``judged``
 6. advantages  TRL's ``_generate_and_score_completions``; dynamic sampling replaces groups without signal: ``_refill``
 7. importance  weights of trainer over engine, from the loss's own forward where possible: ``loss.weigh``
 8. loss        TRL's ``_compute_loss`` on log-probabilities from packed rows, part by part: ``compute_loss``
 9. optimizer   transformers' training loop; loss and gradient norm are checked first: ``_get_grad_norm``
10. record      a line of metrics.jsonl: ``on_step_end``; now and then a checkpoint: ``_save_checkpoint``

Steps 2 to 6 happen once per rollout, in ``_generate_and_score_completions``. A rollout may serve several steps.
"""

import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ProgressCallback
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator

from qerl_recipes.files.run_state import Run, recorded
from qerl_recipes.hooks import LendsWeights, RolloutEngine, Snapshot, find
from qerl_recipes.model import logprobs, lora, norms
from qerl_recipes.model.loading import blocks_that_keep
from qerl_recipes.model.packing import even_micro_batches, pack
from qerl_recipes.recipe.checks import steps_per_rollout
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.rollout.episodes import check_turns
from qerl_recipes.tasks import rewards
from qerl_recipes.train import checkpoints, divergence, dynamic_sampling, loss, metrics
from qerl_recipes.train.turns import TurnsTrainer

GATHERS = ("gather", "reduce")  # of accelerate, with which TRL's loss joins its metrics over the processes


class QerlGRPOTrainer(TurnsTrainer, TrainerCallback):
    """Train the LoRA adapter on ``model``, which comes from ``qerl_recipes.model.loading.load``.

    It learns from completions that its own policy has sampled. ``noise_mode`` is one of four:

    * ``none``: no noise.
    * ``engine``: noise in the engine alone, importance weights of 1, as in the paper.
    * ``engine_is``: noise in the engine alone, with importance weights.
    * ``both``: the same noise in engine and trainer, so that the policy that samples is the one that learns.

    The mean difference between the log-probabilities of trainer and engine is measured in every mode.

    Where transformers' loop has no method to override, the trainer is its own callback (``on_step_end`` and others).
    """

    _buffered_inputs: Any
    _logs: dict[str, Any]
    _entropy_window_stats: Any

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        reward_funcs: Sequence[Callable[..., Sequence[float | None]]] | None,
        args: GRPOConfig,
        train_dataset: Dataset | None,
        *,
        engine: RolloutEngine,
        run: Run,
        recipe: Mapping[str, Any] | None = None,
        processing_class: PreTrainedTokenizerBase,
        eval_dataset: Dataset | None = None,
        peft_config: PeftConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        rollout_func: Callable[[list[Any], GRPOTrainer], dict[str, Any]] | None = None,
    ) -> None:
        """Set up the trainer; ``train.preflight`` has refused combinations of ``args`` that cannot run.

        ``model`` is the plain base together with ``peft_config``, or a PeftModel to continue from. ``engine`` serves
        the same base. ``run`` and ``recipe`` are what checkpoints record of the run and of its recipe; the default of
        ``recipe`` is ``recorded(args)``. ``tools``, ``environment_factory`` and ``rollout_func`` are TRL's; rewards and
        data may be None where the environments have their own.

        Raises ValueError for tools or environments that this engine or these prompts cannot take.
        """
        if tools or environment_factory:
            check_turns(engine, train_dataset)
        self.steps_per_rollout = steps_per_rollout(args)
        masters = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
        # with use_vllm TRL would start an engine of its own, which merges the adapter; NVFP4 weights cannot take it
        args.use_vllm = False
        try:
            super().__init__(
                model=model,
                reward_funcs=list(reward_funcs or ()),
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                peft_config=peft_config,
                callbacks=callbacks,
                tools=list(tools),
                environment_factory=environment_factory,
                rollout_func=rollout_func,
            )
        finally:
            args.use_vllm = True
        self.use_vllm, self._last_loaded_step, self.vllm_generation = True, -1, engine
        self.aux_loss_enabled = False  # a model's config may ask for the routers' loss, but routers are frozen here
        self.vllm_importance_sampling_correction = True  # always measured; `loss.weigh` decides whether it weighs
        for name, weight in self.model.named_parameters():
            if weight.requires_grad:  # TRL rounds an adapter on bitsandbytes weights to BF16; masters stay fp32
                weight.data = masters.get(name, weight.data).to(weight.device, torch.float32)
        policy = self.accelerator.unwrap_model(self.model)
        if args.train_norms:
            norms.make_trainable(policy, args.noise_targets)
        if self.accelerator.num_processes > 1:
            # DDP would broadcast buffers at every forward, though every process holds the same. NCCL has no 8-bit
            # floats, and with packed rows the processes make different numbers of forwards. Frozen parameters may be
            # lent by the engine, and DDP would write the same bits into them
            frozen = (name for name, weight in self.model.named_parameters() if not weight.requires_grad)
            self.model._ddp_params_and_buffers_to_ignore = [*(name for name, _ in self.model.named_buffers()), *frozen]
        self.loss_settings = loss.LossSettings.of(args, policy)
        self._keeping = blocks_that_keep(policy, args.recompute_layers)
        if args.bf16 or args.fp16:  # the model computes under autocast
            lora.install(policy, lora.ADAPTER)
        self._lora, self._norms = lora.parameters(policy), list(norms.named_norms(policy))
        self._adapter_config = policy.peft_config[lora.ADAPTER].to_dict()
        self._schedule = find("qerl_noise_schedules", args.noise_schedule) if args.noise_mode != "none" else None
        self._noise: tuple[float, int] | None = None  # sigma and rollout of the noise in the trainer's norms
        self.judged, self.frac_reward_zero_std = torch.empty(0), 0.0
        self.stream = dynamic_sampling.PromptStream(len(self.train_dataset), args.seed)
        self.checkpoints = checkpoints.Checkpoints(run, recorded(args) if recipe is None else recipe, args)
        self._began, self._seconds_before, self._versions_before = time.monotonic(), 0.0, 0  # before a resume
        self._is_push_due, self._sampler = False, None
        self._trl_batch: dict[str, Any] = {}  # that of the loss being computed
        self._micro_batch: loss.MicroBatch | None = None  # the same as values; None outside a loss
        self._part: loss.Part | None = None  # the part of it that is being computed
        # log-probabilities and entropies of the parts before, 0 for other completions
        self._known = torch.empty(0), torch.empty(0)
        self._values, self._sums = metrics.StepValues(), metrics.StepSums()  # of the step in progress
        self._rollout_record: dict[str, float] = {}  # what each step's line says of its rollout
        self.metrics_file, self._silent = metrics.MetricsFile(args.output_dir), metrics.SilentRollouts(args)
        self.add_callback(self)
        if self.pop_callback(ProgressCallback) is not None:  # with disable_tqdm there is none
            self.add_callback(metrics.QuietProgress())
        # an engine that starts seeds this process; what the run draws must not depend on when that was
        set_seed(args.seed, device_specific=True)

    def rollout(self) -> int:
        """Return the number of the rollout that the next step learns from; 0 is the first."""
        return self.state.global_step // self.steps_per_rollout

    def rollouts(self) -> int:
        """Return the number of rollouts in the whole run."""
        return math.ceil(self.state.max_steps / self.steps_per_rollout)

    # 1: prompts

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def on_epoch_begin(self, *_: Any, **kwargs: Any) -> None:
        """Let the order of prompts depend on seed and epoch alone, so that a resumed run keeps it.

        TRL's order depends on how many epochs this process has seen.
        """
        if (generator := getattr(self._sampler, "generator", None)) is not None:
            generator.manual_seed(self.args.seed + int((self.state.epoch or 0.0) + 1e-6))

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Return TRL's micro-batch, after evening out the tokens per micro-batch where that cannot change the step."""
        before, window = self._buffered_inputs, self.args.gradient_accumulation_steps
        inputs = super()._prepare_inputs(generation_batch)
        # a loss with a mean or a quantile over the tokens of one micro-batch would change
        per_token_mean = self.loss_type == "bnpo" or self._entropy_bonus_enabled
        is_sum_over_rows = not per_token_mean and self.top_entropy_quantile == 1.0
        is_new = self._buffered_inputs is not before
        if self.loss_settings.pack_tokens and window > 1 and is_new and is_sum_over_rows:
            skips = self.loss_settings.skips_zero_advantage
            self._buffered_inputs = even_micro_batches(self._buffered_inputs, window, skips_zero_advantage=skips)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    # 2 to 6: a rollout, from the policy to advantages

    @property
    def rollout_seconds(self) -> float:
        """Return the seconds of this step that went into generating and scoring."""
        return self._values.rollout_seconds

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        began = time.perf_counter()
        if not self.model.training:
            return self.score(inputs)
        self._begin_rollout()
        batch = self.score(inputs)
        if self.args.dynamic_sampling:
            batch = self._refill(batch)
        self._values.rollout_seconds += time.perf_counter() - began
        return batch

    def snapshot(self) -> Snapshot:
        """Return the adapter and the trained norms as they are now; adapter tensors are references, not copies."""
        return Snapshot(dict(self._lora), self._adapter_config, norms.trained_norms(self._norms))

    def _begin_rollout(self) -> None:
        """Give the engine the adapter and new noise, in one go; set the same noise in the trainer if it is shared."""
        rollout, sigma = self.rollout(), None
        if self._schedule is not None:
            ends = (self.args.sigma_start, self.args.sigma_end, self.args.num_stages)
            sigma = self._schedule(rollout, self.rollouts(), *ends)
        noisy_norms = self.vllm_generation.begin(rollout, sigma)
        self.starts.open(rollout)
        self._last_loaded_step = self.state.global_step
        self._noise = (sigma, rollout) if sigma is not None and self.args.noise_mode == "both" else None
        self._set_noise()
        record = {"sigma": float(sigma or 0.0), "adapter_version": self._adapter_version()}
        self._rollout_record = {**record, "noisy_norms": noisy_norms if sigma else 0}
        for name, value in self._rollout_record.items():
            self._metrics["train"]["noise/noisy_norms" if name == "noisy_norms" else name].append(value)

    def _set_noise(self) -> None:
        """Apply this rollout's noise to the trainer's norms, or clear it where the trainer has none."""
        if self._noise is None:
            norms.clear_noise(self.model)
        else:
            sigma, rollout = self._noise
            assert self.args.noise_seed is not None  # GRPOConfig settles it
            norms.set_noise(self.model, sigma, self.args.noise_seed, rollout, self.args.noise_targets)

    def score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the engine's completions for ``inputs``, with rewards and advantages; ``_refill`` calls this again."""
        # in training TRL would compute every log-probability a second time, to weigh and measure once per rollout;
        # `compute_loss` does both in each step
        self.vllm_importance_sampling_correction = not self.model.training
        try:
            scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction = True
        logged = self._metrics["train" if self.model.training else "eval"]
        logged[metrics.ZERO_STD][-1] = self.frac_reward_zero_std
        self._note_ends(scored, logged)
        return scored

    def _refill(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return ``batch`` with its groups without signal replaced, and log what that took."""
        accelerator, tokens_before = self.accelerator, self.vllm_generation.tokens
        refilled = dynamic_sampling.refill(
            batch,
            self.judged,
            self.stream,
            self._score_fresh,
            gather_object,
            num_generations=self.num_generations,
            max_rounds=self.args.dynamic_sampling_max_rounds,
            pad_token_id=self._tokenizer.pad_token_id,
            rank=accelerator.process_index,
            ranks=accelerator.num_processes,
        )
        if self.log_completions:
            dynamic_sampling.update_table(self._logs, refilled, self.num_generations)
        extra = torch.tensor([self.vllm_generation.tokens - tokens_before], device=accelerator.device)
        counts = {**refilled.counts, "extra_tokens": int(accelerator.gather(extra).sum())}
        for name, count in counts.items():
            self._metrics["train"][f"dynamic_sampling/{name}"].append(count)
        items = accelerator.gather(loss.mask_of(refilled.batch).sum()).sum()
        return {**refilled.batch, "num_items_in_batch": items}

    def _score_fresh(self, rows: Sequence[int]) -> dynamic_sampling.Scored:
        """Return completions of these rows of the training set, scored without a trace in TRL's metrics and table.

        Metrics describe the prompts in the data set's order, without the bias of groups picked because their rewards
        differ.
        """
        inputs = [dict(self.train_dataset[row]) for row in rows for _ in range(self.num_generations)]
        logged, table = self._metrics["train"], self._logs
        self._metrics["train"], self._logs = defaultdict(list), copy.deepcopy(table)
        try:
            batch = self.score(inputs)
            return dynamic_sampling.Scored(batch, self.judged, self._logs)
        finally:
            self._metrics["train"], self._logs = logged, table

    def _calculate_rewards(self, inputs: Any, prompts: Any, *others: Any) -> torch.Tensor:
        per_function = super()._calculate_rewards(inputs, prompts, *others)  # (completions of all ranks, functions)
        metric, names = self.args.dynamic_sampling_metric, self.reward_func_names
        rewards.refuse_infinite(per_function, names, lambda: gather_object(list(prompts)))
        self.judged = dynamic_sampling.judged_by(per_function, self.reward_weights, names, metric)
        size = self.num_generations if self.model.training else self.num_generations_eval
        is_summed = self.multi_objective_aggregation == "sum_then_normalize"
        self.frac_reward_zero_std = metrics.frac_reward_zero_std(per_function, self.reward_weights, size, is_summed)
        return per_function

    # 7 to 9: importance, loss, optimizer

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
            parts = [loss.Part(padded=rows) for rows in loss.padded_rows(inputs, settings.splits)]
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

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        local_loss = torch.as_tensor(self._values.loss, dtype=torch.float32, device=self.accelerator.device)
        self._values.loss, self._values.grad_norm = float(self.accelerator.gather(local_loss).mean()), float(norm)
        step, is_half = self.state.global_step + 1, self.loss_settings.half is not None
        divergence.check_step(step, self._values.loss, self._values.grad_norm, self.args, is_half=is_half)
        return norm

    # 10: record

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Keep checkpoints between rollouts, and warn of noise that will not reach its end."""
        if self.args.save_steps < 1:  # a share of all steps; transformers' number for it may be in mid-rollout
            self.state.save_steps = math.ceil(self.state.save_steps / self.steps_per_rollout) * self.steps_per_rollout
        if self._schedule is not None and self.is_world_process_zero():
            metrics.warn_if_noise_ends_early(self._schedule, self.rollouts(), self.args)

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        """Begin to note the values of a step."""
        logged = {name: len(values) for name, values in self._metrics["train"].items()}
        self._values = metrics.StepValues(time.perf_counter(), self._get_learning_rate(), logged)

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        """Put the step's own figures into TRL's log, and write its line of metrics.jsonl."""
        logged, values, engine = self._metrics["train"], self._values, self.vllm_generation
        figures = self._sums.take(self.accelerator.gather, self.accelerator.device)
        for name in logged.keys() & {*figures, *metrics.OF_TOKENS}:  # TRL's own are 0 if no token was computed
            del logged[name][values.logged.get(name, 0) :]
        for name, value in figures.items():
            logged[name].append(value)
        tokens = int(values.tokens)  # waits for the GPU, so that the time is of the whole step
        seconds = time.perf_counter() - values.began
        if values.rollout_seconds:
            logged["rollout_tokens_per_s"].append(engine.tokens / max(engine.seconds, 1e-9))
            if self.tools:
                logged["tool_seconds"].append(values.tool_seconds)
        logged["train_tokens_per_s"].append(tokens / (seconds - values.rollout_seconds))
        if self.is_world_process_zero():
            new = {name: numbers[values.logged.get(name, 0) :] for name, numbers in logged.items()}
            step = {"step": self.state.global_step, "epoch": self.state.epoch, "loss": values.loss}
            step |= {"grad_norm": values.grad_norm, "learning_rate": values.learning_rate, "step_seconds": seconds}
            record = {**self._rollout_record, **step, **metrics.named(new)}
            self.metrics_file.append(record)
            self._silent.add(record)

    def on_log(self, *_: Any, logs: Mapping[str, float] | None = None, **kwargs: Any) -> None:
        """Write a line of metrics.jsonl for an evaluation on held-out problems."""
        figures = metrics.of_evaluation(logs or {})
        if figures and self.is_world_process_zero():
            problems = {f"{metrics.EVALUATION}problems": len(self.eval_dataset)}
            self.metrics_file.append({"step": self.state.global_step, **problems, **figures})

    # before and after the steps

    def train(self, resume: checkpoints.ResumePoint | None = None, **kwargs: Any) -> Any:
        """Train, or go on from the checkpoint ``resume``, which ``checkpoints.resume_point`` has returned.

        What was saved after that checkpoint is moved aside, and metrics.jsonl is cut back to its step. A checkpoint of
        the last step is loaded and nothing is trained; transformers would train one step more.
        """
        self._began, folder, step = time.monotonic(), None, 0
        if resume is not None:
            folder, state = str(resume.folder), resume.state
            step, self.stream.position, self._seconds_before = state.step, state.stream, state.seconds
            self._versions_before = state.adapter_version - self.vllm_generation.version
            self.args.eval_on_start = False  # the run has started before
        if self.is_world_process_zero():
            if resume is not None:
                self.checkpoints.leave_later(step, self.metrics_file.path)
            self.metrics_file.restart(step)
        if resume is not None and resume.is_finished:
            self._load_from_checkpoint(str(resume.folder))
            self.state = TrainerState.load_from_json(str(resume.folder / TRAINER_STATE_NAME))
            return None
        return super().train(resume_from_checkpoint=folder, **kwargs)

    def _adapter_version(self) -> int:
        """Return how many adapters the run has installed in the engine, those before a resume included."""
        return self._versions_before + self.vllm_generation.version

    def progress(self) -> checkpoints.Progress:
        """Return how far the run has got, as a checkpoint would record it now."""
        seconds = round(self._seconds_before + time.monotonic() - self._began, 1)
        step, position = self.state.global_step, self.stream.position
        return checkpoints.Progress(step, self.rollout(), position, self._adapter_version(), seconds)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the reward on held-out prompts as TRL does, with the noise off in engine and trainer."""
        self.vllm_generation.begin_evaluation()
        self.starts.open("evaluation")
        self._last_loaded_step = self.state.global_step
        norms.clear_noise(self.model)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self._set_noise()

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter to ``folder``, whole or not at all, in place of an earlier one."""
        self._check_weights()
        policy = self.accelerator.unwrap_model(self.model)
        self.checkpoints.save_adapter(Path(folder), self.progress(), policy, self._tokenizer)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the adapter's card is written with the adapter, and TRL's would describe a whole model."""

    def _check_weights(self) -> None:
        """Raise if a trained weight is not finite, or if a frozen weight that the engine lent has changed."""
        trained = ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)
        is_half = self.loss_settings.half is not None
        divergence.check_weights(self.state.global_step, trained, self.args, is_half=is_half)
        if isinstance(self.vllm_generation, LendsWeights):
            self.vllm_generation.check_weights()

    def _get_output_dir(self, trial: Any) -> str:
        return self.checkpoints.folder(super()._get_output_dir(trial))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder, policy = Path(output_dir or self.args.output_dir), self.accelerator.unwrap_model(self.model)
        self.checkpoints.write_adapter(folder, policy, self._tokenizer)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step, write = self.state.global_step, super()._save_checkpoint
        if step % self.steps_per_rollout and step < self.state.max_steps:
            raise ValueError(
                f"step {step} is in the middle of a rollout, each of which serves {self.steps_per_rollout} steps; "
                "use a multiple of that as save_steps"
            )
        self._check_weights()
        run_folder = Path(super()._get_output_dir(trial))
        folder = self.checkpoints.save(lambda: write(model, trial), run_folder, self.progress())
        if self._is_push_due:
            self._is_push_due = False
            self.checkpoints.prepare_push(folder)
            super()._push_from_checkpoint(str(folder))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Put the push off until the checkpoint folder has its final name; ``_save_checkpoint`` then starts it."""
        self._is_push_due = True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoints.load_adapter(self.accelerator.unwrap_model(self.model), resume_from_checkpoint)
