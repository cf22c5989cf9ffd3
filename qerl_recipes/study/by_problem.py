"""Judgements by problem in a study's table, and the intervals over seeds and problems that follow from them.

A row by_problem/EVALUATION/TASK/POLICY/WHAT/ANSWERS/DIGITS, whose value is the number of problems: TASK counts from 0
in the order of the evaluation, POLICY is adapter or base, WHAT right or ended, ANSWERS how many there are to each
problem, and DIGITS are `packed`. The problems are those of problems/EVALUATION/..., in their order.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from qerl_recipes.evaluate.figures import unpacked
from qerl_recipes.evaluate.intervals import over_seeds_and_problems
from qerl_recipes.study.plan import Study
from qerl_recipes.study.table import BY_PROBLEM

if TYPE_CHECKING:
    from qerl_recipes.study.results import Final

# what the intervals above it are of
OF_PROBLEMS = (
    "The other intervals hold for these problems; these hold for others like them too, by the analysis of variance of "
    "the answers. They are not corrected for how many comparisons there are."
)


def metrics(name: str, content: Mapping[str, Any]) -> dict[str, float]:
    """Return what a table keeps of the evaluation ``name``, ``content`` of its file: nothing of an older one."""
    return {
        f"{BY_PROBLEM}{name}/{task}/{policy}/{what}/{of['num_samples']}/{digits}": float(of["n"])
        for task, policies in enumerate(content["tasks"].values())
        for policy, of in policies.items()
        for what, digits in of.get("by_problem", {}).items()
    }


def right(values: "Final", name: str, label: str) -> dict[int, list[np.ndarray]]:
    """Return seed -> the share of right answers of ``label`` to each problem, for each task of the evaluation."""
    found: dict[int, dict[int, np.ndarray]] = {}
    for metric, arms in values.items():
        if not metric.startswith(f"{BY_PROBLEM}{name}/") or label not in arms:
            continue
        _, _, task, policy, what, num_samples, digits = metric.split("/")
        if (policy, what) == ("adapter", "right"):
            for seed, problems in arms[label].items():
                shares = unpacked(digits, int(problems), int(num_samples)).mean(axis=1)
                found.setdefault(seed, {})[int(task)] = shares
    return {seed: [of[task] for task in sorted(of)] for seed, of in found.items()}


def interval(
    study: Study, values: "Final", labels: tuple[str, str]
) -> tuple[int, int, tuple[float, float, float]] | None:
    """Return how many seeds and problems, and of two arms the mean difference of the primary accuracy and its ends.

    None where fewer than two seeds of the study have judgements of both arms, or there are fewer than two problems.
    """
    a, b = (right(values, study.primary, label) for label in labels)
    both = [seed for seed in study.seeds if seed in a and seed in b]
    if len(both) < 2 or min(map(len, a[both[0]])) < 2:
        return None
    tasks = range(len(a[both[0]]))
    differences = [np.array([a[seed][task] - b[seed][task] for seed in both]) for task in tasks]
    return len(both), sum(of.shape[1] for of in differences), over_seeds_and_problems(differences)


def lines(study: Study, values: "Final", labels: Mapping[str, str]) -> list[str]:
    """Return a page's table of the planned comparisons, as far as judgements by problem are there.

    ``labels``: arm -> its label in the table.
    """
    rows = []
    for a, b in study.comparisons:
        if (found := interval(study, values, (labels.get(a, ""), labels.get(b, "")))) is not None:
            count, problems, (mean, low, high) = found
            rows.append(f"| {a} | {b} | {count} | {problems} | {mean:+.1%} | {low:+.1%} to {high:+.1%} |")
    head = ["| a | b | seeds | problems | a - b | 95 % over seeds and problems |", "|---" * 6 + "|"]
    return [*head, *rows, "", OF_PROBLEMS, ""] if rows else []
