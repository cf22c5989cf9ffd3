"""The page of a study: everything in it follows from the plan and the table."""

import math
from collections.abc import Mapping, Sequence
from statistics import stdev

from qerl_recipes.study import by_problem
from qerl_recipes.study.plan import SWEEP_GAIN, Look, Study
from qerl_recipes.study.results import (
    CUT,
    STEPS_WITHIN,
    Final,
    Verdict,
    comparisons,
    counted,
    cut,
    final,
    hours,
    labels,
    looks,
    verdicts,
    without_cut,
)
from qerl_recipes.study.statistics import ALPHA, IF_NORMAL, POWER, Comparison, visible
from qerl_recipes.study.summaries import ENDS, LATE
from qerl_recipes.study.table import Row

# of the training: the second table of a page
OF_A_RUN = (
    *("reward_area", "reward_gain", "clipped_end", "sampled_entropy_start", "sampled_entropy_end", "mismatch"),
    *("without_signal", "seconds_a_step", "steps_to_target"),
)

# what stands beside an accuracy
OF_ENDED = "ended: the share of answers that ended by themselves; accuracy counts the others by what they had written."

# how claims are judged (`statistics.judged`, `if_normal`)
OF_CLAIMS = (
    f"Supported: the t test, corrected by Holm over the claims of the study, is below {ALPHA:.0%} in that direction. "
    "Not supported: the 95 % interval holds no difference of the margin or more in it. Of "
    '"not lower": that interval, not corrected, is above minus the margin, or below it. "if normal": the exact test '
    "alone does not say so."
)


def page(study: Study, rows: Sequence[Row], title: str, command: str) -> str:
    """The study as Markdown: one table of arms and one of comparisons. ``command`` is what makes it from the table."""
    lines = [f"# {title}", "", *([study.about.strip(), ""] if study.about else [])]
    values = final(rows)
    lines += [f"Made by `{command}`. {progress(study, values)}{cost(rows)}", "", *of_others(study)]
    several = sorted((m for m in values if m.startswith(("accuracy/", "ended/", "pass@", "maj@"))), key=_by_kind)
    judged = ("accuracy", "ended", *several, "base_accuracy")
    shown: set[str] = set()
    for kind, names in labels(study, values).items():
        if kind == "best" and study.sweep is not None:
            lines += [f"## Each arm at its best {study.sweep.key}", ""]
        elif study.sweep is not None:
            lines += [f"## All arms at {study.sweep.key} {study.sweep.common:g}, the others of them", ""]
        left = {arm: names.get(arm) for arm in study.arms if names.get(arm) not in shown}
        lines += _table(study, values, left, judged)
        if kind == "best":
            lines += _table(study, values, left, OF_A_RUN)
            lines += ["Mean over seeds, and its standard deviation; where not all runs have a value, of how many.", ""]
            lines += [OF_ENDED, ""] if values["ended"] else []
            lines += [of_metrics(study), ""] if values["reward_area"] else []
        shown |= set(names.values())
        lines += _compared(study, values, kind)
        lines += by_problem.lines(study, values, names)
    lines += _cut(study, values)
    lines += _claims(study, values)
    lines += _looks(study, values)
    if study.sweep is not None:
        lines += _sweep(study, values)
    return "\n".join(lines)


def _table(study: Study, values: Final, of_arms: Mapping[str, str | None], metrics: Sequence[str]) -> list[str]:
    """A line for each arm -> its label, with those of ``metrics`` that any run has."""
    there = [metric for metric in metrics if values[metric]]
    if not of_arms:
        return []
    lines = [f"| arm | seeds | {' | '.join(there)} |", "|---" * (len(there) + 2) + "|"]
    for arm, label in of_arms.items():
        of = {m: [v for s, v in values[m].get(label or "", {}).items() if s in study.seeds] for m in there}
        count = max((len(found) for found in of.values()), default=0)
        cells = [cell(of[metric], wanted(metric, count)) for metric in there]
        lines.append(f"| {label or arm} | {count} | {' | '.join(cells)} |")
    return [*lines, ""]


