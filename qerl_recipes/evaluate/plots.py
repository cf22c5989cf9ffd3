"""Draw the plots of a report, each as SVG text that goes straight into a page.

Figures are made without pyplot, so that drawing one changes no setting of the process. The same numbers give the same
bytes: the ids in an SVG are derived from its title, and no date is written.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np
import pandas
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# A label has the same colour in every plot of every report. Labels that are not in COLOUR_OF take OTHERS in turn.
OTHERS = ("#0b7285", "#e67700", "#a61e4d", "#495057", "#5c940d")
COLOUR_OF = {
    **dict.fromkeys(("base", "rollout"), "#1f6feb"),
    **dict.fromkeys(("with adapter", "training"), "#d9480f"),
    "held out": "#862e9c",
}
SMOOTHING = 5  # steps in the running mean that is drawn over a noisy curve
STYLE = Path(__file__).with_name("report.mplstyle")


@dataclass(frozen=True)
class Accuracy:
    """Hold a bar: accuracy on ``n`` problems, its 95 % interval and the share ``ended``, of 1."""

    task: str
    label: str
    accuracy: float
    low: float
    high: float
    n: int
    ended: float


def colours(labels: Iterable[str]) -> list[str]:
    """Return a colour for each label, from ``COLOUR_OF`` or else from ``OTHERS`` in turn."""
    others = cycle(OTHERS)
    return [COLOUR_OF[label] if label in COLOUR_OF else next(others) for label in labels]


def curves(
    title: str,
    steps: Sequence[int],
    series: Mapping[str, Sequence[float]],
    *,
    smooth: bool = False,
    points: bool = False,
    stairs: bool = False,
) -> str:
    """Return an SVG that plots one or more series against the training step.

    ``smooth`` draws the running mean over the faint raw values. ``points`` marks each value. ``stairs`` keeps a value
    until the next step, as a noise schedule does. Missing values (nan) leave a gap.
    """
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(4.6, 2.7), layout="constrained")
        axes = figure.subplots()
        marker = "o" if points or len(steps) == 1 else None  # a single point would be invisible as a line
        for colour, (label, values) in zip(colours(series), series.items(), strict=True):
            if smooth:
                axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1, marker=marker)
                finite = pandas.Series(values, dtype=float).replace([np.inf, -np.inf], np.nan)
                mean = finite.rolling(SMOOTHING, min_periods=1).mean()
                axes.plot(steps, mean, color=colour, linewidth=1.8, label=label)
            else:
                drawstyle = "steps-post" if stairs else "default"
                axes.plot(steps, values, color=colour, label=label, marker=marker, markersize=4, drawstyle=drawstyle)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if all(v >= 0 or not np.isfinite(v) for values in series.values() for v in values):
            axes.set_ylim(bottom=0)
        if len(series) > 1:
            axes.legend()
        return _svg(figure, title)


def accuracies(title: str, rows: Sequence[Accuracy]) -> str:
    """Return an SVG of accuracies with their 95 % intervals, one bar per row, the first row on top."""
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(9.4, 0.9 + 0.38 * len(rows)), layout="constrained")
        axes = figure.subplots()
        several_tasks = len({row.task for row in rows}) > 1
        labels = [f"{row.task}: {row.label}" if several_tasks else row.label for row in rows]
        names = list(dict.fromkeys(row.label for row in rows))
        colour_of = dict(zip(names, colours(names), strict=True))
        for y, row in enumerate(rows):
            axes.barh(y, row.accuracy, height=0.62, color=colour_of[row.label], alpha=0.85)
            ends = [[row.accuracy - row.low], [row.high - row.accuracy]]
            axes.errorbar(row.accuracy, y, xerr=ends, color=matplotlib.rcParams["text.color"], capsize=4, linewidth=1.3)
            axes.text(row.high + 0.012, y, f"{row.accuracy:.1%}", va="center")
        axes.set_yticks(range(len(rows)), labels)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.08)
        axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        axes.grid(False, axis="y")
        axes.set_title(title)
        return _svg(figure, title)


def _svg(figure: Figure, title: str) -> str:
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]  # drop the XML and DOCTYPE lines, which HTML does not allow inside a page
