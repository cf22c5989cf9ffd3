"""Makes ``report.html`` of a run: one page that needs no network and no JavaScript, with every picture inside it.

It shows what is in the folder and says what is not: a run that is still training, or was never evaluated, has a report.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from qerl_recipes import plots
from qerl_recipes.plots import Accuracy
from qerl_recipes.report_page import PAGE

METRICS, EVALUATION, SUMMARY, STATE, ADAPTER_CONFIG = (
    "metrics.jsonl",
    "evaluation.json",
    "summary.json",
    "qerl_state.json",
    "adapter_config.json",
)
HOW_TO_TRAIN = "qerl train --config RECIPE.yaml --output_dir {folder}"
HOW_TO_EVALUATE = "qerl evaluate BASE --adapter {folder} --tasks TASK --output-dir {folder}"

# in the table: key of metrics.jsonl, what a person calls it, how to write it
SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("entropy", "entropy, nats per token", "{:.4f}"),
    ("sigma", "noise sigma", "{:.2e}"),
    ("logp_mismatch_mean", "mean |log p trainer - log p engine|", "{:.5f}"),
    ("rollout_tokens_per_s", "rollout, tokens/s", "{:,.0f}"),
    ("train_tokens_per_s", "training, tokens/s", "{:,.0f}"),
)
EDGE = 5  # steps averaged for "first" and "last"


class ReportError(ValueError):
    """A folder of which no report can be made; the message names the file and the command that writes it."""


def write(folder: str | Path) -> Path:
    """Write ``folder/report.html`` from the metrics and evaluations there, and return its path.

    Reads ``metrics.jsonl`` (one JSON object a step), ``evaluation.json`` and, for the settings, ``summary.json``,
    ``qerl_state.json`` and ``adapter_config.json``; each may be missing, but not both of the first two.

    Raises ReportError if the folder does not exist, holds nothing to show, or a file in it is damaged. The page that
    was there before stays until the new one is whole.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ReportError(f"there is no folder {folder}; train into it: {HOW_TO_TRAIN.format(folder=folder)}")
    metrics = read_metrics(folder / METRICS)
    evaluation, summary = read_object(folder / EVALUATION), read_object(folder / SUMMARY)
    if not metrics and not evaluation:
        raise ReportError(
            f"{folder} holds neither steps in {METRICS} ({HOW_TO_TRAIN.format(folder=folder)}) "
            f"nor {EVALUATION} ({HOW_TO_EVALUATE.format(folder=folder)}): there is nothing to report"
        )
    rows = accuracy_rows(folder / EVALUATION, evaluation)
    html = _page(folder, metrics, rows, settings(folder, evaluation, summary))
    return _write_whole(folder / "report.html", html)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a ``metrics.jsonl``, oldest first; none if there is no such file.

    A last line without its end is what a killed run leaves, and is left out. Raises ReportError for any other line
    that is not a JSON object with a whole number under "step".
    """
    if not path.exists():
        return []
    *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
    steps = []
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)
        except json.JSONDecodeError as error:
            raise ReportError(
                f"{path}, line {number} is not JSON: {error}; remove that line to see the rest"
            ) from error
        if not isinstance(step, dict) or type(step.get("step")) is not int:
            raise ReportError(f'{path}, line {number} must be a JSON object with a whole number under "step"')
        steps.append(step)
    return steps


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file. Raises ReportError if it holds anything else."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} is damaged ({error}); write it again with the command that made it") from error
    if not isinstance(found, dict):
        raise ReportError(f"{path} must hold a JSON object, not {type(found).__name__}")
    return found


def accuracy_rows(path: Path, evaluation: Mapping[str, Any]) -> list[Accuracy]:
    """The rows of the accuracy table, task by task, in the order of ``evaluation.json``."""
    try:
        return [
            Accuracy(task, label, result["accuracy"], *_interval(result["ci95"]), result["n"])
            for task, results in evaluation.get("tasks", {}).items()
            for label, result in results.items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(
            f"{path} does not hold accuracy, ci95 and n for each task and model ({error!r}); evaluate again"
        ) from error


def _interval(ends: list[float]) -> tuple[float, float]:
    low, high = ends
    return low, high


def values_of(metrics: list[dict[str, Any]], key: str) -> list[float]:
    """One value a step, nan where a step has none; empty if no step has a number under this key."""
    values = [
        float(step[key]) if isinstance(step.get(key), int | float) and not isinstance(step[key], bool) else math.nan
        for step in metrics
    ]
    return values if any(math.isfinite(v) for v in values) else []


def settings(folder: Path, evaluation: Mapping[str, Any], summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was run and with which versions, as (name, value), each from the file that states it."""
    state = read_object(folder / STATE) or read_object(folder / "adapter" / STATE)
    adapter = read_object(folder / ADAPTER_CONFIG) or read_object(folder / "adapter" / ADAPTER_CONFIG)
    found: dict[str, str] = {}
    for name, key in (("LoRA rank", "r"), ("LoRA alpha", "lora_alpha"), ("LoRA targets", "target_modules")):
        if key in adapter:
            value = adapter[key]
            found[name] = ", ".join(sorted(value)) if isinstance(value, list) else str(value)
    for source in (state, {k: v for k, v in evaluation.items() if k != "tasks"}, summary):
        found.update(_flat({k: v for k, v in source.items() if k not in ("accuracy", "ci95")}))
    return list(found.items())


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as ``outer.inner: value``; long lists are counted instead of written out."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{name}."))
        elif isinstance(value, list) and len(value) > 12:
            flat[name] = f"{len(value)} values"
        elif value is not None:
            flat[name] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return flat