def _compared(study: Study, values: Final, kind: str) -> list[str]:
    """The table of comparisons, and what to know of its tests."""
    compared = comparisons(study, values).get(kind, [])
    if not compared:
        return []
    if study.afterwards.two_states is not None:
        planned = sum(c.is_decided for c in comparisons(study, values, as_planned=True)[kind])
        return [
            *_in_two_states(compared, study.afterwards.two_states),
            "Chosen afterwards: the accuracies are of two states, which the planned t test does not fit. By it "
            f"{planned} of {len(compared)} are decided. p: Fisher's exact test, by run; Holm's correction over all "
            "planned.",
            "",
        ]
    lines = ["| a | b | seeds | a - b | 95 % (t) | 95 %, unpaired | p, Holm | p, exact | a is |", "|---" * 9 + "|"]
    lines += [
        f"| {c.a} | {c.b} | {c.seeds} | {c.difference:+.1%} | {c.t_low:+.1%} to {c.t_high:+.1%} "
        f"| {c.unpaired_low:+.1%} to {c.unpaired_high:+.1%} | {c.p_holm:.3f} | {c.p_exact:.2g} | {c.verdict()} |"
        for c in compared
    ]
    return [*lines, "", _of_comparisons(study, compared) if kind == "best" else "As above.", ""]


