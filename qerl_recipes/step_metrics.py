"""What is measured in each optimizer step, for TRL's log and for ``metrics.jsonl``."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from qerl_recipes.metrics import MetricsFile

if TYPE_CHECKING:
    from qerl_recipes.trainer import QerlGRPOTrainer

# TRL's names of what was measured in a step -> ours
NAMES = {
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "equal_groups",
    "entropy": "entropy",
    "kl": "kl",
    "sampling/sampling_logp_difference/mean": "logp_mismatch_mean",
    "sampling/sampling_logp_difference/max": "logp_mismatch_max",
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
}
COUNTS = {"adapter_version", "touched_norms", "accepted_groups", "dropped_groups", "filled_groups"}
COUNTS |= {"extra_tokens", "sampling_rounds"}
IN_THE_BAR = {"reward": "reward", "sampling/sampling_logp_difference/mean": "mismatch", "sigma": "sigma"}
STILL_TRUE = ("sigma", "adapter_version", "touched_norms")  # in the later steps of a rollout


class StepRecorder(TrainerCallback):
    """One record a step. Rollout tokens are those generated; training tokens those that went through the trainer's
    forward and backward (prompts and completions), over the time of the step without the rollout. Of this process."""

    def __init__(self, trainer: "QerlGRPOTrainer") -> None:
        self._trainer = trainer
        self._learning_rate = 0.0
        self.file = MetricsFile(trainer.args.output_dir)
        self.grad_norm: Any = None
        self._last: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._loss: torch.Tensor | float = 0.0
        self._tokens: torch.Tensor | int = 0
        self._began = time.perf_counter()
        self._generation_before = self._trainer.generation_seconds
        self._lengths = {name: len(values) for name, values in self._trainer._metrics["train"].items()}

    def add(self, loss: torch.Tensor, inputs: Mapping[str, Any]) -> None:
        """One micro-batch. TRL's loss is already divided by the number of micro-batches where that is needed."""
        self._loss = self._loss + loss.detach()
        self._tokens = self._tokens + inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._reset()
        self._learning_rate = self._trainer._get_learning_rate()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, metrics = self._trainer, self._trainer._metrics["train"]
        trainer.log_differences()
        loss, tokens = float(self._loss), int(self._tokens)  # waits for the GPU, so that the time is the step's
        generation = trainer.generation_seconds - self._generation_before
        seconds = time.perf_counter() - self._began - generation
        engine = trainer.vllm_generation
        if generation:
            metrics["rollout_tokens_per_s"].append(engine.tokens / max(engine.seconds, 1e-9))
        metrics["train_tokens_per_s"].append(tokens / seconds)
        record: dict[str, Any] = {"step": state.global_step, "epoch": state.epoch, "loss": loss}
        record |= {"grad_norm": float(self.grad_norm), "learning_rate": self._learning_rate}
        for name, values in metrics.items():
            new = [value for value in values[self._lengths.get(name, 0) :] if value is not None]
            if new and (name in NAMES or name.startswith("rewards/") or name.endswith("_tokens_per_s")):
                mean, ours = sum(new) / len(new), NAMES.get(name, name)
                record[ours] = round(mean) if ours in COUNTS else mean
        self._last |= {name: record[name] for name in STILL_TRUE if name in record}
        if trainer.is_world_process_zero():
            self.file.append({**self._last, **record})


class QuietProgress(ProgressCallback):
    """The progress bar with three numbers at its end, in place of a page of metrics at every step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            shown = {short: f"{logs[name]:.3g}" for name, short in IN_THE_BAR.items() if logs.get(name) is not None}
            if shown:
                self.training_bar.set_postfix(shown)