def _pictures(metrics: list[dict[str, Any]]) -> list[Markup]:
    steps = [step["step"] for step in metrics]

    def series(**keys: str) -> dict[str, list[float]]:
        found = {label.replace("_", " "): values_of(metrics, key) for label, key in keys.items()}
        return {label: values for label, values in found.items() if values}

    panels: list[tuple[str, dict[str, list[float]], dict[str, bool]]] = [
        ("Reward", series(reward="reward"), {"smooth": True}),
        ("Entropy (nats per token)", series(entropy="entropy"), {"smooth": True}),
        ("Noise: sigma on the norm weights", series(sigma="sigma"), {"stairs": True}),
        ("Trainer and engine: mean |log p difference|", series(mean="logp_mismatch_mean"), {}),
        ("Tokens per second", series(rollout="rollout_tokens_per_s", training="train_tokens_per_s"), {}),
        ("Completion length (tokens)", series(length="completion_length"), {"smooth": True}),
    ]
    # our own SVG, whose texts matplotlib has escaped
    return [Markup(plots.curves(title, steps, found, **how)) for title, found, how in panels if found]


def _first_and_last(metrics: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    table = []
    for key, name, form in SHOWN:
        values = [v for v in values_of(metrics, key) if math.isfinite(v)]
        if values:
            first, last = values[:EDGE], values[-EDGE:]
            table.append((name, form.format(sum(first) / len(first)), form.format(sum(last) / len(last))))
    return table


def _page(folder: Path, metrics: list[dict[str, Any]], rows: list[Accuracy], facts: list[tuple[str, str]]) -> str:
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(PAGE)
        .render(
            name=folder.resolve().name,
            steps=len(metrics),
            last_step=metrics[-1]["step"] if metrics else None,
            edge=min(EDGE, len(metrics)),
            accuracy_plot=Markup(plots.accuracies("Accuracy with 95 % intervals", rows)) if rows else "",
            rows=rows,
            several_tasks=len({row.task for row in rows}) > 1,
            pictures=_pictures(metrics),
            first_and_last=_first_and_last(metrics),
            settings=facts,
            how_to_train=HOW_TO_TRAIN.format(folder=folder),
            how_to_evaluate=HOW_TO_EVALUATE.format(folder=folder),
        )
    )


def _write_whole(path: Path, text: str) -> Path:
    """Write beside the target and rename, so that a reader finds the old page or the new one, never half of one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", encoding="utf-8", delete=False) as temporary:
        try:
            temporary.write(text)
            temporary.flush()
            os.fsync(temporary.fileno())
            os.chmod(temporary.name, 0o644)
            os.replace(temporary.name, path)
        except BaseException:
            os.unlink(temporary.name)
            raise
    return path
