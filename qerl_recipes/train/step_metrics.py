"""Record the metrics of each optimizer step and evaluation in TRL's log and in ``metrics.jsonl``."""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ProgressCallback

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.train import staleness
from qerl_recipes.train.metrics_file import EVALUATION, MetricsFile

if TYPE_CHECKING:
    from qerl_recipes.train.trainer import QerlGRPOTrainer

# the names of a step's metrics in TRL's log -> in metrics.jsonl
NAMES = {
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "equal_groups",
    "entropy": "entropy",
    "sampling/entropy": "sampled_entropy",
    "kl": "kl",
    "sampling/sampling_logp_difference/mean": "logp_mismatch_mean",
    "sampling/sampling_logp_difference/max": "logp_mismatch_max",
    staleness.DIFFERENCE: "logp_staleness_mean",
    staleness.CLIPPED: "clip_ratio",
    "completions/mean_length": "completion_length",
    "completions/clipped_ratio": "completion_clipped",
    "sigma": "sigma",
    "adapter_version": "adapter_version",
    "noise/touched_norms": "touched_norms",
    "dynamic_sampling/accepted_groups": "accepted_groups",
    "dynamic_sampling/dropped_groups": "dropped_groups",
    "dynamic_sampling/filled_groups": "filled_groups",
    "dynamic_sampling/extra_tokens": "extra_tokens",
    "dynamic_sampling/rounds": "sampling_rounds",
    "packing/share": "packed_share",
    "packing/silent_rows": "silent_rows",
}
COUNTS = {"adapter_version", "touched_norms", "accepted_groups", "dropped_groups", "filled_groups"}
COUNTS |= {"extra_tokens", "sampling_rounds"}
OF_TOKENS = ("entropy", "kl")  # means over tokens; a step may have computed none
IN_THE_BAR = {"reward": "reward", "sampling/sampling_logp_difference/mean": "mismatch", "sigma": "sigma"}
HF_EVALUATION = "eval_"  # begins the names that transformers and TRL log of an evaluation
SILENT_ROLLOUTS = 5  # this many rollouts in a row without signal are not chance
STILL_TRUE = ("sigma", "adapter_version", "touched_norms")  # measured once a rollout, and repeated in its later steps


