"""Read ``metrics.jsonl``, the file with one line for each step of a run, and bring older metric names up to date.

A new name stands here beside its older one for one release. Every reader of metrics and of study tables asks here, so
that what an older version wrote stays readable.
"""

import warnings
from pathlib import Path
from typing import Any

from qerl_recipes.files.json_files import read_lines

FILE = "metrics.jsonl"
EVALUATION = "eval/"  # begins every key but step in an evaluation's line
# Older name -> today's. Of the second half a study's table has one value a run, over all its steps.
RENAMED = {
    "equal_groups": "frac_reward_zero_std",
    "silent_rows": "frac_zero_advantage",
    "logp_mismatch_mean": "logp_diff_mean",
    "logp_mismatch_max": "logp_diff_max",
    "touched_norms": "noisy_norms",
    "reward_area": "mean_reward",
    "mismatch": "mean_logp_diff",
    "without_signal": "mean_frac_reward_zero_std",
    "seconds_a_step": "median_step_seconds",
    "tokens_per_s": "median_rollout_tokens_per_s",
}


def current_name(name: str) -> str:
    """Return today's name of a metric; a name that is not an older one is returned as it is."""
    prefix = EVALUATION if name.startswith(EVALUATION) else ""
    own = name.removeprefix(prefix)
    return prefix + RENAMED.get(own, own)


def requested_name(name: str) -> str:
    """Return today's name of a metric that a user has typed, and warn if it is an older one."""
    current = current_name(name)
    if current != name:
        warnings.warn(
            f"the metric {name} is called {current} now; its old name works for one more release",
            FutureWarning,
            stacklevel=2,
        )
    return current


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl`` under today's names, oldest first; [] if there is no such file.

    A last line without a newline is left out: a killed run leaves one. Raises ValueError for any other line that is
    not a JSON object with a whole number under "step".
    """
    form, steps = 'a JSON object with a whole number under "step"', []
    for place, step in read_lines(path, form, unfinished=False) if path.exists() else ():
        if type(step.get("step")) is not int:
            raise ValueError(f"{place} must be {form}; remove that line to see the rest")
        steps.append({current_name(name): value for name, value in step.items()})
    return steps
