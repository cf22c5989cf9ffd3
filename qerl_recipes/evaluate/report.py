"""Write ``report.html`` for a run: one page with all plots inside it, which needs no network and no JavaScript.

The page shows what the folder holds and says what is missing. So a run that is still training, or that was never
evaluated, has a report too. ``report.html`` beside this module is its template.
"""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from qerl_recipes.evaluate import plots
from qerl_recipes.evaluate.as_trained import command
from qerl_recipes.evaluate.figures import MOST_CUT, episode_rows, noisy, too_many_cut, unscored
from qerl_recipes.evaluate.plots import Accuracy
from qerl_recipes.files.adapter import CONFIG, LAST, STATE_FILE, TENSORS, open_adapter
from qerl_recipes.files.json_files import read_object
from qerl_recipes.files.metrics_file import FILE, read_metrics
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.recipe.keys import current_value

EVALUATION = "evaluation.json"
PAGE = Path(__file__).with_name("report.html")
HOW_TO_TRAIN = "qerl train --config RECIPE.yaml --output_dir {folder}"
AGAIN = "write it again with the command that made it"
MODELS = {"adapter": "with adapter"}  # label in evaluation.json -> name on the page
ARMS = {"qerl_nvfp4": "NVFP4, 4 bits, frozen", "bf16": "BF16, frozen", "nf4": "NF4 of bitsandbytes, 4 bits, frozen"}
NOISE = {
    "both": "in engine and trainer",
    "engine": "in the engine",
    "engine_is": "in the engine, with importance correction",
}
# recipe key -> name on the page, in the order of the page
KEYS = {
    "reward_funcs": "rewards",
    "reward_weights": "their weights",
    "loss_type": "loss",
    "learning_rate": "learning rate",
    "lr_scheduler_type": "its schedule",
    "optim": "optimizer",
    "beta": "KL coefficient (beta)",
    "num_generations": "completions of a prompt",
    "generation_batch_size": "completions of a rollout",
    "max_completion_length": "longest completion, tokens",
    "temperature": "sampling temperature in training",
    "dynamic_sampling": "dynamic sampling",
    "system_prompt": "system prompt",
    "tools": "tools",
    "environments": "environments",
    "max_tool_calling_iterations": "turns with calls, at most",
}
CLIPPED = "completion_clipped"
# rows of the training table: key of metrics.jsonl, name on the page, number format
SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("entropy", "entropy, nats per token", "{:.4f}"),
    ("sigma", "noise sigma", "{:.2e}"),
    ("logp_diff_mean", "mean |log p trainer - log p engine|", "{:.5f}"),
    (CLIPPED, "completions cut at the limit of length", "{:.1%}"),
    ("turns", "turns an episode", "{:.2f}"),
    ("tool_calls", "calls of tools an episode", "{:.2f}"),
    ("tool_failures", "calls that failed", "{:.1%}"),
    ("episodes_cut", "episodes whose tokens ran out with a call open", "{:.1%}"),
    ("environments_lost", "environments lost, of all episodes", "{:.1%}"),
    ("tool_seconds", "tools, seconds a rollout", "{:.2f}"),
    ("rollout_tokens_per_s", "rollout, tokens/s", "{:,.0f}"),
    ("train_tokens_per_s", "training, tokens/s", "{:,.0f}"),
)
EDGE = 5  # steps averaged for "first" and "last"


