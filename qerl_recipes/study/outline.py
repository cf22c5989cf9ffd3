"""``qerl study FILE --dry-run``: what a study would run and how it would be judged, with every arm's keys checked."""

import json
from pathlib import Path

from qerl_recipes.study.page import OF_CLAIMS, of_others
from qerl_recipes.study.plan import Claim, Study
from qerl_recipes.study.statistics import ALPHA


def outline(study: Study, file: Path) -> str:
    """The plan as Markdown. ``file`` is where it was read from."""
    sweep, arms, seeds = study.sweep, len(study.own_arms), len(study.seeds)
    lines = [f"# {file}", "", *([study.about.strip(), ""] if study.about else []), f"Recipe: {study.recipe}", ""]
    lines += ["| arm | keys over the recipe's |", "|---|---|"]
    lines += [
        f"| {arm} | {', '.join(f'{k}: {json.dumps(v)}' for k, v in keys.items())} |" for arm, keys in study.arms.items()
    ]
    runs = [f"{arms} arms x {seeds} seeds ({_listed(study.seeds)}) = {arms * seeds}"]
    if sweep is not None:
        tried = arms * len(sweep.values) * len(sweep.seeds)
        runs[0] += f", each arm at its own best {sweep.key}"
        runs.insert(
            0,
            f"first {arms} arms x {len(sweep.values)} values of {sweep.key} ({_listed(sweep.values)}) x "
            f"{len(sweep.seeds)} seeds ({_listed(sweep.seeds)}) = {tried}, for the best value of each arm",
        )
        if sweep.common is not None:
            runs.append(
                f"and at {sweep.key} {sweep.common:g} for all, where that is not the best: up to {arms * seeds}"
            )
    lines += [
        "",
        "Runs:",
        "",
        *(f"* {text}" for text in runs),
        "",
        *of_others(study),
        "Evaluations, after each run:",
        "",
    ]
    for name, options in study.evaluations.items():
        told = ", ".join(f"{key}: {value}" for key, value in options.items())
        lines.append(f"* {name}{' (primary: decides)' if name == study.primary else ''}: {told}")
    pairs = ", ".join(f"{a} - {b}" for a, b in study.comparisons)
    lines += [
        "",
        f"Judged by the adapter's accuracy in {study.primary}, paired by seed: {pairs or 'no comparison'}. Two-sided t "
        f"test, corrected by Holm over the comparisons; below {ALPHA:.0%} one arm is called higher, else the pair is "
        "undecided at this size.",
    ]
    if study.claims:
        lines += ["", *map(_of_claim, study.claims), "", OF_CLAIMS]
    return "\n".join(lines)


def _of_claim(claim: Claim) -> str:
    a, b = claim.pair
    return (
        f"* claim: {claim.claim}. Supported where {a}'s {claim.metric} is {claim.expect} than {b}'s; an effect below "
        f"{claim.margin:g} does not matter."
    )


def _listed(values: list[int] | list[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
