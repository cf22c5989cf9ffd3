"""The picture and the tables of kernels/README.md: ``python report.py ../results/NVIDIA_H200.json``, a file of run.py.

Writes ``NVIDIA_H200.png`` beside the file and prints two tables in Markdown: ratios, and all times.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"qerl": "tab:red", "bf16": "tab:gray", "marlin": "tab:blue", "humming": "tab:green"}
LABELS = {"qerl": "QeRL", "bf16": "cuBLAS BF16", "marlin": "Marlin FP4", "humming": "Humming"}


def by_shape(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows of each layer by rising M."""
    shapes: dict[str, list[dict]] = {}
    for row in rows:
        shapes.setdefault(row["shape"], []).append(row)
    return {shape: sorted(found, key=lambda row: row["M"]) for shape, found in shapes.items()}


def picture(result: dict, file: Path) -> None:
    """Speed relative to BF16 over the number of tokens, one panel a layer."""
    shapes = by_shape(result["rows"])
    columns = 4
    lines = -(-len(shapes) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4 * columns, 3 * lines), sharex=True, sharey=True, squeeze=False
    )
    for axis, (shape, rows) in zip(axes.flat, shapes.items(), strict=False):
        for name, color in COLORS.items():
            found = [(row["M"], row["us"]["bf16"] / row["us"][name]) for row in rows if name in row["us"]]
            axis.plot(*zip(*found, strict=True), color=color, label=LABELS[name], marker="o", markersize=3)
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
    figure.tight_layout()
    figure.savefig(file, dpi=90)


def best_of_others(us: dict[str, float]) -> float:
    """Microseconds of the fastest of the baselines that were measured."""
    return min(time for name, time in us.items() if name != "qerl")


def ratios(result: dict) -> str:
    """Speed relative to BF16 by number of tokens; in brackets to the best of the baselines, where that is another."""
    tokens = sorted({row["M"] for row in result["rows"]})
    text = [f"| layer (N x K) | {' | '.join(map(str, tokens))} |", "|---" * (len(tokens) + 1) + "|"]
    for shape, rows in by_shape(result["rows"]).items():
        cells = []
        for us in (row["us"] for row in rows):
            to_bf16, to_best = us["bf16"] / us["qerl"], best_of_others(us) / us["qerl"]
            cells.append(f"{to_bf16:.2f}" if to_best == to_bf16 else f"{to_bf16:.2f} ({to_best:.2f})")
        text.append(f"| {shape} {rows[0]['N']} x {rows[0]['K']} | {' | '.join(cells)} |")
    return "\n".join(text)


def table(result: dict) -> str:
    """Microseconds of a call, and ours against the best of the others."""
    text = [
        "| layer | tokens | QeRL | cuBLAS BF16 | Marlin FP4 | Humming | QeRL against the best |",
        "|---|" + "---:|" * 6,
    ]
    for shape, rows in by_shape(result["rows"]).items():
        for row in rows:
            us = row["us"]
            figures = [f"{us[name]:.1f}" if name in us else "" for name in ("qerl", "bf16", "marlin", "humming")]
            text.append(f"| {shape} | {row['M']} | {' | '.join(figures)} | {best_of_others(us) / us['qerl']:.2f} |")
    return "\n".join(text)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    measured = json.loads(source.read_text())
    picture(measured, source.with_suffix(".png"))
    print(ratios(measured), table(measured), sep="\n\n")
