"""The page of a study: everything in it follows from the plan and the table."""

import math
from collections.abc import Sequence

from qerl_recipes.study import by_problem
from qerl_recipes.study.plan import Study
from qerl_recipes.study.results import Final, Verdict, comparisons, counted, final, hours, labels, verdicts
from qerl_recipes.study.statistics import ALPHA
from qerl_recipes.study.summaries import ENDS
from qerl_recipes.study.table import Row

# of the training: the second table of a page
OF_A_RUN = (
    *(
        "reward_area",
        "entropy_start",
        "entropy_end",
        "sampled_entropy_start",
        "sampled_entropy_end",
        "mismatch",
        "without_signal",
        "seconds_a_step",
    ),
    "tokens_per_s",
    *("steps_to_target", "seconds_to_target"),
)

# what stands beside an accuracy
OF_ENDED = "ended: the share of answers that ended by themselves; accuracy counts the others by what they had written."

# how the table of comparisons was made
OF_COMPARISONS = (
    "Paired by seed. p is of the t test, corrected by Holm for all comparisons of the plan; over few seeds the "
    "bootstrap's interval is too narrow. d_z: the mean difference in standard deviations of the differences."
)


# how claims are judged (`statistics.judged`)
OF_CLAIMS = (
    "A claim of more or less is supported where the t test, corrected by Holm over the claims of the study, is below "
    f"{ALPHA:.0%} in that direction, and not supported where the 95 % interval holds no difference of the margin or "
    'more in it. "not lower" is supported where the lower end of the interval, which is not corrected, is above minus '
    "the margin, and not supported where its upper end is below."
)


def page(study: Study, rows: Sequence[Row], title: str, command: str) -> str:
    """The study as Markdown: one table of arms and one of comparisons. ``command`` is what makes it from the table."""
    lines = [f"# {title}", "", *([study.about.strip(), ""] if study.about else [])]
    values = final(rows)
    lines += [f"Made by `{command}`. {progress(study, values)}{cost(rows)}", "", *of_others(study)]
    several = sorted((m for m in values if m.startswith(("accuracy/", "ended/", "pass@", "maj@"))), key=_by_kind)
    tables = [
        [metric for metric in of if values[metric]]
        for of in (("accuracy", "ended", *several, "base_accuracy"), OF_A_RUN)
    ]
    for kind, names in labels(study, values).items():
        if kind == "best" and study.sweep is not None:
            lines += [f"## Each arm at its best {study.sweep.key}", ""]
        elif study.sweep is not None:
            lines += [f"## All arms at {study.sweep.key} {study.sweep.common:g}", ""]
        for shown in tables:
            lines += [f"| arm | seeds | {' | '.join(shown)} |", "|---" * (len(shown) + 2) + "|"]
            for arm in study.arms:
                label = names.get(arm)
                of = {m: [v for s, v in values[m].get(label or "", {}).items() if s in study.seeds] for m in shown}
                count = max((len(found) for found in of.values()), default=0)
                cells = [cell(of[metric], wanted(metric, count)) for metric in shown]
                lines.append(f"| {label or arm} | {count} | {' | '.join(cells)} |")
            lines.append("")
        lines += ["Mean over seeds, and its standard deviation; where not all runs have a value, of how many.", ""]
        lines += [OF_ENDED, ""] if values["ended"] else []
        lines += [of_metrics(study), ""] if values["reward_area"] else []
        compared = comparisons(study, values).get(kind, [])
        if compared:
            lines += [
                "| a | b | seeds | a - b | 95 % (t) | 95 % (bootstrap) | d_z | p, Holm | a is |",
                "|---" * 9 + "|",
            ]
            lines += [
                f"| {c.a} | {c.b} | {c.seeds} | {c.difference:+.1%} | {c.t_low:+.1%} to {c.t_high:+.1%} "
                f"| {c.low:+.1%} to {c.high:+.1%} | {c.effect:+.2f} | {c.p_holm:.3f} | {c.verdict()} |"
                for c in compared
            ]
            lines += ["", OF_COMPARISONS, ""]
        lines += by_problem.lines(study, values, names)
    lines += _claims(study, values)
    if study.sweep is not None:
        lines += _sweep(study, values)
    return "\n".join(lines)


