"""What ``qerl bench train`` says of what its arms have answered: medians, rates and peaks; a table and a picture."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

GB = 1e9
SHOWN_KERNELS = 12
COLORS = {
    "rollout": "tab:blue",
    "scoring": "tab:cyan",
    "training": "tab:orange",
    "swap": "tab:red",
    "sleep": "tab:purple",
    "rest": "tab:gray",
}
PARTS = tuple(COLORS)  # of a step


def summarize(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each arm that did not fail: medians over all steps but the first of a round, which warms up, and peaks."""
    arms = result["arms"].items()
    return {arm: _arm(result, found) for arm, found in arms if found.get("steps") and "failed" not in found}


def _arm(result: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    steps, pieces = found["steps"], found["training_part"]
    sequences = result["groups"] * result["generations"]
    if counted := _warm(steps):
        seconds = {name: statistics.median(step["seconds"][name] for step in counted) for name in ("step", *PARTS)}
        mismatches = [step["metrics"]["logp_mismatch_mean"] for step in counted]
        summary |= {
            "seconds": seconds,
            "repeats": len(counted),
            "spread": spread([step["seconds"]["step"] for step in counted]),
            "rollout_tokens_per_s": sequences * result["completion"] / seconds["rollout"],
            "training_tokens_per_s": sequences * (result["prompt"] + result["completion"]) / seconds["training"],
            "swap_ms": 1e3 * seconds["swap"],
            "logp_mismatch_mean": statistics.fmean(mismatches) if None not in mismatches else None,
        }
    if counted := _warm(pieces):
        seconds_each = [piece["seconds"] for piece in counted]
        summary["training_part"] = {
            "tokens": counted[0]["tokens"],
            "seconds": statistics.median(seconds_each),
            "repeats": len(counted),
            "spread": spread(seconds_each),
            "tokens_per_s": counted[0]["tokens"] / statistics.median(seconds_each),
            "peak_gb": max(piece["memory"]["allocated"] for piece in pieces) / GB,
        }
    peaks = ("allocated", "reserved", "process")
    summary["peak_gb"] = {name: max(step["memory"][name] for step in steps) / GB for name in peaks}
    return summary


def _warm(answers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    rounds = groupby(answers, key=lambda answer: answer["round"])
    return [answer for _, of_round in rounds for answer in list(of_round)[1:]]


def spread(values: Sequence[float]) -> float | None:
    """How far apart they lie, relative to their median; None of one value, which says nothing of it."""
    return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else None


def around(value: float | None) -> str:
    """A spread as a reader sees it behind a median."""
    return "once" if value is None else f"±{value / 2:.0%}"


def show(result: Mapping[str, Any]) -> None:
    """Print the step, forward and backward alone, and what failed."""
    console = Console(width=150)
    summary = result["summary"]
    if steps := {arm: found for arm, found in summary.items() if "seconds" in found}:
        console.print(_steps(result, steps))
    if parts := {arm: found["training_part"] for arm, found in summary.items() if "training_part" in found}:
        console.print(_training(result, parts))
    for arm, found in result["arms"].items():
        if found.get("profile"):
            console.print(_profile(arm, found["profile"][0]))
    needed = result["groups"] * result["generations"] * (result["prompt"] + result["completion"])
    for arm, found in result["arms"].items():
        if found.get("kv_cache_tokens", needed) < needed:
            console.print(f"{arm}: its KV cache holds {found['kv_cache_tokens']:,} of {needed:,} tokens, so some wait")
        if "failed" in found:
            console.print(f"{arm} failed: {found['failed']}", style="bold red", markup=False, soft_wrap=True)


def title(result: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    return (
        f"{result['shape']} shapes, {result['groups']} groups of {result['generations']}, {result['prompt']} tokens in "
        f"and {result['completion']} out, LoRA rank {result['rank']}, {result['gpu']}, {result['date']}"
    )


def _steps(result: Mapping[str, Any], summary: Mapping[str, Any]) -> Table:
    table = Table(title=f"GRPO step: {title(result)}; arms {result['order']}", title_justify="left")
    table.add_column("seconds\nof a step")
    columns = ["step", "speed", *PARTS, "rollout\ntokens/s", "training\ntokens/s", "swap\nms", "log p\nmismatch"]
    for column in (*columns, "peak GB,\ntorch", "peak GB,\nprocess"):
        table.add_column(column, justify="right", overflow="fold")
    first = next(iter(summary.values()))["seconds"]["step"]
    for arm, found in summary.items():
        seconds = found["seconds"]
        mismatch = found["logp_mismatch_mean"]
        table.add_row(
            arm,
            f"{seconds['step']:.2f} {around(found['spread'])}",
            f"{first / seconds['step']:.2f}x",
            *(f"{seconds[part]:.2f}" for part in PARTS),
            f"{found['rollout_tokens_per_s']:,.0f}",
            f"{found['training_tokens_per_s']:,.0f}",
            f"{found['swap_ms']:.1f}",
            "" if mismatch is None else f"{mismatch:.4f}",
            f"{found['peak_gb']['allocated']:.1f}",
            f"{found['peak_gb']['process']:.1f}",
        )
    return table


def _training(result: Mapping[str, Any], parts: Mapping[str, Any]) -> Table:
    table = Table(title="Forward and backward alone, one packed row", title_justify="left")
    table.add_column("arm")
    for column in ("tokens", "seconds", "tokens/s", "speed", "peak GB, torch"):
        table.add_column(column, justify="right", overflow="fold")
    first = next(iter(parts.values()))["tokens_per_s"]
    for arm, found in parts.items():
        rate = found["tokens_per_s"]
        table.add_row(
            arm,
            f"{found['tokens']:,}",
            f"{found['seconds']:.3f} {around(found['spread'])}",
            f"{rate:,.0f}",
            f"{rate / first:.2f}x",
            f"{found['peak_gb']:.1f}",
        )
    return table


def _profile(arm: str, found: Mapping[str, Any]) -> Table:
    kernels = found["kernels"][:SHOWN_KERNELS]
    table = Table(title=f"{arm}: {found['kernels_ms']:.1f} ms of kernels in forward and backward", title_justify="left")
    table.add_column("ms", justify="right", overflow="fold")
    table.add_column("calls", justify="right", overflow="fold")
    table.add_column("kernel", no_wrap=True, max_width=110)
    for kernel in kernels:
        table.add_row(f"{kernel['ms']:.1f}", f"{kernel['calls']:,}", escape(kernel["name"]))
    return table


def picture(result: Mapping[str, Any], file: Path) -> bool:
    """A bar for each arm, the parts of a step on top of each other -> whether there was anything to draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    summary = {arm: found for arm, found in result["summary"].items() if "seconds" in found}
    if not summary:
        return False
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.7 * len(summary)))
    arms, left = list(summary), [0.0] * len(summary)
    for part in PARTS:
        widths = [summary[arm]["seconds"][part] for arm in arms]
        axis.barh(arms, widths, left=left, color=COLORS[part], label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    first = summary[arms[0]]["seconds"]["step"]
    for row, arm in enumerate(arms):
        seconds = summary[arm]["seconds"]["step"]
        axis.text(left[row], row, f" {seconds:.3g} s, {first / seconds:.2f}x", va="center", fontsize=9)
    axis.set_xlim(0, 1.18 * max(left))
    axis.invert_yaxis()
    axis.set_xlabel("seconds of a GRPO step")
    axis.set_title(title(result), fontsize=9)
    axis.legend(ncols=len(PARTS), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return True
