"""The picture of a study: mean over seeds of each arm, and the range of its seeds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from qerl_recipes.study.table import Row

WIDTH = 5  # steps of the running mean


def draw(rows: Sequence[Row], arms: Mapping[str, str], seeds: Sequence[int], path: Path) -> None:
    """Reward and entropy over steps for ``arms``, name -> label in the table; written as PNG to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    metrics = {metric for *_, metric, _ in rows}
    entropy = "sampled_entropy" if "sampled_entropy" in metrics else "entropy"  # of all completions, where it is there
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    for axis, metric, title in zip(axes, ("reward", entropy), ("reward", "entropy, nats a token"), strict=True):
        for number, (arm, label) in enumerate(arms.items()):
            runs: dict[int, dict[int, float]] = defaultdict(dict)
            for name, seed, step, of, value in rows:
                if name == label and of == metric and seed in seeds:
                    runs[seed][step] = value
            steps = sorted(set.intersection(*(set(run) for run in runs.values()))) if runs else []
            if not steps:
                continue
            smooth = [_smooth([run[step] for step in steps]) for run in runs.values()]
            at = list(zip(*smooth, strict=True))  # step -> the values of the seeds
            axis.plot(steps, [sum(values) / len(values) for values in at], color=f"C{number}", label=arm)
            axis.fill_between(steps, [min(v) for v in at], [max(v) for v in at], color=f"C{number}", alpha=0.15, lw=0)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    if axes[0].lines:
        axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean of each value and up to WIDTH - 1 before it."""
    return [sum(values[max(0, i + 1 - WIDTH) : i + 1]) / min(i + 1, WIDTH) for i in range(len(values))]
