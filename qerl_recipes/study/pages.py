"""Write the pages of studies: one template for a study, one for a folder of studies, the plan, and the plot."""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader

from qerl_recipes.study.plan import SWEEP_GAIN, Study, StudyError
from qerl_recipes.study.results import ACCURACY, CUT, PLANNED, comparisons, counted, cut, hours, labels, of_arm
from qerl_recipes.study.statistics import ALPHA, NOT_SIGNIFICANT, POWER, T_ONLY, compare, holm, visible

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True)
CALLS = "calls"  # of tools, the mean of an episode
CURVES, COMPARISONS, CONFIGURATIONS = "curves_best.png", "comparisons.csv", "configurations.csv"
SMOOTHING = 5  # steps of the running mean in a plot
SCHEDULES = ("sigma", "learning_rate")  # drawn as they are, since they are set
OF_CLAIMS = (
    f"Supported: the t test, corrected by Holm over the study's claims, is below {100 * ALPHA:.0f} % that way. "
    "Not supported: the 95 % interval excludes the planned margin. Of a loss of at most the margin, the interval alone "
    "decides. †: the t test only; the exact test of sign flips does not say so."
)


def _filled(template: str, **given: Any) -> str:
    return TEMPLATES.get_template(template).render(**given).strip() + "\n"


def page(study: Study, rows: pd.DataFrame, values: pd.DataFrame, found: pd.DataFrame, file: Path, *options: str) -> str:
    """Return the page of a study run with ``options``: question, answer, table of the ``found``, plot, commands."""
    return _filled(
        "page.jinja",
        title=file.stem.replace("_", " "),
        study=study,
        answer=answered(study, values, found),
        comparisons="\n".join(_comparisons(study, values, found)),
        metrics=" and ".join(plotted(study, rows)).replace("_", " "),
        curves=CURVES,
        smoothing=SMOOTHING,
        told=" ".join([*([study.about.strip()] if study.about else []), *_taken(study), progress(study, rows, values)]),
        # reward and judge read the last number of an answer that does not end all the same
        cut=[_seeds_cut(arm, shares) for arm, shares in cut(values).groupby(level=0, sort=False)],
        most=percent(CUT),
        found=len(found),
        command=shlex.join(["qerl", "study", str(file), *options]),
    )


def _seeds_cut(arm: str, shares: pd.Series) -> str:
    """Return the seed of an arm whose completions are cut, or the number of such seeds, and the largest share."""
    seeds, most = shares.index.get_level_values(1), percent(shares.max())
    return f"{arm} seed {seeds[0]} ({most})" if len(seeds) == 1 else f"{len(seeds)} of {arm} (up to {most})"


def _comparisons(study: Study, values: pd.DataFrame, found: pd.DataFrame) -> list[str]:
    """Return the table of the planned comparisons; without any, that of the configurations."""
    names = labels(study, values)["best"]
    planned = found[found.kind == PLANNED]
    if planned.empty:
        arms = [names[arm] for arm in study.arms if arm in names]
        means = {arm: _before_and_after(study, values, ACCURACY, arm, study.seeds) for arm in arms}
        return markdown(pd.DataFrame({"configuration": means.keys(), "accuracy, %": means.values()}))
    shown = pd.DataFrame({"a": planned.a, "b": planned.b})
    if planned.seeds.nunique() > 1:
        shown["seeds"] = planned.seeds.astype(int)
    bound = study.afterwards.two_states
    judged = {arm: set(of_arm(values, ACCURACY, arm, study.seeds).index) for arm in (*planned.a, *planned.b)}
    seeds = [judged[a] & judged[b] for a, b in zip(planned.a, planned.b, strict=True)]
    for metric, column in ((ACCURACY, "accuracy {}, %"), (CALLS, "calls {}")):
        for side in ("a", "b") if metric in values else ():
            of_side = zip(planned[side], seeds, strict=True)
            shown[column.format(side)] = [_before_and_after(study, values, metric, *of) for of in of_side]
    if bound is None:
        shown["a - b, points (95 %)"] = [points(row) for row in planned.to_dict("records")]
    else:
        for side in ("a", "b"):
            shown[f"runs of {side} above {percent(bound)}"] = planned[f"above_{side}"].astype(int)
    shown["p (Holm)"] = [_p(row.p_holm, row.verdict) for row in planned.itertuples()]
    return [*markdown(shown), "", _how_compared(study, values)]


