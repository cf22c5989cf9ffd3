"""GRPO and DAPO on a frozen base: TRL's trainer with a rollout engine, a noise and dynamic sampling of our own.

Everything that TRL already does (loss, advantages, logging) is TRL's; so is importance correction where one rollout
serves several optimizer steps, and where it serves one, ``importance`` gives the same weights for less.
"""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from datasets import Dataset
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import ProgressCallback

from qerl_recipes import fused_lora, importance, norms
from qerl_recipes.configs import GRPOConfig
from qerl_recipes.dynamic_sampling import PromptStream, informative_groups, replace_groups
from qerl_recipes.hooks import find
from qerl_recipes.packed_training import PackedTraining
from qerl_recipes.rollout import Snapshot, noise_seed
from qerl_recipes.step_metrics import QuietProgress, StepRecorder
from qerl_recipes.validate import steps_per_rollout

ADAPTER = "default"  # PEFT's name of the adapter that is trained


class QerlGRPOTrainer(PackedTraining):
    """Trains the LoRA adapter of ``model`` (from ``qerl_recipes.model.load``) on completions of its own policy.

    Noise modes: ``none``; ``rollout`` (noise in the engine, importance weights 1: the paper's); ``corrected`` (the same
    with importance weights); ``shared`` (the same noise in engine and trainer, so that the policy that samples is the
    one that learns). Whatever the mode, the mean difference of log probabilities is measured.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        reward_funcs: Sequence[Callable[..., Sequence[float | None]]],
        args: GRPOConfig,
        train_dataset: Dataset,
        *,
        base: str | Path,
        base_name: str | None = None,
        processing_class: PreTrainedTokenizerBase,
        eval_dataset: Dataset | None = None,
        peft_config: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        engine: Any = None,
    ) -> None:
        """``base`` is the checkpoint folder that ``model`` was loaded from; the engine loads it too;
        ``base_name`` is what checkpoints and card call it, by default its folder.

        ``engine`` is a rollout engine on ``base`` that runs already, because ``model`` reads its weights; by default
        one is started.

        ``model`` is the base with ``peft_config``, or a PeftModel to continue from. Raises ValueError for settings that
        cannot be honoured together.
        """
        self.steps_per_rollout = steps_per_rollout(args)
        _check(args)
        masters = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
        # TRL would start its own engine, which merges the adapter into weights that cannot be merged into
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
        self.use_vllm, self._last_loaded_step = True, -1
        # off in the recipe means weights of 1 and not that nothing is measured
        self._weigh_importance = bool(args.vllm_importance_sampling_correction)
        self.vllm_importance_sampling_correction = True
        self._differences = importance.Differences()
        self._unweighed: dict[str, Any] | None = None  # a micro-batch whose weights its own forward gives
        for name, weight in self.model.named_parameters():
            if weight.requires_grad:  # TRL rounds an adapter on bitsandbytes weights to BF16; masters stay fp32
                weight.data = masters.get(name, weight.data).to(weight.device, torch.float32)
        if args.train_norms:
            norms.make_trainable(self.model, args.noise_targets)
        self._leave_buffers_out_of_broadcasts()
        self._prepare_packing()
        self._keeping = blocks_that_keep(self.accelerator.unwrap_model(self.model), args.checkpointed_layers)
        if args.bf16:  # autocast
            fused_lora.install(self.model, ADAPTER)
        self._schedule = find("qerl_noise_schedules", args.noise_schedule) if args.noise_mode != "none" else None
        self._noise: tuple[float, int] | None = None  # sigma and rollout of the noise in the trainer's norms
        self._stream = PromptStream(len(train_dataset), args.seed)
        self._rewards = torch.empty(0)
        self.generation_seconds: float = 0.0
        self._prepare_checkpoints(base, base_name)
        self._recorder = StepRecorder(self)
        self.add_callback(self._recorder)
        if self.pop_callback(ProgressCallback) is not None:  # none there with disable_tqdm
            self.add_callback(QuietProgress())
        policy = self.accelerator.unwrap_model(self.model)  # walks over all modules: once, not in each swap
        self._lora, self._adapter_config = lora_parameters(policy), policy.peft_config[ADAPTER].to_dict()
        self.vllm_generation = engine or find("qerl_rollout_engines", args.rollout_engine)(
            str(base),
            args,
            rank=policy.peft_config[ADAPTER].r,
            dtype=policy.get_base_model().dtype,
            snapshot=self.snapshot,
            accelerator=self.accelerator,
        )
        # an engine seeds this process when it starts: what the run draws must not depend on when that was
        set_seed(args.seed, device_specific=True)

    def snapshot(self) -> Snapshot:
        """The adapter and the trained norms as they are now; references, not copies."""
        trained = norms.trained_norms(self.accelerator.unwrap_model(self.model)) if self.args.train_norms else None
        return Snapshot(dict(self._lora), self._adapter_config, trained)

    def rollouts(self) -> int:
        """Rollouts of the whole run."""
        return math.ceil(self.state.max_steps / self.steps_per_rollout)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """TRL's evaluation (reward on held-out prompts), with the noise off on both sides while it lasts."""
        self.vllm_generation.begin_evaluation()
        self._last_loaded_step = self.state.global_step
        norms.clear_noise(self.model)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self._set_trainer_noise()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        began = time.perf_counter()
        if not self.model.training:
            return self._score(inputs)
        self._begin_rollout()
        batch = self._score(inputs)
        if self.args.dynamic_sampling:
            batch = self._replace_equal_groups(batch, len(inputs) // self.num_generations)
        self.generation_seconds += time.perf_counter() - began
        return batch

    def _begin_rollout(self) -> None:
        """New adapter and new noise, at once, in the engine; the same noise in the trainer if it is shared."""
        rollout, sigma = self.rollout(), None
        if self._schedule is not None:
            ends = (self.args.sigma_start, self.args.sigma_end, self.args.num_stages)
            sigma = self._schedule(rollout, self.rollouts(), *ends)
        report = self.vllm_generation.begin(rollout, sigma)
        self._last_loaded_step = self.state.global_step
        self._noise = (sigma, rollout) if sigma is not None and self.args.noise_mode == "shared" else None
        self._set_trainer_noise()
        metrics = self._metrics["train"]
        metrics["sigma"].append(sigma or 0.0)
        metrics["adapter_version"].append(self.adapter_version())
        metrics["noise/touched_norms"].append(report.touched if report is not None and sigma else 0)

    def _set_trainer_noise(self) -> None:
        if self._noise is None:
            norms.clear_noise(self.model)
        else:
            sigma, rollout = self._noise
            norms.set_noise(self.model, sigma, noise_seed(self.args), rollout, self.args.noise_targets)

    def _score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # TRL would compute every log-probability a second time
        self.vllm_importance_sampling_correction = not (self.model.training and self._is_on_policy())
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction = True
        if not self._weigh_importance and "importance_sampling_ratio" in batch:
            batch["importance_sampling_ratio"] = torch.ones_like(batch["importance_sampling_ratio"])
        return batch

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        per_function = super()._calculate_rewards(*args, **kwargs)  # (completions of all ranks, reward functions)
        total = (per_function * self.reward_weights.to(per_function.device)).nansum(dim=1)
        self._rewards = total.masked_fill(per_function.isnan().all(dim=1), torch.nan)
        return per_function

    def _local_groups(self, groups: int) -> list[bool]:
        """Which of this rank's ``groups`` groups of the last batch have rewards that differ."""
        everywhere = informative_groups(self._rewards, self.num_generations).tolist()
        first = self.accelerator.process_index * groups
        return everywhere[first : first + groups]

    def _replace_equal_groups(self, batch: dict[str, Any], groups: int) -> dict[str, Any]:
        """Fresh prompts in place of groups whose rewards are equal, for as many rounds as the recipe allows."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        equal = [i for i, informative in enumerate(self._local_groups(groups)) if not informative]
        dropped, tokens_before, rounds = len(equal), self.vllm_generation.tokens, 0
        while rounds < self.args.dynamic_sampling_max_rounds:
            # all ranks draw the same number of groups in the same number of rounds: their batches are gathered
            needed = int(self.accelerator.gather(torch.tensor([len(equal)], device=self.accelerator.device)).max())
            if needed == 0:
                break
            rounds += 1
            rows = self._stream.take(needed * ranks)[rank * needed : (rank + 1) * needed]
            inputs = [dict(self.train_dataset[row]) for row in rows for _ in range(self.num_generations)]
            with self._without_metrics():
                fresh = self._score(inputs)
            usable = [j for j, informative in enumerate(self._local_groups(needed)) if informative]
            pairs = list(zip(equal, usable, strict=False))
            batch = replace_groups(batch, fresh, pairs, self.num_generations, self._tokenizer.pad_token_id)
            equal = equal[len(pairs) :]
        for group in equal:
            batch["advantages"][group * self.num_generations : (group + 1) * self.num_generations] = 0.0
        batch["num_items_in_batch"] = self.accelerator.gather(batch["completion_mask"].sum()).sum()
        counts = {
            "accepted_groups": groups - len(equal),
            "dropped_groups": dropped,
            "filled_groups": len(equal),
            "extra_tokens": self.vllm_generation.tokens - tokens_before,
        }
        totals = self.accelerator.gather(torch.tensor([list(counts.values())], device=self.accelerator.device)).sum(0)
        for name, total in zip(counts, totals.tolist(), strict=True):
            self._metrics["train"][f"dynamic_sampling/{name}"].append(total)
        self._metrics["train"]["dynamic_sampling/rounds"].append(rounds)
        return batch

    @contextlib.contextmanager
    def _without_metrics(self) -> Iterator[None]:
        """What is logged describes the prompts of the data set's own order, not those picked for being uneven."""
        kept, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        try:
            yield
        finally:
            self._metrics["train"] = kept

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        grad_norm = super()._get_grad_norm(*args, **kwargs)
        self._recorder.grad_norm = grad_norm
        return grad_norm

    def _is_on_policy(self) -> bool:
        """Whether each rollout is trained on within one optimizer step, by the policy that it is measured against."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        results = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._unweighed is not None:
            inputs, self._unweighed = self._unweighed, None
            inputs["importance_sampling_ratio"] = self._importance(results[0].detach(), inputs)
        return results

    def _importance(self, logps: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Weights of a micro-batch with trainer's log-probabilities ``logps: (B, C)``; they are noted for the log."""
        sampled, mask = inputs["sampling_per_token_logps"], importance.mask_of(inputs)
        limits = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        ratio = importance.weights(logps, sampled, mask, self.vllm_importance_sampling_mode, *limits)
        self._differences.add(logps, sampled, mask, ratio)
        return ratio if self._weigh_importance else torch.ones_like(ratio)

    def log_differences(self) -> None:
        """Add to TRL's metrics how the log-probabilities of the step that ends differ; for all processes to call."""
        for name, value in self._differences.take(self.accelerator.gather).items():
            self._metrics["train"][name].append(value)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "importance_sampling_ratio" not in inputs:
            self._unweighed = inputs = dict(inputs)
        for block in self._keeping:  # each rollout and each start turns them all on
            block.gradient_checkpointing = False
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training:
            self._recorder.add(loss, inputs)
        return loss

    def _leave_buffers_out_of_broadcasts(self) -> None:
        """Every process has loaded or computed the same; DDP would broadcast them all at every forward.

        NCCL has no 8-bit floats, and processes with packed rows of their own make different numbers of forwards.
        """
        if self.accelerator.num_processes > 1:
            self.model._ddp_params_and_buffers_to_ignore = [name for name, _ in self.model.named_buffers()]


def blocks_that_keep(model: torch.nn.Module, checkpointed: int | None) -> list[GradientCheckpointingLayer]:
    """The blocks behind the first ``checkpointed``, whose activations are kept; none of them for None.

    The last ones: their memory is free again when the first ones compute theirs anew. Raises ValueError if the model
    has fewer blocks, and for -1, which `qerl train` replaces by a number.
    """
    if checkpointed is None:
        return []
    if checkpointed < 0:
        raise ValueError(f"checkpointed_layers is {checkpointed}, which only the memory plan can settle; name a number")
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if checkpointed > len(blocks):
        raise ValueError(f"checkpointed_layers is {checkpointed}, and this model has {len(blocks)}")
    return blocks[checkpointed:]


def lora_parameters(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The trained adapter's parameters, by PEFT's names of them in a state dict.

    They are the same objects for the whole training: to ask PEFT anew for each swap takes it several walks through the
    model, 50 ms for one of 28 layers.
    """
    named = dict(model.named_parameters())
    names = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return {name: named[f"{name.removesuffix('weight')}{ADAPTER}.weight"] for name in names}


def _check(args: GRPOConfig) -> None:
    """Raises ValueError for settings that exclude each other."""
    if args.train_norms and args.beta:
        raise ValueError("beta needs a reference without trained norms; with train_norms use beta: 0")
    if not args.dynamic_sampling:
        return
    if args.scale_rewards == "batch" or args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            "dynamic_sampling replaces groups, so advantages must be relative to the group alone: use scale_rewards: "
            "group (or none) and multi_objective_aggregation: sum_then_normalize"
        )
    local = args.per_device_train_batch_size * args.steps_per_generation
    if args.world_size > 1 and local % args.num_generations:
        raise ValueError(
            f"dynamic_sampling with several processes needs whole groups on each: per_device_train_batch_size x "
            f"steps_per_generation ({local}) must be a multiple of num_generations ({args.num_generations})"
        )