def _claims(study: Study, values: Final) -> list[str]:
    if not study.claims:
        return []
    lines = ["## What is said, and what was measured", "", "| claim | measured | verdict |", "|---" * 3 + "|"]
    lines += [f"| {found.claim.claim} | {told(found)} | {found.verdict} |" for found in verdicts(study, values)]
    return [*lines, "", OF_CLAIMS, ""]


def progress(study: Study, values: Final) -> str:
    """How many of a study's runs the page is of."""
    there, total = counted(study, values)
    if there == total:
        return f"All {total} runs are there."
    known = len(labels(study, values)["best"]) == len(study.arms)
    return f"{there} of {total} runs are there." if known else f"{there} of at most {total} runs are there."


def of_others(study: Study) -> list[str]:
    """Which arms are another study's, as a line of their own."""
    if study.taken is None:
        return []
    pairs = ", ".join(f"{arm} is {label}" for arm, label in study.taken.arms.items())
    return [f"Taken from {study.taken.study}, where the same recipe was run with the same keys and seeds: {pairs}.", ""]


def cost(rows: Sequence[Row]) -> str:
    """What the runs took, as a sentence that follows another; nothing where the table does not say it."""
    taken = [f"{value:.1f} hours of {device}" for device, value in sorted(hours(rows).items())]
    if not taken:
        return ""
    return f" They took {' and '.join(taken)}: other programs that ran there are counted in, what was killed is not."


def of_metrics(study: Study) -> str:
    """What the names in the second table mean (`summaries`)."""
    text = (
        "reward_area: mean reward over the steps. entropy: of the completions that the trainer computed, at the first "
        "and last steps, in nats a token; sampled_entropy: of all, by what was sampled, noise included. mismatch: mean "
        "|log p| difference of rollout and trainer. without_signal: share of groups whose rewards are all equal."
    )
    if study.target_reward is None:
        return text
    return f"{text} steps_to_target: until the mean reward of {ENDS} steps was {study.target_reward:g}."


def told(found: Verdict) -> str:
    """What was expected of a claim's two arms and what was measured, in one cell."""
    claim, c = found.claim, found.measured
    a, b = claim.pair
    text = f"{claim.metric}: {a} {claim.expect} than {b}, margin {claim.margin:g}"
    if c is None:
        return text
    return f"{text}; a - b = {c.difference:+.3g}, 95 % (t) {c.t_low:+.3g} to {c.t_high:+.3g}, {c.seeds} seeds"


def _sweep(study: Study, values: Final) -> list[str]:
    """Mean accuracy of each arm at each value of the sweep's key, over the sweep's seeds."""
    assert study.sweep is not None
    accuracies, seeds = values["accuracy"], study.sweep.seeds
    lines = [f"## {study.sweep.key}: accuracy over the seeds {', '.join(map(str, seeds))}", ""]
    lines += [
        f"| arm | {' | '.join(f'{v:g}' for v in study.sweep.values)} |",
        "|---" * (len(study.sweep.values) + 1) + "|",
    ]
    for arm in study.arms:
        of = [accuracies.get(f"{arm}@{value:g}", {}) for value in study.sweep.values]
        cells = [cell([found[seed] for seed in seeds if seed in found]) for found in of]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return [*lines, ""]


def _by_kind(metric: str) -> tuple[str, int]:
    """Sorts accuracy/NAME, maj@K/NAME and pass@K/NAME by kind, then by K."""
    kind, _, count = metric.partition("/")[0].partition("@")
    return kind, int(count or 0)


def wanted(metric: str, seeds: int) -> int:
    """How many of an arm's runs are to have a metric: a base is judged once."""
    return min(seeds, 1) if metric.startswith("base_") else seeds


def cell(values: Sequence[float], wanted: int | None = None) -> str:
    """Mean and standard deviation, as they stand in a table; nothing for no value.

    Where fewer than ``wanted`` runs have the metric (steps_to_target: those that reached it), it says how many.
    """
    if not values:
        return ""
    mean, few = sum(values) / len(values), ""
    if wanted is not None and len(values) < wanted:
        few = f" ({len(values)} of {wanted})"
    if len(values) < 2:
        return f"{mean:.4g}{few}"
    return f"{mean:.4g} ± {math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)):.2g}{few}"