def write(folder: str | Path) -> Path:
    """Write ``folder/report.html`` from the metrics and evaluations in the folder, and return its path.

    It reads ``metrics.jsonl`` and the newest ``evaluation.json``, in the folder, in ``evaluation/`` or in
    ``evaluation/NAME/``, of which one may be missing. Raises ValueError for a folder with nothing to show, or a damaged
    file.
    """
    folder = Path(folder)
    how_to_train = HOW_TO_TRAIN.format(folder=folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; train into it: {how_to_train}")
    lines, (file, *older) = read_metrics(folder / FILE), _evaluations(folder)
    evaluation, state = read_object(file, AGAIN), _of_run(folder, STATE_FILE)
    how_to_evaluate = command(folder, state)
    if not lines and not evaluation:
        raise ValueError(
            f"{folder} holds neither steps in {FILE} ({how_to_train}) nor {EVALUATION} ({how_to_evaluate}): there "
            "is nothing to report"
        )
    rows = accuracy_rows(file, evaluation)
    metrics = [line for line in lines if not any(key.startswith("eval/") for key in line)]
    held_out = [line for line in lines if any(key.startswith("eval/") for key in line)]
    last = [value for value in values_of(metrics, CLIPPED)[-EDGE:] if math.isfinite(value)]
    title, subtitle = _heading(folder, state, len(metrics))
    places = [place for place in (folder, folder / LAST) if (place / CONFIG).is_file() and (place / TENSORS).is_file()]
    adapters = [open_adapter(place).sha256() for place in places]  # further training may have changed them
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE.read_text("utf-8"))
    html = template.render(
        title=title,
        subtitle=subtitle,
        smoothing=plots.SMOOTHING,
        edge=min(EDGE, len(metrics)),
        accuracy_plot=Markup(plots.accuracies("Accuracy with 95 % intervals", rows)) if rows else "",
        rows=rows,
        of_training=evaluation.get("of_training") or [],
        source=[str(path.relative_to(folder)) for path in (file, *older)],
        unlike=evaluation.get("not_as_in_training") or [],
        is_another_adapter=bool(adapters) and evaluation.get("adapter_sha256") not in (None, *adapters),
        several_tasks=len({row.task for row in rows}) > 1,
        pictures=_pictures(metrics, held_out),
        first_and_last=[
            (name, _mean(metrics[:EDGE], key, form), _mean(metrics[-EDGE:], key, form))
            for key, name, form in SHOWN
            if any(key in step for step in metrics)
        ],
        too_many_cut=[*too_many_cut(evaluation), *unscored(evaluation)],
        episodes=_episodes(evaluation),
        clipped=sum(last) / len(last) if last else 0,
        most_clipped=MOST_CUT,
        longest=(state.get("recipe") or {}).get("max_completion_length"),
        settings=_settings(folder, state, evaluation),
        how_to_train=how_to_train,
        how_to_evaluate=how_to_evaluate,
    )
    write_text(folder / "report.html", html)
    return folder / "report.html"


