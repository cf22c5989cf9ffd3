"""Draw the pictures of the ledger from its result files; ``ledger.py`` calls ``draw_all``."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tables import by_shape, configuration, read

COLORS = {"qerl": "tab:red", "bf16": "tab:gray", "marlin": "tab:blue", "humming": "tab:green"}
LABELS = {"qerl": "QeRL", "bf16": "cuBLAS BF16", "marlin": "Marlin FP4", "humming": "Humming"}
ARMS = {
    "bf16": "tab:gray",
    "bf16_merged": "black",
    "nf4": "tab:blue",
    "qerl_nvfp4": "tab:red",
    "stock_nvfp4": "tab:orange",
}
PARTS = {"rollout": "tab:blue", "scoring": "tab:cyan", "training": "tab:orange"}


def draw_all(folder: Path) -> None:
    """Write all pictures into ``folder``."""
    kernels(read("NVIDIA_H200", folder), folder / "NVIDIA_H200.png")
    step_times(
        {
            "7B, 80 GB limit": read("train_7B_80GB_NVIDIA_H200", folder),
            "14B, no limit": read("train_14B_NVIDIA_H200", folder),
        },
        folder / "step_NVIDIA_H200.png",
    )
    rollouts(
        {
            "7B, 128 in, 128 out": read("rollout_7B_NVIDIA_H200", folder),
            "7B, 256 in, 512 or 1,024 out": read("rollout_7B_interleaved_NVIDIA_H200", folder),
            "32B, 128 in, 128 out": read("rollout_32B_NVIDIA_H200", folder),
        },
        folder / "rollout_NVIDIA_H200.png",
    )


def save(figure: Any, file: Path) -> None:
    """Write the figure without the name and version of its program, so that the same data give the same file."""
    figure.tight_layout()
    figure.savefig(file, dpi=90, metadata={"Software": None})
    plt.close(figure)


def kernels(result: dict[str, Any], file: Path) -> None:
    """Draw speed relative to cuBLAS BF16 over the number of tokens, one panel a layer."""
    shapes, columns = by_shape(result["rows"]), 4
    lines = -(-len(shapes) // columns)
    size = (4 * columns, 3 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    for axis, (shape, rows) in zip(axes.flat, shapes.items(), strict=False):
        for name, color in COLORS.items():
            points = [(row["M"], row["us"]["bf16"] / row["us"][name]) for row in rows if name in row["us"]]
            axis.plot(*zip(*points, strict=True), color=color, label=LABELS[name], marker="o", markersize=3)
        axis.set_title(f"{shape}  {rows[0]['N']} x {rows[0]['K']}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(shapes) :]:
        axis.axis("off")
    for axis in axes[:, 0]:
        axis.set_ylabel("speed, BF16 = 1")
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    axes[0, 0].legend(fontsize=8)
    save(figure, file)


def step_times(results: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw the seconds of a GRPO step, a bar a configuration, its parts on top of each other."""
    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 3.2))
    for axis, (title, result) in zip(axes, results.items(), strict=True):
        arms = [arm for arm in ("nf4", "bf16", "qerl_nvfp4") if arm in result["summary"]]
        names = [configuration(arm) for arm in arms]
        starts = [0.0] * len(arms)
        seconds = [result["summary"][arm]["seconds"] for arm in arms]
        for part, color in PARTS.items():
            widths = [times[part] for times in seconds]
            axis.barh(names, widths, left=starts, color=color, label=part)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for place, times in enumerate(seconds):
            axis.text(times["step"], place, f" {times['step']:.1f} s", va="center")
        axis.set_xlim(0, 1.2 * max(times["step"] for times in seconds))
        axis.set_title(title)
        axis.set_xlabel("seconds of a step")
    axes[0].legend(fontsize=8, loc="upper right")
    save(figure, file)


def rollouts(results: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw tokens per second over the number of sequences, one panel a file, one line a configuration."""
    figure, axes = plt.subplots(1, len(results), figsize=(4.4 * len(results), 3.4))
    for axis, (title, result) in zip(axes, results.items(), strict=True):
        for arm, color in ARMS.items():
            if cases := result["arms"].get(arm, {}).get("batch"):
                sizes, rates = [int(size) for size in cases], [case["tokens_per_s"] for case in cases.values()]
                axis.plot(sizes, rates, color=color, label=configuration(arm), marker="o", markersize=4)
        axis.set(title=title, xlabel="sequences", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.set_xticks(
            ticks := sorted({int(size) for arm in result["arms"].values() for size in arm.get("batch", ())})
        )
        axis.set_xticklabels(map(str, ticks))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("tokens/s")
    save(figure, file)
