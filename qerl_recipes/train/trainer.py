"""Train with GRPO or DAPO on a frozen base: TRL's trainer with QeRL's rollout engine, noise and dynamic sampling.

One step, in the order in which it happens. What is called TRL's is inherited, not written here.

 1. prompts     TRL's sampler repeats each prompt num_generations times, shuffled by epoch: ``_get_train_sampler``
 2. policy      the engine takes over the adapter and the trained norms: ``begin_rollout``, ``snapshot``
 3. noise       is drawn for this rollout in the engine: ``begin_rollout``; if shared, in the trainer: ``train_on``
 4. rollout     TRL's ``_generate`` gets completions and their log-probabilities from the engine; with tools, the turns
                after the first are those of ``train.turns``
 5. rewards     TRL's ``_calculate_rewards``; the reward that dynamic sampling compares is kept in ``judged``
 6. advantages  TRL's ``_generate_and_score_completions``; dynamic sampling replaces groups without signal: ``_refill``
 7. importance  weights of trainer over engine, from the loss's own forward where possible: ``loss.weigh``
 8. loss        TRL's ``_compute_loss`` on log-probabilities from packed rows, part by part: ``train.parts``
 9. optimizer   transformers' training loop; loss and gradient norm are checked first: ``_get_grad_norm``
10. record      a line of metrics.jsonl: ``on_step_end``; now and then a checkpoint: ``train.checkpoints``

Steps 2 to 6 happen once per rollout, in ``_generate_and_score_completions``. A rollout may serve several steps. With
``overlap: 1`` those of the next rollout happen meanwhile: ``train.overlap``.
"""

import contextlib
import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from qerl_recipes.files.run_state import Run, recorded
from qerl_recipes.hooks import RolloutEngine, Snapshot, find
from qerl_recipes.model import lora, norms
from qerl_recipes.model.loading import blocks_that_keep
from qerl_recipes.recipe.checks import steps_per_rollout
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.rollout.episodes import check_turns
from qerl_recipes.tasks import rewards
from qerl_recipes.tasks.environments import Starts
from qerl_recipes.train import divergence, dynamic_sampling, loss, metrics
from qerl_recipes.train.checkpoints import SavingTrainer
from qerl_recipes.train.overlap import Begun, Overlap
from qerl_recipes.train.parts import PartsTrainer
from qerl_recipes.train.preflight import ResumePoint
from qerl_recipes.train.turns import TurnsTrainer