def _of_comparisons(study: Study, compared: Sequence[Comparison]) -> str:
    """How the table of comparisons was made, and what its seeds can see."""
    most = max(c.seeds for c in compared)
    spreads = sorted(stdev(c.differences) for c in compared if c.differences)
    text = [
        "Paired by seed. p, Holm: t test, corrected over the comparisons of the plan. p, exact: all flips of the "
        f"signs, not corrected; over {most} seeds at least {2.0 ** (1 - most):.4g}.",
    ]
    if any(c.verdict().endswith(IF_NORMAL) for c in compared):
        text.append('"if normal": by the t test alone.')
    if any(_is_bf16(study, arm) for pair in study.comparisons for arm in pair):
        text.append("Pairing gains nothing for BF16, whose reruns differ as its seeds do: read the unpaired interval.")
    text.append("Intervals are over seeds of training alone: one base, the same problems.")
    if spreads:
        found = visible(spreads[len(spreads) // 2], most, len(study.comparisons))
        text.append(f"A true difference of {found:.1%} would be found in {POWER:.0%} of such studies.")
    return " ".join(text)


def _is_bf16(study: Study, arm: str) -> bool:
    return study.settled(study.arms[arm]).get("quantization") == "bf16"


def _in_two_states(compared: Sequence[Comparison], bound: float) -> list[str]:
    above = f"above {bound:.0%}"
    lines = [f"| a | b | seeds | a {above} | b {above} | p | p, Holm | a is |", "|---" * 8 + "|"]
    for c in compared:
        assert c.above is not None
        lines.append(
            f"| {c.a} | {c.b} | {c.seeds} | {c.above[0]} | {c.above[1]} | {c.p:.2g} | {c.p_holm:.3f} | {c.verdict()} |"
        )
    return [*lines, ""]


def _cut(study: Study, values: Final) -> list[str]:
    """The runs whose answers do not end, and what the comparisons are without them."""
    if not (named := cut(values)):
        return []
    lines = [f"## Runs that end with more than {CUT:.0%} of their completions cut", ""]
    lines += ["Reward and judge read the last number of an answer, whether it ends or not.", ""]
    lines += ["| arm | seed | cut, last five steps | accuracy |", "|---" * 4 + "|"]
    for (label, seed), share in named.items():
        accuracy = values["accuracy"].get(label, {}).get(seed)
        lines.append(f"| {label} | {seed} | {share:.0%} | {'' if accuracy is None else f'{accuracy:.1%}'} |")
    lines.append("")
    if made := without_cut(study, values):
        lines += ["| a | b | a - b, all runs | without these | 95 % (t) | seeds |", "|---" * 6 + "|"]
        lines += [
            f"| {a} | {b} | {c.difference:+.1%} | {w.difference:+.1%} | {w.t_low:+.1%} to {w.t_high:+.1%} | {w.seeds} |"
            for (a, b), (c, w) in made.items()
        ]
        lines += ["", "Looked at afterwards, and not corrected: runs are left out for what they did.", ""]
    return lines


def _claims(study: Study, values: Final) -> list[str]:
    if not study.claims:
        return []
    found = verdicts(study, values)
    lines = ["## What is said, and what was measured", "", *_lines_of(study, found), "", OF_CLAIMS]
    for one in found:
        if one.claim.metric == SWEEP_GAIN and (c := one.measured) is not None:
            points = 100 * visible(stdev(c.differences), c.seeds, len(found))
            lines[-1] += f" {SWEEP_GAIN} is of {c.seeds} seeds: its test finds no difference below {points:.0f} points."
    return [*lines, ""]


def _looks(study: Study, values: Final) -> list[str]:
    if not (found := looks(study, values)):
        return []
    why = "Added once the results were known; Holm's correction is over these."
    if any(one.claim.metric == STEPS_WITHIN for one in found):
        why += f" {STEPS_WITHIN}: steps_to_target, or the last step of a run that never reached it."
    return ["## Looked at afterwards", "", why, "", *_lines_of(study, found), ""]


def _lines_of(study: Study, found: Sequence[Verdict]) -> list[str]:
    return [
        "| claim | measured | verdict |",
        "|---" * 3 + "|",
        *(f"| {one.claim.claim} | {told(study, one)} | {one.verdict} |" for one in found),
    ]


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
    return f" They took {' and '.join(taken)}, other programs there counted in." if taken else ""


def of_metrics(study: Study) -> str:
    """What the names in the second table mean (`summaries`)."""
    text = (
        f"reward_area: mean reward over the steps, its level. reward_gain: its last {LATE} less its first {ENDS}, "
        f"its growth. clipped_end: share of completions cut, last {ENDS} steps. sampled_entropy: nats a token, first "
        f"and last {ENDS} steps, noise included. mismatch: mean |log p| difference of rollout and trainer. "
        "without_signal: share of groups whose rewards are all equal."
    )
    if study.target_reward is None:
        return text
    return f"{text} steps_to_target: until the mean reward of {ENDS} steps was {study.target_reward:g}."


def told(study: Study, found: Verdict) -> str:
    """What was expected of a claim's two arms and what was measured, in one cell."""
    claim, c = found.claim, found.measured
    a, b = claim.pair
    text = f"{claim.metric}: {a} {claim.expect} than {b}, margin {claim.margin:g}"
    if c is None:
        return text
    text += f"; {figures(found)}"
    if c.above is None:
        text += f", {c.seeds} seeds, p {c.p:.2g}, exact {c.p_exact:.2g}"
        if claim.metric == "accuracy" and any(_is_bf16(study, arm) for arm in claim.pair):
            text += f", unpaired {c.unpaired_low:+.3g} to {c.unpaired_high:+.3g}"
    if isinstance(claim, Look) and claim.also:
        pairs = [f"{label} of {file.stem}" for those in claim.also.values() for file, label in those.items()]
        text += f"; with {', '.join(pairs)}"
    return text


def figures(found: Verdict) -> str:
    """What was measured of a claim: the difference and its interval, or the counts of two states; and, where seeds of
    other studies count, what those show."""
    c = found.measured
    if c is None:
        return ""
    if c.above is not None:
        return f"in the upper state {c.above[0]} and {c.above[1]} of {c.seeds}, Fisher's p {c.p:.2g}"
    text = f"{c.difference:+.3g} ({c.t_low:+.3g} to {c.t_high:+.3g})"
    if (parts := found.parts) is None:
        return text
    return (
        f"{text}, of {parts.own} seeds here {parts.difference:+.3g}, {parts.others} elsewhere {parts.of_others:+.3g}, "
        f"which differ with p {parts.p:.2g}"
    )


def _sweep(study: Study, values: Final) -> list[str]:
    """Mean accuracy of each arm at each value of the sweep's key, over the sweep's seeds; and, where runs end in two
    states, how many of all its runs end in the upper one."""
    assert study.sweep is not None
    accuracies, seeds, bound = values["accuracy"], study.sweep.seeds, study.afterwards.two_states
    head = [
        f"| arm | {' | '.join(f'{v:g}' for v in study.sweep.values)} |",
        "|---" * (len(study.sweep.values) + 1) + "|",
    ]
    means, counts = [], []
    for arm in study.arms:
        of = [accuracies.get(f"{arm}@{value:g}", {}) for value in study.sweep.values]
        cells = [cell([found[seed] for seed in seeds if seed in found]) for found in of]
        means.append(f"| {arm} | {' | '.join(cells)} |")
        if bound is not None:
            cells = [f"{sum(value > bound for value in found.values())} of {len(found)}" for found in of]
            counts.append(f"| {arm} | {' | '.join(cells)} |")
    lines = [f"## {study.sweep.key}: accuracy over the seeds {', '.join(map(str, seeds))}", "", *head, *means, ""]
    if bound is not None:
        lines += [f"## {study.sweep.key}: runs above {bound:.0%}, all seeds", "", *head, *counts, ""]
    return lines


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
