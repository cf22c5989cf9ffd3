"""Turn what a step has measured into its line of ``metrics.jsonl``, which the report reads.

    {"step": 7, "loss": 0.01, "reward": 0.4, "rewards/accuracy/mean": 0.3, ...}
    {"step": 7, "eval/problems": 512, "eval/reward": 0.45, "eval/rewards/accuracy/mean": 0.35, ...}

Each optimizer step has a line of the first kind, each evaluation on held-out problems one of the second. Speeds and
times are the main process's; all else is over all processes. ``train_tokens_per_s`` leaves the rollout's time out.

Two figures of a rollout are measured anew, because TRL 1.16 computes something else than their names say:

* ``frac_reward_zero_std`` is the share of groups whose rewards are all equal. With ``scale_rewards: batch``, or rewards
  normalized before the sum, TRL's is 0 as soon as any two completions of the batch differ.
* ``completion_clipped`` is the share of completions that were cut off. TRL also counts those that ``stop`` or
  ``stop_token_ids`` ended, and leaves out episodes whose tokens ran out with a call open.

With tools, a line also has the means of ``tool_calls`` and ``turns`` of an episode, and the shares ``tool_failures`` of
calls that failed and ``episodes_cut`` of episodes whose tokens ran out with a call open.
"""

import json
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import SchedulerType
from transformers.trainer_callback import ProgressCallback

from qerl_recipes.files.metrics_file import EVALUATION, FILE
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.train import loss
from qerl_recipes.train.dynamic_sampling import TOTAL, informative_groups, judged_by

HF_EVALUATION = "eval_"  # begins the names that transformers and TRL log of an evaluation
ZERO_STD, CLIPPED = "frac_reward_zero_std", "completions/clipped_ratio"  # TRL's names of the two figures above
TURNS, CUT, LOST = "episodes/turns", "episodes/cut", "environments/lost"

# the names of a step's metrics in TRL's log -> in metrics.jsonl
NAMES = {
    "reward": "reward",
    "reward_std": "reward_std",
    ZERO_STD: ZERO_STD,
    "entropy": "entropy",
    "sampling/entropy": "sampled_entropy",
    "kl": "kl",
    loss.MISMATCH: "logp_diff_mean",
    loss.LARGEST_MISMATCH: "logp_diff_max",
    loss.STALENESS: "logp_staleness_mean",
    loss.STALE_CLIPPED: "clip_ratio",
    "completions/mean_length": "completion_length",
    CLIPPED: "completion_clipped",
    "tools/call_frequency": "tool_calls",
    "tools/failure_frequency": "tool_failures",
    "tool_seconds": "tool_seconds",
    TURNS: "turns",
    CUT: "episodes_cut",
    "forked": "forked",
    LOST: "environments_lost",
    "dynamic_sampling/accepted_groups": "accepted_groups",
    "dynamic_sampling/dropped_groups": "dropped_groups",
    "dynamic_sampling/filled_groups": "filled_groups",
    "dynamic_sampling/extra_tokens": "extra_tokens",
    "dynamic_sampling/rounds": "sampling_rounds",
    "packing/share": "packed_share",
    "packing/frac_zero_advantage": "frac_zero_advantage",
}
COUNTS = {"accepted_groups", "dropped_groups", "filled_groups", "extra_tokens", "sampling_rounds"}
OF_TOKENS = ("entropy", "kl")  # means over tokens; a step may have computed none
IN_THE_BAR = {"reward": "reward", loss.MISMATCH: "logp_diff", "sigma": "sigma"}
SILENT_ROLLOUTS = 5  # this many rollouts in a row without signal are not chance