def _of_run(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object ``name`` in a run's folder, or else in its adapter's; {} if there is neither."""
    return read_object(folder / name, AGAIN) or read_object(folder / LAST / name, AGAIN)


def _evaluations(folder: Path) -> list[Path]:
    """Return the paths of the evaluations in a folder, the newest first; without any, where one would be."""
    places = [folder / EVALUATION, folder / "evaluation" / EVALUATION]
    places += sorted(folder.glob(f"evaluation/*/{EVALUATION}"))
    existing = [file for file in places if file.is_file()]
    return sorted(existing, key=lambda file: file.stat().st_mtime, reverse=True) or places[:1]


def accuracy_rows(path: Path, evaluation: Mapping[str, Any]) -> list[Accuracy]:
    """Return the rows of the accuracy table with pass@k and maj@k; raise ValueError if a figure is missing."""
    rows = []
    try:
        for task, results in evaluation.get("tasks", {}).items():
            for label, result in results.items():
                figures = [("", result["accuracy"], result["ci95"])]
                for kind, name in (("pass_at", "pass@"), ("maj_at", "maj@")):
                    figures += [(f", {name}{k}", of["value"], of["ci95"]) for k, of in result.get(kind, {}).items()]
                for suffix, value, (low, high) in figures:
                    name = MODELS.get(label, label) + suffix
                    rows.append(Accuracy(task, name, value, low, high, result["n"], result["ended"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} does not hold accuracy, ci95, n, ended ({error!r}); evaluate again") from error
    return rows


def _episodes(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each task of episodes its figures, and one problem with the turns of each policy beside each other."""
    parts = []
    for task, policies in evaluation.get("tasks", {}).items():
        if rows := episode_rows(policies):
            problem = (evaluation.get("shown") or {}).get(task) or {"episodes": {}}
            episodes = list(problem["episodes"].values())
            turns = list(itertools.zip_longest(*(episode["turns"] for episode in episodes), fillvalue=("", "")))
            part = {"task": task, "labels": [MODELS.get(label, label) for label in policies], "rows": rows}
            success_at = evaluation.get("acting", {}).get("success_at")
            parts.append({**part, "success_at": success_at, "shown": problem, "episodes": episodes, "turns": turns})
    return parts


def _heading(folder: Path, state: Mapping[str, Any], steps: int) -> tuple[str, str]:
    """Return the title (model and data) and the line below it (configuration, steps, duration, date)."""
    data, base = _data(state.get("recipe") or {}), state.get("base")
    title = f"{Path(base).name}{f' on {data}' if data else ''}" if base else folder.resolve().name
    seconds, date = state.get("seconds") or 0, str(state.get("date") or "")
    minutes = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
    known = [
        folder.resolve().name if base else "",
        str(ARMS.get(state.get("quantization", ""), "")),
        f"{steps} steps" if steps else "no training steps",
        f"trained in {minutes}" if seconds else "",
        f"{date[:10]} {date[11:16]} UTC" if date else "",
    ]
    return title, "; ".join(part for part in known if part)


def _settings(folder: Path, state: Mapping[str, Any], evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings and versions of a run as (name, value) texts; what no file records is left out."""
    recipe, adapter = state.get("recipe") or {}, _of_run(folder, CONFIG)
    arm = state.get("quantization") or evaluation.get("quantization")
    targets = _text(adapter.get("target_modules"))
    rows: list[tuple[str, Any]] = [
        ("model", state.get("base") or evaluation.get("base")),
        ("weights", ARMS.get(str(arm), arm)),
        ("adapter", adapter and f"LoRA, rank {adapter.get('r')}, alpha {adapter.get('lora_alpha')}, on {targets}"),
        ("norms trained", {True: "yes", False: "no"}.get(state.get("train_norms", ""))),
        ("data", _data(recipe)),
        ("noise", _noise(recipe)),
        *((name, recipe.get(key)) for key, name in KEYS.items()),
        ("seed", state.get("seed")),
        ("evaluated with", _decoding(evaluation)),
        ("as in training", [str(word).replace("_", " ") for word in evaluation.get("as_in_training") or []]),
        ("versions", state.get("versions") or evaluation.get("versions")),
    ]
    return [(name, _text(value)) for name, value in rows if value not in (None, "", [], {})]


def _data(recipe: Mapping[str, Any]) -> str | None:
    name, size = recipe.get("dataset_name"), recipe.get("dataset_size")
    return f"{name}, {size} problems" if name and size else name


def _noise(recipe: Mapping[str, Any]) -> str | None:
    mode = current_value("noise_mode", recipe.get("noise_mode"))
    if mode in (None, "none"):
        return mode
    start, end, stages = (recipe.get(key) for key in ("sigma_start", "sigma_end", "num_stages"))
    return f"{NOISE.get(mode, mode)} ({mode}), sigma {start} to {end} in {stages} stages"


def _decoding(evaluation: Mapping[str, Any]) -> str | None:
    sampling = evaluation.get("sampling")
    if not sampling:
        return None
    warm = sampling.get("temperature")
    decoding = f"temperature {warm}, top_p {sampling.get('top_p')}, seed {sampling.get('seed')}" if warm else "greedy"
    longest = {str(tokens) for tokens in (evaluation.get("max_new_tokens") or {}).values() if tokens}
    return decoding + noisy(evaluation) + (f", at most {' or '.join(longest)} tokens" if longest else "")


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def values_of(metrics: list[dict[str, Any]], key: str) -> list[float]:
    """Return each step's value under ``key``, nan where a step has none; empty if no step has a finite one."""
    values = [
        float(step[key]) if isinstance(step.get(key), int | float) and not isinstance(step[key], bool) else math.nan
        for step in metrics
    ]
    return values if any(math.isfinite(v) for v in values) else []


def _pictures(metrics: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> list[Markup]:
    """Return the plots of a training as SVG; one without values is left out."""
    names = dict.fromkeys(
        key for step in metrics for key in step if key.startswith("rewards/") and key.endswith("/mean")
    )
    parts = {key.split("/")[1]: key for key in names} if len(names) > 1 else {}
    has_noise = any(value > 0 for value in values_of(metrics, "sigma"))
    # title, lines of metrics.jsonl, label -> key, options of ``plots.curves``
    panels: list[tuple[str, list[dict[str, Any]], dict[str, str], dict[str, bool]]] = [
        ("Reward", metrics, {"training": "reward"}, {"smooth": True}),
        ("Reward on held-out problems", held_out, {"held out": "eval/reward"}, {"points": True}),
        ("Parts of the reward", metrics, parts, {"smooth": True}),
        ("Entropy (nats per token)", metrics, {"training": "entropy"}, {"smooth": True}),
        ("Noise: sigma on the norm weights", metrics if has_noise else [], {"sigma": "sigma"}, {"stairs": True}),
        ("Trainer and engine: mean |log p difference|", metrics, {"training": "logp_diff_mean"}, {}),
        ("Tokens per second", metrics, {"rollout": "rollout_tokens_per_s", "training": "train_tokens_per_s"}, {}),
        ("Completion length (tokens)", metrics, {"training": "completion_length"}, {"smooth": True}),
        ("Turns and calls an episode", metrics, {"turns": "turns", "calls": "tool_calls"}, {"smooth": True}),
    ]
    drawn = []
    for title, lines, keys, options in panels:
        series = {label: values for label, key in keys.items() if (values := values_of(lines, key))}
        if series:
            drawn.append(plots.curves(title, [line["step"] for line in lines], series, **options))
    # The SVG is safe to mark up: it is made here, and matplotlib has escaped its texts.
    return [Markup(svg) for svg in drawn]


def _mean(steps: list[dict[str, Any]], key: str, form: str) -> str:
    """Format the mean over the steps that have a finite number, and the count of NaN or infinite ones."""
    numbers = [value for value in values_of(steps, key) if math.isfinite(value)]
    not_finite = sum(key in step for step in steps) - len(numbers)
    written = [form.format(sum(numbers) / len(numbers))] if numbers else []
    return " ".join(written + ([f"({not_finite} not finite)"] if not_finite else []))
