"""The figures of ``qerl bench train`` from what its arms have answered: medians, rates, peaks, and the goals."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OURS, PARTS = "qerl_nvfp4", ("rollout", "scoring", "training", "swap", "sleep", "rest")
GB = 1e9


class Goal(NamedTuple):
    """A figure, what it must be and what it should be; a ``ceiling`` is better the lower it is."""

    what: str
    value: float
    must: float
    aim: float
    ceiling: bool = False

    @property
    def is_met(self) -> bool:
        return self.value <= self.must if self.ceiling else self.value >= self.must

    @property
    def missed_by(self) -> float:
        """Share of ``must``; 0 where it is met."""
        return 0.0 if self.is_met else abs(self.value - self.must) / self.must


def summarize(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each arm that did not fail: medians over all steps but the first, which warms up, and peaks of memory."""
    arms = result["arms"].items()
    return {arm: _arm(result, found) for arm, found in arms if found["steps"] and "failed" not in found}


def _arm(result: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    steps, pieces = found["steps"], found["training_part"]
    sequences = result["groups"] * result["generations"]
    if counted := steps[1:]:
        seconds = {name: statistics.median(step["seconds"][name] for step in counted) for name in ("step", *PARTS)}
        mismatches = [step["metrics"]["logp_mismatch_mean"] for step in counted]
        summary |= {
            "seconds": seconds,
            "spread": _spread([step["seconds"]["step"] for step in counted]),
            "rollout_tokens_per_s": sequences * result["completion"] / seconds["rollout"],
            "training_tokens_per_s": sequences * (result["prompt"] + result["completion"]) / seconds["training"],
            "swap_ms": 1e3 * seconds["swap"],
            "logp_mismatch_mean": statistics.fmean(mismatches) if None not in mismatches else None,
        }
    if counted := pieces[1:]:
        seconds_each = [piece["seconds"] for piece in counted]
        summary["training_part"] = {
            "tokens": counted[0]["tokens"],
            "seconds": statistics.median(seconds_each),
            "spread": _spread(seconds_each),
            "tokens_per_s": counted[0]["tokens"] / statistics.median(seconds_each),
            "peak_gb": max(piece["memory"]["allocated"] for piece in pieces) / GB,
        }
    summary["peak_gb"] = {
        **{name: max(step["memory"][name] for step in steps) / GB for name in ("allocated", "reserved")},
        "process": max([found["held_bytes"], *(step["process_bytes"] for step in steps)]) / GB,
    }
    return summary


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def goals(result: Mapping[str, Any]) -> list[Goal]:
    """What this project wants of its own arm, where the result can tell."""
    summary = result["summary"]
    ours = summary.get(OURS)
    if ours is None or result["driver"] is None:  # without a GPU
        return []
    found = []
    others = (("bf16", "BF16", 1.3, 1.8), ("nf4", "NF4", 2.0, 3.0))
    for arm, name, must, aim in others:
        if "seconds" in ours and "seconds" in summary.get(arm, {}):
            ratio = summary[arm]["seconds"]["step"] / ours["seconds"]["step"]
            found.append(Goal(f"speed of a whole step against {name}", ratio, must, aim))
    if "training_part" in ours and "training_part" in summary.get("bf16", {}):
        ratio = summary["bf16"]["training_part"]["seconds"] / ours["training_part"]["seconds"]
        found.append(Goal("speed of forward and backward alone against BF16", ratio, 0.9, 1.0))
    if ours.get("logp_mismatch_mean") is not None:
        found.append(Goal("mean log-probability mismatch", ours["logp_mismatch_mean"], 5e-3, 2e-3, True))
    if (limit := {"7B": 10.0, "32B": 30.0}.get(result["shape"])) and "swap_ms" in ours:
        found.append(Goal("adapter swap, ms", ours["swap_ms"], limit, limit, True))
    if result["shape"] == "32B":
        found.append(Goal("peak memory of the process, GB", ours["peak_gb"]["process"], 80.0, 45.0, True))
    return found