class QerlGRPOTrainer(TurnsTrainer, PartsTrainer, SavingTrainer, TrainerCallback):
    """Train the LoRA adapter on a model of ``model.loading``; where there is no method to override, by callbacks."""

    _logs: dict[str, Any]

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        args: GRPOConfig,
        train_dataset: Dataset | None,
        *,
        engine: RolloutEngine,
        run: Run,
        recipe: Mapping[str, Any] | None = None,
        reward_funcs: Sequence[Callable[..., Sequence[float | None]]] | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        **others: Any,
    ) -> None:
        """Set up the trainer; ``train.preflight`` has refused combinations of ``args`` that cannot run.

        ``model`` is the plain base together with ``peft_config``, or a PeftModel to continue from. ``run`` and
        ``recipe`` are what checkpoints record, ``others`` TRL's arguments. Raises ValueError for tools or environments
        that engine or prompts cannot take.
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
                tools=list(tools),
                environment_factory=environment_factory,
                **others,
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
        self._run, self._recipe, self._began = run, recorded(args) if recipe is None else dict(recipe), time.monotonic()
        self._sampler, self.starts = None, Starts(args.seed)
        self.overlap = Overlap(self) if args.overlap else None
        self._values, self._sums = metrics.StepValues(), metrics.StepSums()  # of the step in progress
        self._rollout_record: dict[str, float] = {}  # what each step's line says of its rollout
        self.metrics_file, self._silent = metrics.MetricsFile(args.output_dir), metrics.SilentRollouts(args)
        self.add_callback(self)
        if self.pop_callback(ProgressCallback) is not None:  # with disable_tqdm there is none
            self.add_callback(metrics.QuietProgress())
        # an engine that starts seeds this process; what the run draws must not depend on when that was
        set_seed(args.seed, device_specific=True)

    def rollouts(self) -> int:
        return math.ceil(self.state.max_steps / self.steps_per_rollout)

    # 1: prompts

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def on_epoch_begin(self, *_: Any, **kwargs: Any) -> None:
        """Let the order of prompts depend on seed and epoch alone, so that a resumed run keeps it."""
        if (generator := getattr(self._sampler, "generator", None)) is not None:
            generator.manual_seed(self.args.seed + int((self.state.epoch or 0.0) + 1e-6))

    # 2 to 6: a rollout, from the policy to advantages

    @property
    def _last_loaded_step(self) -> int:
        """Return the step whose policy the engine has: TRL pushes if it is not the present one, but never in flight."""
        in_flight = self.overlap is not None and self.overlap.flight is not None
        return self.state.global_step if in_flight else self._loaded_step

    @_last_loaded_step.setter
    def _last_loaded_step(self, step: int) -> None:
        self._loaded_step = step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        began = time.perf_counter()
        if not self.model.training:
            return self.score(inputs)
        if self.overlap is None:
            self.train_on(self.begin_rollout(self.rollout()))
            batch = self.roll_out(inputs)
        else:
            batch = self.overlap.next(inputs)
        self._values.rollout_seconds += time.perf_counter() - began
        return batch

    def snapshot(self) -> Snapshot:
        """Return the adapter (by reference) and the trained norms as they are, or as the rollout in flight began."""
        if self.overlap is not None and self.overlap.flight is not None:
            return self.overlap.policy
        return Snapshot(dict(self._lora), self._adapter_config, norms.trained_norms(self._norms))

    @torch.no_grad()
    def load_policy(self, policy: Snapshot) -> None:
        """Copy the adapter and the trained norms of ``policy`` into the model; the noise stays."""
        for name, weight in self._lora.items():
            weight.copy_(policy.tensors[name])
        for name, norm in self._norms:
            if policy.norms is not None and name in policy.norms:
                norm.weight.copy_(policy.norms[name])

    def begin_rollout(self, rollout: int) -> Begun:
        """Give the engine the adapter and the noise of this rollout, in one go."""
        sigma = None
        if self._schedule is not None:
            ends = (self.args.sigma_start, self.args.sigma_end, self.args.num_stages)
            sigma = self._schedule(rollout, self.rollouts(), *ends)
        noisy_norms = self.vllm_generation.begin(rollout, sigma)
        self.starts.open(rollout)
        self._last_loaded_step = self.state.global_step
        record = {"sigma": float(sigma or 0.0), "adapter_version": self.adapter_version()}
        record["noisy_norms"] = noisy_norms if sigma else 0
        return Begun((sigma, rollout) if sigma is not None and self.args.noise_mode == "both" else None, record)

    def train_on(self, rollout: Begun) -> None:
        """Set the rollout's noise in the trainer, if it is shared, and log what it began with."""
        self._noise, self._rollout_record = rollout
        self._set_noise()
        for name, value in self._rollout_record.items():
            self._metrics["train"]["noise/noisy_norms" if name == "noisy_norms" else name].append(value)

    def roll_out(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the scored completions of a rollout that the engine has begun, and log its speed."""
        self._tool_seconds = 0.0
        batch = self.score(inputs)
        if self.args.dynamic_sampling:
            batch = self._refill(batch)
        logged, engine = self._metrics["train"], self.vllm_generation
        logged["rollout_tokens_per_s"].append(engine.tokens / max(engine.seconds, 1e-9))
        if self.tools:
            logged["tool_seconds"].append(self._tool_seconds)
        return batch

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
        try:
            scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction = True
        logged = self._metrics["train" if self.model.training else "eval"]
        logged[metrics.ZERO_STD][-1] = self.frac_reward_zero_std
        self._note_ends(scored, logged)
        return scored

    def _end_turns(self) -> None:
        self._in_main(lambda: None)  # a rollout in flight waits here: what follows takes all processes
        # in training TRL would compute every log-probability a second time, to weigh and measure once per rollout;
        # `compute_loss` does both in each step
        self.vllm_importance_sampling_correction = not self.model.training

    def _in_main(self, function: Callable[..., Any], *given: Any) -> Any:
        flight = None if self.overlap is None else self.overlap.flight
        return function(*given) if flight is None else flight.in_main(lambda: function(*given))

    def _refill(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return ``batch`` with its groups without signal replaced, and log what that took."""
        accelerator, tokens_before = self.accelerator, self.vllm_generation.tokens
        refilled, counts = dynamic_sampling.refill(
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
        extra = torch.tensor([self.vllm_generation.tokens - tokens_before], device=accelerator.device)
        counts["extra_tokens"] = int(accelerator.gather(extra).sum())
        for name, count in counts.items():
            self._metrics["train"][f"dynamic_sampling/{name}"].append(count)
        items = accelerator.gather(loss.mask_of(refilled).sum()).sum()
        return {**refilled, "num_items_in_batch": items}

    def _score_fresh(self, rows: Sequence[int]) -> tuple[dict[str, Any], torch.Tensor]:
        """Return scored completions of these rows, with no trace in TRL's metrics and table: they would bias them."""
        inputs = [dict(self.train_dataset[row]) for row in rows for _ in range(self.num_generations)]
        with self.logging_apart():
            return self.score(inputs), self.judged

    @contextlib.contextmanager
    def logging_apart(self) -> Iterator[None]:
        """Let what is logged in the block go to empty metrics and an empty table of completions, which end with it."""
        logged, table = self._metrics["train"], self._logs
        self._metrics["train"], self._logs = defaultdict(list), copy.deepcopy(table)
        for column in self._logs.values():
            column.clear()
        try:
            yield
        finally:
            self._metrics["train"], self._logs = logged, table

    def _calculate_rewards(self, inputs: Any, prompts: Any, *others: Any) -> torch.Tensor:
        # rewards may use signals, which only the main thread can
        calculate = super()._calculate_rewards
        per_function = self._in_main(calculate, inputs, prompts, *others)  # (completions of all ranks, functions)
        metric, names = self.args.dynamic_sampling_metric, self.reward_func_names
        rewards.refuse_infinite(per_function, names, lambda: gather_object(list(prompts)))
        self.judged = dynamic_sampling.judged_by(per_function, self.reward_weights, names, metric)
        size = self.num_generations if self.model.training else self.num_generations_eval
        is_summed = self.multi_objective_aggregation == "sum_then_normalize"
        self.frac_reward_zero_std = metrics.frac_reward_zero_std(per_function, self.reward_weights, size, is_summed)
        return per_function

    # 9: optimizer

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        local_loss = torch.as_tensor(self._values.loss, dtype=torch.float32, device=self.accelerator.device)
        self._values.loss, self._values.grad_norm = float(self.accelerator.gather(local_loss).mean()), float(norm)
        step, is_half = self.state.global_step + 1, self.loss_settings.half is not None
        divergence.check_step(step, self._values.loss, self._values.grad_norm, self.args, is_half=is_half)
        return norm

    # 10: record

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Keep checkpoints between rollouts, and warn of noise or a warm-up that will not reach its end."""
        if self.args.save_steps < 1:  # a share of all steps; transformers' number for it may be in mid-rollout
            self.state.save_steps = math.ceil(self.state.save_steps / self.steps_per_rollout) * self.steps_per_rollout
        if not self.is_world_process_zero():
            return
        metrics.warn_if_warmup_ends_late(self.state.max_steps, self.args)
        if self._schedule is not None:
            metrics.warn_if_noise_ends_early(self._schedule, self.rollouts(), self.args)

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        logged = {name: len(values) for name, values in self._metrics["train"].items()}
        self._values = metrics.StepValues(time.perf_counter(), self._get_learning_rate(), logged)

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        """Put the step's own figures into TRL's log, and write its line of metrics.jsonl."""
        logged, values = self._metrics["train"], self._values
        figures = self._sums.take(self.accelerator.gather, self.accelerator.device)
        for name in logged.keys() & {*figures, *metrics.OF_TOKENS}:  # TRL's own are 0 if no token was computed
            del logged[name][values.logged.get(name, 0) :]
        for name, value in figures.items():
            logged[name].append(value)
        tokens = int(values.tokens)  # waits for the GPU, so that the time is of the whole step
        seconds = time.perf_counter() - values.began
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

    def train(self, resume: ResumePoint | None = None, **kwargs: Any) -> Any:
        """Train as SavingTrainer does; a rollout that was in flight at the checkpoint is the next to be trained on."""
        if self.overlap is not None and resume is not None:
            self.overlap.load(resume.folder)
        return super().train(resume, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.overlap is not None:
            self.overlap.land()
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.overlap is not None:
            self.overlap.save(Path(output_dir))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the reward on held-out prompts as TRL does, with the noise off in engine and trainer."""
        if self.overlap is not None:
            self.overlap.land()
        self.vllm_generation.begin_evaluation()
        self.starts.open("evaluation")
        self._last_loaded_step = self.state.global_step
        norms.clear_noise(self.model)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self._set_noise()