def _p(corrected: float, verdict: str) -> str:
    """Return a corrected p: bold where it is significant, with a dagger where the exact test does not say so."""
    shown = f"{corrected:.3f}"
    return shown if verdict == NOT_SIGNIFICANT else f"**{shown}**{'†' * verdict.endswith(T_ONLY)}"


def _how_compared(study: Study, values: pd.DataFrame) -> str:
    """Return how the table of comparisons was made, and what its seeds can show."""
    found, made = comparisons(study, values), len(study.comparisons)
    seeds, spreads = max(c.seeds for c in found), sorted(pd.Series(c.differences).std() for c in found)
    holm_over = f", Holm over {made}" if made > 1 else ""
    text = f"Before→after training{f', {seeds} seeds' if len({c.seeds for c in found}) == 1 else ''}"
    if study.sweep is not None:
        text += f", each configuration at its best {study.sweep.key} (@)"
    if study.afterwards.two_states is not None:
        return (
            f"{text}. Fisher's exact test of the counts{holm_over}, chosen afterwards: runs end in two states, which "
            "the planned t test does not fit."
        )
    text += f". Paired t test{holm_over}; below {percent(ALPHA)} in bold."
    if any(c.verdict().endswith(T_ONLY) for c in found):
        text += f" †: the exact test cannot go below {2.0 ** (1 - seeds):.2g}."
    if (least := 100 * visible(spreads[len(spreads) // 2], seeds, made)) < 1e-9:
        return f"{text} The seeds do not differ, which leaves open what they could detect."
    return f"{text} Detectable at {percent(POWER)} power: {least:.1f} points."


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _before_and_after(study: Study, values: pd.DataFrame, metric: str, label: str, seeds: Iterable[int]) -> str:
    """Return an arm's mean of accuracy, in percent, or of calls: before training, and after it over ``seeds``."""
    scale, digits, missing = (100, 1, "not evaluated") if metric == ACCURACY else (1, 2, "")
    of = {f"base_{metric}": study.seeds, metric: seeds}  # the base is judged beside one seed
    before, after = (of_arm(values, name, label, wanted).mean() for name, wanted in of.items())
    parts = [f"{scale * value:.{digits}f}" for value in (before, after) if pd.notna(value)]
    return "→".join(parts) if pd.notna(after) else missing


def _taken(study: Study) -> list[str]:
    """Name the configurations that another study has run."""
    if study.taken is None:
        return []
    pairs = ", ".join(arm if arm == label else f"{arm} is {label}" for arm, label in study.taken.arms.items())
    return [f"Taken from {study.taken.study}, which has made the same runs: {pairs}."]


def progress(study: Study, rows: pd.DataFrame, values: pd.DataFrame) -> str:
    """Return how many of a study's runs the table has, and what they took."""
    there, total = counted(study, values)
    slash = "/" if len(labels(study, values)["best"]) == len(study.arms) else " of at most "
    return f"{', '.join([f'{there}{slash}{total} runs', *_cost(hours(rows))])}."


def _cost(by_device: Mapping[str, float]) -> list[str]:
    short = {device: device.removeprefix("NVIDIA ").split()[0] for device in sorted(by_device)}
    return [f"{by_device[device]:.1f} {name}-hours" for device, name in short.items()]


def points(row: Mapping[str, float]) -> str:
    """Return a difference with its interval: of accuracies in percentage points."""
    scale, form = (100, "{:+.1f}") if is_accuracy(str(row["metric"])) else (1, "{:+.3g}")
    mean, low, high = (form.format(scale * row[key]) for key in ("difference", "low", "high"))
    return f"{mean} ({low} to {high})"


def is_accuracy(metric: str) -> bool:
    """Return True if differences of a metric are percentage points."""
    return metric.startswith(ACCURACY) or metric == SWEEP_GAIN


def effect(row: Mapping[str, float]) -> str:
    """Return what was measured of a comparison: its difference, or the counts of two states."""
    if pd.notna(row.get("above_a")):
        return f"{row['above_a']:.0f} and {row['above_b']:.0f} of {row['seeds']:.0f} runs"
    unit = " points" if is_accuracy(str(row["metric"])) else ""
    mean, interval = points(row).split(" ", 1)
    return f"{mean}{unit} {interval}"


def answered(study: Study, values: pd.DataFrame, found: pd.DataFrame) -> str:
    """Return the answer with its figures, "" while one is missing; raise StudyError for a name that is none."""
    names = labels(study, values)["best"]
    claims = {claim.claim for claim in (*study.claims, *study.afterwards.claims)}
    figures = {}
    for what in re.findall(r"\{([^{}]+)\}", study.afterwards.answer):
        arm, claim, pair = what.removeprefix("base "), what.removeprefix("claim: "), tuple(what.split(" - "))
        if arm in study.arms:
            metric = ACCURACY if what == arm else f"base_{ACCURACY}"
            accuracies = of_arm(values, metric, names.get(arm, ""), study.seeds)
            shown = [f"{100 * accuracies.mean():.1f} %"] if len(accuracies) else []
        elif claim != what and claim in claims:
            shown = [effect(row) for row in found[found.claim == claim].to_dict("records") if row.get("seeds", 0) > 0]
        elif (gains := what.removeprefix("gain of ")) in study.arms and gains != what:
            shown = _gain(study, values, names.get(gains, ""))
        elif pair in study.comparisons:
            row = found[(found.kind == PLANNED) & (found.a == names.get(pair[0])) & (found.b == names.get(pair[1]))]
            shown = [effect(row) for row in row.to_dict("records")]
        else:
            raise StudyError(f"afterwards.answer: {{{what}}} names no arm, planned pair or claim of this study")
        if not shown:
            return ""
        figures[what] = shown[0]
    return re.sub(r"\{([^{}]+)\}", lambda match: figures[match[1]], study.afterwards.answer.strip())


def _gain(study: Study, values: pd.DataFrame, label: str) -> list[str]:
    """Return by how much training raised an arm's accuracy over the base's mean, with its interval over seeds."""
    after, before = (of_arm(values, metric, label, study.seeds) for metric in (ACCURACY, f"base_{ACCURACY}"))
    found = compare((label, label), after, pd.Series(before.mean(), index=after.index))
    return [] if found is None else [effect(asdict(found) | {"metric": ACCURACY})]


def markdown(table: pd.DataFrame) -> list[str]:
    rows = [list(table.columns), ["---"] * table.shape[1], *table.astype(str).to_numpy().tolist()]
    return [f"| {' | '.join(row)} |".replace(" --- ", "---") for row in rows]


def overview(
    folder: Path, found: Mapping[Path, tuple[Study, pd.DataFrame, pd.DataFrame]], tables: Mapping[Path, pd.DataFrame]
) -> str:
    """Return the page over all studies of a folder: every question and claim, and how to run one."""
    run = {file: of for file, of in found.items() if len(of[1])}
    counts = [counted(study, values)[0] for study, _, values in run.values()]
    cost = pd.DataFrame([hours(rows) for _, rows, _ in run.values()]).sum().to_dict()
    planned = sum(len(study.comparisons) for study, *_ in run.values())
    return _filled(
        "overview.jinja",
        held=", ".join([f"{sum(counts)} runs", *_cost(cost)]),
        example=next(iter(run or found)),
        where=os.path.relpath(folder),
        run=run,
        waiting=", ".join(f"[{file.stem}]({file.name})" for file in found if file not in run),
        planned=planned,
        **_significant(tables, planned),
        claims=_claims(found, tables),
        of_claims=OF_CLAIMS,
    )


def _significant(tables: Mapping[Path, pd.DataFrame], planned: int) -> dict[str, Any]:
    """Return how many planned comparisons are significant by study, and which are if corrected over all studies."""
    if not tables:
        return {}
    made = pd.concat([of[of.kind == PLANNED].assign(study=file.stem) for file, of in tables.items()])
    left = made[np.array(holm(made.p.tolist(), planned)) < ALPHA]
    names = [f"{row.a} - {row.b} of {row.study}" for row in left.itertuples()]
    return {"significant": int((made.p_holm < ALPHA).sum()), "left": names}


def _claims(
    found: Mapping[Path, tuple[Study, pd.DataFrame, pd.DataFrame]], tables: Mapping[Path, pd.DataFrame]
) -> list[tuple[str, list[str]]]:
    """Return the planned claims by verdict, each with the studies that say so; what is supported comes first."""
    rows = pd.concat(
        [of[of.kind == "claim"].assign(study=file.stem) for file, of in tables.items()] or [pd.DataFrame()]
    )
    untested = {claim: why for study, *_ in found.values() for claim, why in study.afterwards.untested.items()}
    said: dict[str, list[str]] = {}
    for (verdict, claim), of in rows.groupby(["verdict", "claim"], sort=False) if len(rows) else ():
        said.setdefault(verdict.replace(T_ONLY, "†"), []).append(f"{claim} ({', '.join(of.study)})")
    if untested:
        said["not tested"] = [f"{claim} ({why})" for claim, why in untested.items()]
    return sorted(said.items(), reverse=True)


def outline(study: Study, file: Path) -> str:
    """Return the plan as Markdown: what a study would run, and how it would be judged."""
    arms = {
        "arm": study.arms.keys(),
        "keys over the recipe's": [_listed(own, json.dumps) for own in study.arms.values()],
    }
    return _filled(
        "plan.jinja",
        file=file,
        study=study,
        keys="\n".join(markdown(pd.DataFrame(arms))),
        values=", ".join(f"{value:g}" for value in (study.sweep.values if study.sweep else ())),
        taken=_taken(study),
        evaluations=[(name, _listed(options)) for name, options in study.evaluations.items()],
        pairs=", ".join(f"{a} - {b}" for a, b in study.comparisons),
        alpha=f"{ALPHA:.0%}",
        of_claims=OF_CLAIMS,
    )


def _listed(keys: Mapping[str, Any], written: Callable[[Any], str] = str) -> str:
    return ", ".join(f"{key}: {written(value)}" for key, value in keys.items())


def plotted(study: Study, rows: pd.DataFrame) -> list[str]:
    """Return the metrics that a study's plot shows: by default the reward, and the entropy of all completions."""
    entropy = "sampled_entropy" if (rows.metric == "sampled_entropy").any() else "entropy"
    return list(study.afterwards.plot.metrics) or ["reward", entropy]


def draw(study: Study, rows: pd.DataFrame, values: pd.DataFrame, path: Path) -> None:
    """Write as PNG the plot of a study: for each arm the mean and the range of its seeds over the steps."""
    from matplotlib.figure import Figure

    names, metrics = labels(study, values)["best"], plotted(study, rows)
    figure = Figure(figsize=(5.5 * len(metrics), 3.8), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        for number, arm in enumerate(study.arms):
            of = rows[(rows.arm == names.get(arm)) & (rows.metric == metric) & rows.seed.isin(study.seeds)]
            if of.empty or (study.afterwards.plot.arms and arm not in study.afterwards.plot.arms):
                continue
            runs = of.pivot_table(index="step", columns="seed", values="value").dropna()
            if metric not in SCHEDULES:
                runs = runs.rolling(SMOOTHING, min_periods=1).mean()
            style = "steps-post" if metric in SCHEDULES else "default"
            panel.plot(runs.index, runs.mean(axis=1), color=f"C{number}", label=arm, drawstyle=style)
            panel.fill_between(runs.index, runs.min(axis=1), runs.max(axis=1), color=f"C{number}", alpha=0.15, lw=0)
        panel.set_title(metric.replace("_", " "), loc="left", fontsize=10)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    if panels[0].lines:
        panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