class StepSums:
    """Join the figures of a step's micro-batches: means and extremes over all their values, of all processes.

    TRL averages their means, though they differ in tokens and rows left out. Only ``take`` waits for the GPU.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}  # (2,) fp64 each: the sum of the values, and their number
        self._extremes: dict[tuple[str, int], torch.Tensor] = {}  # (metric, sign) -> the largest of sign * values

    def add(self, measured: loss.Measured) -> None:
        """Add one micro-batch's figures; every process adds the same names in each step."""
        for name, (total, number) in measured.sums.items():
            device = next((x.device for x in (total, number) if isinstance(x, torch.Tensor)), None)
            pair = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in (total, number)])
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair
        for sign, values in ((1, measured.largest), (-1, measured.smallest)):
            for name, value in values.items():
                before = self._extremes.get((name, sign), sign * value)
                self._extremes[name, sign] = torch.maximum(before, sign * value)

    def take(self, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> dict[str, float]:
        """Return the figures added since the last call; ``gather`` stacks the tensors of all processes."""
        figures, sums, extremes = {}, dict(sorted(self._sums.items())), dict(sorted(self._extremes.items()))
        self._sums, self._extremes = {}, {}
        if sums:
            local = torch.stack([pair.to(device) for pair in sums.values()])[None]  # (1, names, 2)
            for name, (total, number) in zip(sums, gather(local).sum(dim=0).tolist(), strict=True):
                if number:
                    figures[name] = total / number
        if extremes:
            local = torch.stack([value.double().to(device) for value in extremes.values()])[None]  # (1, names)
            for (name, sign), value in zip(extremes, gather(local).amax(dim=0).tolist(), strict=True):
                if value != -math.inf:
                    figures[name] = sign * value
        if loss.MISMATCH not in figures:  # without a token to compare, weights of 1 would claim that both sides agree
            figures = {name: value for name, value in figures.items() if not name.startswith(loss.WEIGHTS)}
        return figures


@dataclass
class StepValues:
    """Hold what the trainer notes during one optimizer step, in this process.

    ``loss`` is the sum over micro-batches, at the end the mean over all processes. ``logged`` counts the values that
    each metric of TRL's log had before the step.
    """

    began: float = 0.0
    learning_rate: float = 0.0
    logged: Mapping[str, int] = field(default_factory=dict)
    rollout_seconds: float = 0.0
    loss: torch.Tensor | float = 0.0
    grad_norm: float = 0.0
    tokens: torch.Tensor | int = 0

    def add(self, micro_loss: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the loss of one micro-batch and the number of its computed tokens, () each."""
        self.loss, self.tokens = self.loss + micro_loss.detach(), self.tokens + tokens


def named(logged: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """Return the mean of each metric of TRL's log, None and NaN left out, by its name in metrics.jsonl."""
    means = {}
    for trl_name, values in logged.items():
        known = [value for value in values if value is not None and not math.isnan(value)]
        name = _our_name(trl_name)
        if known and name is not None:
            mean = sum(known) / len(known)
            means[name] = round(mean) if name in COUNTS else mean
    return means


def of_evaluation(logs: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of an evaluation in TRL's ``logs`` under our names; empty for a log of training."""
    if f"{HF_EVALUATION}reward" not in logs:
        return {}
    kept = {_our_name(name.removeprefix(HF_EVALUATION)): value for name, value in logs.items() if HF_EVALUATION in name}
    return {f"{EVALUATION}{name}": value for name, value in kept.items() if name is not None}


def _our_name(name: str) -> str | None:
    """Return our name for one of TRL's metrics; None if metrics.jsonl does not keep it."""
    return name if name.startswith("rewards/") or name.endswith("_tokens_per_s") else NAMES.get(name)


# the two figures of a rollout that TRL measures otherwise


def frac_reward_zero_std(
    per_reward: torch.Tensor, weights: torch.Tensor, num_generations: int, is_summed: bool
) -> float:
    """Return the share of groups in which no completion has an advantage over another.

    ``per_reward`` is (completions, rewards), with NaN for a missing value; they are compared by the sum weighted by
    ``weights: (rewards,)`` or, unless ``is_summed``, by each reward whose weight is not 0.
    """
    if is_summed:
        columns = [judged_by(per_reward, weights, (), TOTAL)]
    else:
        columns = [per_reward[:, i] for i, weight in enumerate(weights.tolist()) if weight]
    has_signal = torch.stack([informative_groups(column, num_generations) for column in columns]).any(dim=0)
    return 1 - has_signal.float().mean().item()


def has_stops(generation_kwargs: Mapping[str, Any]) -> bool:
    """Return True if something other than an end-of-sequence token may end a completion, so that TRL miscounts."""
    return bool(generation_kwargs.get("stop") or generation_kwargs.get("stop_token_ids"))


def cut_off(
    ids: torch.Tensor,
    mask: torch.Tensor,
    end_tokens: Collection[int],
    decode: Callable[[list[int]], str],
    generation_kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Mark the completions that neither an end token nor a stop of ``generation_kwargs`` has ended: (B,) bool.

    ``ids`` and ``mask`` are (B, C). One without a sampled token counts: ``mask_truncated_completions`` has left it out.
    """
    stop, stop_tokens = generation_kwargs.get("stop") or (), generation_kwargs.get("stop_token_ids") or ()
    texts, ends = [stop] if isinstance(stop, str) else stop, {*end_tokens, *stop_tokens}
    rows = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    is_cut = [not row or (row[-1] not in ends and not any(text in decode(row) for text in texts)) for row in rows]
    return torch.tensor(is_cut, device=ids.device)


# what a run says of itself


class SilentRollouts:
    """Count rollouts in a row without signal, and warn once when they are no longer chance."""

    def __init__(self, args: GRPOConfig) -> None:
        self._args, self._count, self._has_warned = args, 0, False

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the line of a step; warn, naming the rewards, once nothing has been learnt for long."""
        if "frac_reward_zero_std" not in record:
            return  # this is a later step of a rollout
        accepted = record.get("accepted_groups", 1 - record["frac_reward_zero_std"])
        all_cut = self._args.mask_truncated_completions and record["completion_clipped"] == 1
        self._count = 0 if accepted > 0 and not all_cut else self._count + 1
        if self._count != SILENT_ROLLOUTS or self._has_warned:
            return
        self._has_warned = True
        means = {name.split("/")[1]: mean for name, mean in record.items() if name.endswith("/mean")}
        means_line = ", ".join(f"{name} {mean:g}" for name, mean in means.items())
        why = (
            f"rewards are identical within every group (means of the last rollout: {means_line}); compare a completion "
            "with what these rewards want (log_completions: true)"
        )
        if all_cut:
            raised = f"raise max_completion_length ({self._args.max_completion_length})"
            why = f"all completions were cut off, and mask_truncated_completions leaves them out; {raised}"
        warnings.warn(f"no learning signal in {SILENT_ROLLOUTS} rollouts: {why}", stacklevel=2)


def warn_if_noise_ends_early(schedule: Callable[..., float], rollouts: int, args: GRPOConfig) -> None:
    """Warn if a run of ``rollouts`` is too short for its noise to reach ``sigma_end``."""
    start, end, stages = args.sigma_start or 0.0, args.sigma_end or 0.0, args.num_stages or 0  # none is None
    last = schedule(rollouts - 1, rollouts, start, end, stages)
    if not math.isclose(last, end, rel_tol=1e-6):
        warnings.warn(
            f"the noise ends at sigma {last:g}, and sigma_end: {end:g} is never reached: with num_stages: {stages} "
            f"that takes {max(stages, 2) + 1} rollouts and 2 stages at least, and this run has {rollouts} rollouts; "
            "train longer, or change num_stages",
            stacklevel=2,
        )


def warn_if_warmup_ends_late(steps: int, args: GRPOConfig) -> None:
    """Warn if a run of ``steps`` ends before its learning rate is reached."""
    if args.warmup_steps >= max(steps, 1) and args.lr_scheduler_type != SchedulerType.CONSTANT:
        warnings.warn(
            f"warmup_steps: {args.warmup_steps:g}, and this run has {steps} steps: it never reaches learning_rate: "
            f"{args.learning_rate:g}; train longer, or use fewer, or a share of all steps below 1, such as 0.1",
            stacklevel=2,
        )


class MetricsFile:
    """Write the file ``metrics.jsonl`` in ``folder``."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE

    def restart(self, kept: Iterable[Mapping[str, object]] = ()) -> None:
        """Begin the file anew with the lines that a resumed run has kept; a new run has none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, "".join(f"{json.dumps(record)}\n" for record in kept))

    def append(self, record: Mapping[str, object]) -> None:
        """Append one record as a line; numbers that JSON does not have (NaN, infinity) become null."""
        finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in record.items()}
        line = json.dumps(finite)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


class QuietProgress(ProgressCallback):
    """Show a progress bar that ends in three numbers, and a line of its own for an evaluation."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if figures := of_evaluation(logs):
            parts = {name.split("/")[2]: value for name, value in figures.items() if name.endswith("/mean")}
            line = ", ".join(f"{name} {value:.3g}" for name, value in parts.items())
            reward = figures[f"{EVALUATION}reward"]
            tqdm.write(f"held-out problems after step {state.global_step}: reward {reward:.3g} ({line})")
        elif self.training_bar is not None:
            shown = {short: f"{logs[name]:.3g}" for name, short in IN_THE_BAR.items() if logs.get(name) is not None}
            if shown:
                self.training_bar.set_postfix(shown)
