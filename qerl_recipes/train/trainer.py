"""GRPO and DAPO on a frozen base: TRL's trainer with QeRL's rollout engine, noise and dynamic sampling.

One step, in the order in which it happens. What is called TRL's is inherited, not written here.

 1. prompts     TRL's sampler repeats each prompt num_generations times, shuffled by epoch: ``_get_train_sampler``
 2. policy      the engine takes over the adapter and the trained norms: ``_begin_rollout``, ``snapshot``
 3. noise       is drawn for this rollout in the engine and, if shared, in the trainer: ``_begin_rollout``
 4. rollout     TRL's ``_generate`` gets completions and their log-probabilities from the engine
 5. rewards     TRL's ``_calculate_rewards``; the reward that dynamic sampling compares is kept in ``judged``
 6. advantages  TRL's ``_generate_and_score_completions``; dynamic sampling replaces groups without signal: ``refill``
 7. importance  weights of trainer over engine, from the loss's own forward where possible: ``LossForward``
 8. loss        TRL's ``_compute_loss`` on log-probabilities from packed rows: ``LossForward.log_probabilities``
 9. optimizer   transformers' training loop; loss and gradient norm are checked first: ``_get_grad_norm``
10. record      ``StepRecorder`` writes a line of metrics.jsonl; ``RunFiles`` saves a checkpoint: ``_save_checkpoint``

Steps 2 to 6 happen once per rollout, in ``_generate_and_score_completions``. A rollout may serve several steps.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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

from qerl_recipes.hooks import RolloutEngine, Snapshot, find
from qerl_recipes.model import fused_lora, norms
from qerl_recipes.model.loading import blocks_that_keep
from qerl_recipes.model.packing import even_micro_batches
from qerl_recipes.recipe.checks import steps_per_rollout
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.tasks import rewards
from qerl_recipes.train import divergence, dynamic_sampling, rollout_measures, saving
from qerl_recipes.train.loss_forward import LossForward
from qerl_recipes.train.step_metrics import QuietProgress, StepRecorder


class QerlGRPOTrainer(GRPOTrainer):
    """A trainer of the LoRA adapter on ``model``, which comes from ``qerl_recipes.model.loading.load``.

    It learns from completions that its own policy has sampled. ``noise_mode`` is one of four:

    * ``none``: no noise.
    * ``rollout``: noise in the engine alone, importance weights of 1, as in the paper.
    * ``corrected``: noise in the engine alone, with importance weights.
    * ``shared``: the same noise in engine and trainer, so that the policy that samples is the one that learns.

    The mean difference between the log-probabilities of trainer and engine is measured in every mode.
    """

    args: GRPOConfig
    vllm_generation: RolloutEngine  # type: ignore[assignment]  # TRL's name for its own engine
    _buffered_inputs: Any
    _logs: dict[str, Any]

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        reward_funcs: Sequence[Callable[..., Sequence[float | None]]],
        args: GRPOConfig,
        train_dataset: Dataset,
        *,
        engine: RolloutEngine,
        base: str | Path,
        base_name: str | None = None,
        recipe: Mapping[str, Any] | None = None,
        start: str | None = None,
        processing_class: PreTrainedTokenizerBase,
        eval_dataset: Dataset | None = None,
        peft_config: PeftConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        """Set up the trainer; ``train.preflight`` has refused combinations of ``args`` that cannot run.

        ``model`` is the plain base together with ``peft_config``, or a PeftModel to continue from. ``base`` is the
        checkpoint folder that ``model`` was loaded from and that ``engine`` serves. ``base_name`` is its name in
        checkpoints and model card; the default is the folder. ``recipe`` is what checkpoints record of the recipe;
        the default is ``binding.recorded(args)``. ``start`` is the hash of the adapter that training begins from.
        """
        self.steps_per_rollout = steps_per_rollout(args)
        masters = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
        # with use_vllm TRL would start an engine of its own, which merges the adapter; NVFP4 weights cannot take it
        args.use_vllm = False
        try:
            super().__init__(
                model=model,
                reward_funcs=list(reward_funcs),
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                peft_config=peft_config,
                callbacks=callbacks,
            )
        finally:
            args.use_vllm = True
        self.use_vllm, self._last_loaded_step, self.vllm_generation = True, -1, engine
        self.aux_loss_enabled = False  # a model's config may ask for the routers' loss, but routers are frozen here
        self.vllm_importance_sampling_correction = True  # always measured; LossForward decides whether it weighs
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
        self.loss_forward = LossForward(self, policy)
        self._keeping = blocks_that_keep(policy, args.checkpointed_layers)
        if args.bf16 or args.fp16:  # the model computes under autocast
            fused_lora.install(policy, fused_lora.ADAPTER)
        self._lora, self._norms = fused_lora.parameters(policy), list(norms.named_norms(policy))
        self._adapter_config = policy.peft_config[fused_lora.ADAPTER].to_dict()
        self._schedule = find("qerl_noise_schedules", args.noise_schedule) if args.noise_mode != "none" else None
        self._noise: tuple[float, int] | None = None  # sigma and rollout of the noise in the trainer's norms
        self.judged, self.equal_groups = torch.empty(0), 0.0
        self.stream = dynamic_sampling.PromptStream(len(train_dataset), args.seed)
        self.generation_seconds: float = 0.0
        self.files = saving.RunFiles(self, base, base_name, recipe, start)
        self._order, self.recorder = saving.EpochOrder(), StepRecorder(self)
        self.add_callback(self._order)
        self.add_callback(self.recorder)
        if self.pop_callback(ProgressCallback) is not None:  # with disable_tqdm there is none
            self.add_callback(QuietProgress())
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
        self._order.sampler = super()._get_train_sampler(dataset)
        return self._order.sampler

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Return TRL's micro-batch, after evening out the tokens per micro-batch where that cannot change the step."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        # a loss with a mean or a quantile over the tokens of one micro-batch would change
        per_token_mean = self.loss_type == "bnpo" or self._entropy_bonus_enabled
        is_sum_over_rows = not per_token_mean and self.top_entropy_quantile == 1.0
        if self.loss_forward.pack_tokens and self._buffered_inputs is not before and is_sum_over_rows:
            window, skips = self.args.gradient_accumulation_steps, self.loss_forward.skips_silent_rows
            self._buffered_inputs = even_micro_batches(self._buffered_inputs, window, skips_silent_rows=skips)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    # 2 to 6: a rollout, from the policy to advantages

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        began = time.perf_counter()
        if not self.model.training:
            return self.score(inputs)
        self._begin_rollout()
        batch = self.score(inputs)
        if self.args.dynamic_sampling:
            batch = dynamic_sampling.refill(self, batch, len(inputs) // self.num_generations)
        self.generation_seconds += time.perf_counter() - began
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
        touched = self.vllm_generation.begin(rollout, sigma)
        self._last_loaded_step = self.state.global_step
        self._noise = (sigma, rollout) if sigma is not None and self.args.noise_mode == "shared" else None
        self._set_noise()
        metrics = self._metrics["train"]
        metrics["sigma"].append(sigma or 0.0)
        metrics["adapter_version"].append(self.files.adapter_version())
        metrics["noise/touched_norms"].append(touched if sigma else 0)

    def _set_noise(self) -> None:
        """Apply this rollout's noise to the trainer's norms, or clear it where the trainer has none."""
        if self._noise is None:
            norms.clear_noise(self.model)
        else:
            sigma, rollout = self._noise
            assert self.args.noise_seed is not None  # GRPOConfig settles it
            norms.set_noise(self.model, sigma, self.args.noise_seed, rollout, self.args.noise_targets)

    def score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the engine's completions for ``inputs``, with rewards and advantages; ``refill`` calls this again."""
        # in training TRL would compute every log-probability a second time, to weigh and measure once per rollout;
        # `compute_loss` does both in each step
        self.vllm_importance_sampling_correction = not self.model.training
        try:
            scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction = True
        rollout_measures.correct(self, scored)
        return scored

    def _calculate_rewards(self, inputs: Any, prompts: Any, *others: Any) -> torch.Tensor:
        per_function = super()._calculate_rewards(inputs, prompts, *others)  # (completions of all ranks, functions)
        metric, names = self.args.dynamic_sampling_metric, self.reward_func_names
        rewards.refuse_infinite(per_function, names, lambda: gather_object(list(prompts)))
        self.judged = dynamic_sampling.judged_by(per_function, self.reward_weights, names, metric)
        size = self.num_generations if self.model.training else self.num_generations_eval
        is_summed = self.multi_objective_aggregation == "sum_then_normalize"
        self.equal_groups = rollout_measures.equal_groups(per_function, self.reward_weights, size, is_summed)
        return per_function

    # 7 to 9: importance, loss, optimizer

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        is_training = self.model.training
        with self.loss_forward.learning_from(inputs) if is_training else nullcontext(inputs) as loss_inputs:
            for block in self._keeping:  # each rollout and the start of training turn checkpointing on in all blocks
                block.gradient_checkpointing = False
            loss = super().compute_loss(model, loss_inputs, *args, **kwargs)
        if is_training:
            self.recorder.add(loss, loss_inputs)
        return loss

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
        batch = (model, input_ids, attention_mask, logits_to_keep)
        trl_forward = super()._get_per_token_logps_and_entropies
        padded = functools.partial(trl_forward, *batch, batch_size, compute_entropy, **others)
        return self.loss_forward.log_probabilities(*batch, wants_entropy=compute_entropy, padded=padded)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        self.recorder.take_gradients(float(norm))
        step, is_half = self.state.global_step + 1, self.loss_forward.half is not None
        divergence.check_step(step, self.recorder.loss, self.recorder.grad_norm, self.args, is_half=is_half)
        return norm

    # before and after the steps

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train, or resume from the checkpoint folder given; True means the last whole checkpoint in output_dir.

        A checkpoint of the last step is loaded and nothing is trained; transformers would train one step more.
        Raises CheckpointMismatch as ``RunFiles.go_on_from`` does.
        """
        folder = self.files.go_on_from(resume_from_checkpoint)
        self.args.eval_on_start = self.args.eval_on_start and folder is None  # a resumed run has started before
        if folder is not None and saving.is_finished(folder, self.args):
            self._load_from_checkpoint(folder)
            self.state = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))
            return None
        return super().train(resume_from_checkpoint=folder, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the reward on held-out prompts as TRL does, with the noise off in engine and trainer."""
        self.vllm_generation.begin_evaluation()
        self._last_loaded_step = self.state.global_step
        norms.clear_noise(self.model)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self._set_noise()

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter to ``folder``, whole or not at all, in place of an earlier one."""
        self.files.save_adapter(folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the adapter's card is written with the adapter, and TRL's would describe a whole model."""

    def _get_output_dir(self, trial: Any) -> str:
        return self.files.folder(super()._get_output_dir(trial))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        self.files.write_adapter(Path(output_dir or self.args.output_dir))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = super()._save_checkpoint
        folder = self.files.save_checkpoint(lambda: write(model, trial), Path(super()._get_output_dir(trial)))
        if self.files.is_push_due:
            self.files.is_push_due = False
            self.files.prepare_push(folder)
            super()._push_from_checkpoint(str(folder))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Put the push off until the checkpoint folder has its final name; ``_save_checkpoint`` then starts it."""
        self.files.is_push_due = True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        saving.load_adapter(self.accelerator.unwrap_model(self.model), resume_from_checkpoint)