class StepMeans:
    """Means over a whole step: over all values in its micro-batches, of all processes.

    TRL averages the means of the micro-batches. Here micro-batches differ in their tokens and in the rows left out.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}  # (2,) each: the sum of the values, and its divisor

    def add(self, name: str, total: torch.Tensor | float, number: torch.Tensor | float) -> None:
        """Add one micro-batch's ``total`` and ``number`` to the sums of ``name``; every process adds the same names."""
        device = next((x.device for x in (total, number) if isinstance(x, torch.Tensor)), None)
        pair = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in (total, number)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def take(self, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> dict[str, float]:
        """Return the means of what was added since the last call; names whose divisor is 0 are left out.

        ``gather`` is the accelerator's; it stacks the tensors of all processes along the first dimension.
        """
        names = sorted(self._sums)
        if not names:
            return {}
        local = torch.stack([self._sums[name].to(device) for name in names])[None]  # (1, names, 2)
        self._sums = {}
        gathered = gather(local).sum(dim=0).tolist()
        return {name: total / number for name, (total, number) in zip(names, gathered, strict=True) if number}


class StepRecorder(TrainerCallback):
    """A callback that records every step and every evaluation.

    It warns if the run learns nothing, or if the noise schedule never reaches ``sigma_end``.

    ``rollout_tokens_per_s`` counts generated tokens. ``train_tokens_per_s`` counts the tokens of prompts and
    completions that went through the trainer's forward and backward, over the step's time without the rollout. The
    main process writes its own speeds and step time; all else is over all processes.
    """

    def __init__(self, trainer: "QerlGRPOTrainer") -> None:
        self._trainer = trainer
        self._learning_rate = 0.0
        self.file = MetricsFile(trainer.args.output_dir)
        self.loss = self.grad_norm = 0.0  # of the step, over all processes
        self._last: dict[str, Any] = {}
        self._silent, self._has_warned = 0, False  # _silent counts rollouts in a row without signal
        self._reset()

    def _reset(self) -> None:
        self._own_loss: torch.Tensor | float = 0.0
        self._tokens: torch.Tensor | int = 0
        self._began = time.perf_counter()
        self._generation_before = self._trainer.generation_seconds
        self._lengths = {name: len(values) for name, values in self._trainer._metrics["train"].items()}

    def add(self, loss: torch.Tensor, inputs: Mapping[str, Any]) -> None:
        """Add one micro-batch; TRL has already divided its loss by the number of micro-batches where that is needed."""
        self._own_loss = self._own_loss + loss.detach()
        tokens = inputs["prompt_mask"].sum(dim=1) + inputs["completion_mask"].sum(dim=1)  # (B,)
        if "left_out" in inputs:
            tokens = tokens * ~inputs["left_out"]
        self._tokens = self._tokens + tokens.sum()

    def take_gradients(self, grad_norm: float) -> None:
        """Set the step's loss and gradient norm once its micro-batches are done; every process must call this."""
        local_loss = torch.as_tensor(self._own_loss, dtype=torch.float32, device=self._trainer.accelerator.device)
        self.loss, self.grad_norm = float(self._trainer.accelerator.gather(local_loss).mean()), grad_norm

    def on_train_begin(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.save_steps < 1:  # a share of all steps; the number that transformers made of it may be in mid-rollout
            steps = self._trainer.steps_per_rollout
            state.save_steps = math.ceil(state.save_steps / steps) * steps
        schedule = self._trainer._schedule
        if schedule is not None and state.is_world_process_zero:
            rollouts = self._trainer.rollouts()
            start, end, stages = args.sigma_start or 0.0, args.sigma_end or 0.0, args.num_stages or 0  # none is None
            last = schedule(rollouts - 1, rollouts, start, end, stages)
            if not math.isclose(last, end, rel_tol=1e-6):
                warnings.warn(
                    f"the noise ends at sigma {last:g}, and sigma_end: {end:g} is never reached: with "
                    f"num_stages: {stages} that takes {max(stages, 2) + 1} rollouts and 2 stages at "
                    f"least, and this run has {rollouts} rollouts; train longer, or change num_stages",
                    stacklevel=2,
                )

    def on_step_begin(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._reset()
        self._learning_rate = self._trainer._get_learning_rate()

    def on_step_end(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer, metrics = self._trainer, self._trainer._metrics["train"]
        measured = trainer.loss_forward.take_measured()
        for name in metrics.keys() & {*measured, *OF_TOKENS}:  # drop TRL's own, which are 0 if no token was computed
            del metrics[name][self._lengths.get(name, 0) :]
        for name, value in measured.items():
            metrics[name].append(value)
        tokens = int(self._tokens)  # waits for the GPU, so that the time is of the whole step
        generation = trainer.generation_seconds - self._generation_before
        seconds = time.perf_counter() - self._began - generation
        engine = trainer.vllm_generation
        if generation:
            metrics["rollout_tokens_per_s"].append(engine.tokens / max(engine.seconds, 1e-9))
        metrics["train_tokens_per_s"].append(tokens / seconds)
        record: dict[str, Any] = {"step": state.global_step, "epoch": state.epoch, "loss": self.loss}
        record |= {"grad_norm": self.grad_norm, "learning_rate": self._learning_rate}
        record["step_seconds"] = seconds + generation
        for name, values in metrics.items():
            added = values[self._lengths.get(name, 0) :]
            new = [value for value in added if value is not None and not math.isnan(value)]  # TRL's log drops these too
            if new and (key := _our_name(name)) is not None:
                mean = sum(new) / len(new)
                record[key] = round(mean) if key in COUNTS else mean
        self._last |= {name: record[name] for name in STILL_TRUE if name in record}
        if trainer.is_world_process_zero():
            self.file.append({**self._last, **record})
            self._warn_if_silent(record)

    def _warn_if_silent(self, record: Mapping[str, Any]) -> None:
        """Warn once that a run learns nothing, naming its rewards."""
        if "equal_groups" not in record:
            return  # this is a later step of a rollout
        accepted = record.get("accepted_groups", 1 - record["equal_groups"])
        all_cut = self._trainer.args.mask_truncated_completions and record["completion_clipped"] == 1
        self._silent = 0 if accepted > 0 and not all_cut else self._silent + 1
        if self._silent == SILENT_ROLLOUTS and not self._has_warned:
            self._has_warned = True
            means = {name.split("/")[1]: mean for name, mean in record.items() if name.endswith("/mean")}
            means_line = ", ".join(f"{name} {mean:g}" for name, mean in means.items())
            why = f"no group had rewards that differ (means of the last rollout: {means_line}); compare a completion "
            why += "with what these rewards want (log_completions: true)"
            if all_cut:
                why = "all completions were cut off, and mask_truncated_completions leaves them out; raise "
                why += f"max_completion_length ({self._trainer.args.max_completion_length})"
            warnings.warn(f"nothing is learnt: in {SILENT_ROLLOUTS} rollouts {why}", stacklevel=2)

    def on_log(
        self,
        args: GRPOConfig,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        found = evaluation_of(logs or {})
        if found and state.is_world_process_zero:
            problems = len(self._trainer.eval_dataset)
            self.file.append({"step": state.global_step, f"{EVALUATION}problems": problems, **found})


def _our_name(name: str) -> str | None:
    """Return our name for one of TRL's metrics; None if metrics.jsonl does not keep it."""
    return name if name.startswith("rewards/") or name.endswith("_tokens_per_s") else NAMES.get(name)


def evaluation_of(logs: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of an evaluation in TRL's ``logs`` under our names; empty for a log of training."""
    if f"{HF_EVALUATION}reward" not in logs:
        return {}
    kept = {_our_name(name.removeprefix(HF_EVALUATION)): value for name, value in logs.items() if HF_EVALUATION in name}
    return {f"{EVALUATION}{name}": value for name, value in kept.items() if name is not None}


class QuietProgress(ProgressCallback):
    """A progress bar that ends in three numbers, where transformers prints all metrics at every log.

    An evaluation has a line of its own above the bar.
    """

    def on_log(
        self,
        args: GRPOConfig,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if found := evaluation_of(logs):
            parts = {name.split("/")[2]: value for name, value in found.items() if name.endswith("/mean")}
            given = ", ".join(f"{name} {value:.3g}" for name, value in parts.items())
            tqdm.write(f"held-out problems after step {state.global_step}: reward {found['eval/reward']:.3g} ({given})")
        elif self.training_bar is not None:
            shown = {short: f"{logs[name]:.3g}" for name, short in IN_THE_BAR.items() if logs.get(name) is not None}
            if shown:
                self.training_bar.set_postfix(shown)
