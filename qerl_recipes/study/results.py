"""The results of a study as the rows of one tidy table, and what follows from the table alone.

``arm`` is ``NAME`` or ``NAME@VALUE`` of the sweep's key. Metrics of a step are those of ``metrics.jsonl``. Of a
finished run, at its last step: what ``there.figures`` reads from its evaluations, what ``summaries`` derives from the
steps, ``hours/DEVICE``, what it took of a GPU or of the machine, beside other runs only its share, and
``base/DIGITS``, ``plan/DIGITS`` and ``problems/NAME/DIGITS``, always 1, for the weights that it was trained on, its
keys and evaluations, and the problems of each; and the judgements of its answers, problem by problem (`by_problem`).
"""

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl_recipes.study.base import base_of
from qerl_recipes.study.finished import kept, plan_of
from qerl_recipes.study.plan import SWEEP_GAIN, Claim, Look, Study, StudyError, best_values, first_runs, later_runs
from qerl_recipes.study.processes import seconds_of
from qerl_recipes.study.run import says_its_recipe
from qerl_recipes.study.statistics import Comparison, by_state, differ, holm, if_normal, judged, paired
from qerl_recipes.study.summaries import summaries
from qerl_recipes.study.table import BASE, HOURS, PLAN, PROBLEMS, Row, beside, read_table
from qerl_recipes.study.taken import taken_rows
from qerl_recipes.study.there import all_runs, asked_and_judged, figures, is_finished
from qerl_recipes.study.work import METRICS

Final = Mapping[str, Mapping[str, Mapping[int, float]]]  # metric -> arm's label in the table -> seed -> value
CUT = 0.1  # a run that ends with more than this share of its completions cut is named, and comparisons made without it
NEWER = ("reward_gain", "clipped_end")  # summaries that older tables lack, though their steps have them
# a claim's metric: `steps_to_target`, and the last step of a run that never reached it
STEPS_WITHIN = "steps_within"


def collect(study: Study, folder: Path) -> list[Row]:
    """The rows of all runs that have finished, and of the arms that are taken from another study. Raises StudyError
    where the runs were not asked the same problems."""
    rows, is_of_recipe = taken_rows(study), says_its_recipe(folder)
    for one in all_runs(study, folder):
        if not is_finished(study, one, folder):
            continue
        if known := kept(folder).get((one.label, one.seed)):
            rows += known
            continue
        lines = (folder / one.folder / METRICS).read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in lines]
        for record in steps:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                    rows.append((one.label, one.seed, record["step"], name, float(value)))
        last = max(record["step"] for record in steps)
        found = figures(study, one, folder)
        trained = [record for record in steps if "eval/reward" not in record]  # the others are of eval_strategy
        found |= summaries(trained, study.target_reward)
        found |= {f"{HOURS}{device}": seconds / 3600 for device, seconds in seconds_of(folder / one.folder).items()}
        if base := base_of(folder / one.folder):
            found[f"{BASE}{base}"] = 1.0
        found |= asked_and_judged(study, one, folder)
        if is_of_recipe:
            found[f"{PLAN}{plan_of(study, one)}"] = 1.0
        rows += [(one.label, one.seed, last, name, value) for name, value in found.items()]
    _refuse_other_problems(study, rows)
    return rows


def _refuse_other_problems(study: Study, rows: Iterable[Row]) -> None:
    """Raises StudyError where runs were asked other problems in the same evaluation; older tables do not say which."""
    asked: dict[str, dict[str, tuple[str, int]]] = defaultdict(dict)  # evaluation -> its problems -> a run
    for label, seed, _, metric, _ in rows:
        if metric.startswith(PROBLEMS):
            name, _, digits = metric.removeprefix(PROBLEMS).partition("/")
            asked[name].setdefault(digits, (label, seed))
    for name, those in asked.items():
        if len(those) > 1:
            first, other, *_ = (f"{label}/seed-{seed}" for label, seed in those.values())
            tasks = study.evaluations.get(name, {}).get("tasks", name)
            raise StudyError(
                f"evaluations.{name}: {other} was asked other problems than {first}; put back the file or data set "
                f"that {tasks} names, and remove evaluation/{name} of the runs that were asked others"
            )


def final(rows: Iterable[Row]) -> Final:
    """metric -> arm -> seed -> the value at the run's last step that has it; empty for a metric that no run has.

    Added are the summaries that older tables lack, from the steps, and STEPS_WITHIN where a run reached its target.
    """
    found: dict[str, dict[str, dict[int, tuple[int, float]]]] = defaultdict(lambda: defaultdict(dict))
    steps: dict[tuple[str, int], dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for arm, seed, step, metric, value in rows:
        of = found[metric][arm]
        if step >= of.get(seed, (-1, 0.0))[0]:
            of[seed] = (step, value)
        if metric in ("reward", "completion_clipped"):
            steps[arm, seed][step][metric] = value
    for (arm, seed), of_run in steps.items():
        last = max(of_run)
        come = summaries([of_run[step] for step in sorted(of_run)], None)
        for metric in NEWER:
            if metric in come:
                found[metric][arm].setdefault(seed, (last, come[metric]))
        if "steps_to_target" in found:
            reached = found["steps_to_target"].get(arm, {}).get(seed, (last, float(last)))
            found[STEPS_WITHIN][arm][seed] = reached
    values = {
        metric: {arm: {seed: value for seed, (_, value) in seeds.items()} for arm, seeds in arms.items()}
        for metric, arms in found.items()
    }
    return defaultdict(dict, values)


def labels(study: Study, values: Final) -> dict[str, dict[str, str]]:
    """ "best" and "common" -> arm -> its label in the table; without a sweep "best" alone, the arm itself."""
    if study.sweep is None:
        return {"best": {arm: arm for arm in study.arms}}
    accuracies = {
        (arm, seed, value): accuracy
        for arm in study.arms
        for value in study.sweep.values
        for seed, accuracy in values["accuracy"].get(f"{arm}@{value:g}", {}).items()
    }
    best = {arm: f"{arm}@{value:g}" for arm, value in best_values(study, accuracies).items()}
    found = {"best": best}
    if study.sweep.common is not None:
        found["common"] = {arm: f"{arm}@{study.sweep.common:g}" for arm in study.arms}
    return found


def comparisons(
    study: Study, values: Final, metric: str = "accuracy", *, as_planned: bool = False
) -> dict[str, list[Comparison]]:
    """ "best" and "common" -> the study's comparisons by ``metric`` over its seeds, corrected by Holm within each,
    for as many as are planned. Accuracies of two states are compared by their counts, unless ``as_planned``."""
    found = {}
    bound = None if as_planned else _bound(study, metric)
    for kind, names in labels(study, values).items():
        of = {arm: of_seeds(study.seeds, values[metric].get(names.get(arm, ""))) for arm in study.arms}
        made = [_compared(a, b, of[a], of[b], bound) for a, b in study.comparisons]
        found[kind] = holm([comparison for comparison in made if comparison is not None], len(made))
    return found


def cut(values: Final) -> dict[tuple[str, int], float]:
    """(an arm's label, a seed) -> the share of completions cut at the end, of the runs where it is above a tenth."""
    runs = ((label, seed, share) for label, seeds in values["clipped_end"].items() for seed, share in seeds.items())
    return {(label, seed): share for label, seed, share in sorted(runs) if share > CUT}


def without_cut(study: Study, values: Final) -> dict[tuple[str, str], tuple[Comparison, Comparison]]:
    """The labels of two arms that are compared, of which a run is in `cut` -> what the plan's test says of them with
    all runs, and without those."""
    named = cut(values)
    touched = {label for label, seed in named if seed in study.seeds}
    accuracies = {
        label: {seed: value for seed, value in seeds.items() if (label, seed) not in named}
        for label, seeds in values["accuracy"].items()
    }
    whole = comparisons(study, values, as_planned=True)
    kept = comparisons(study, defaultdict(dict, {**values, "accuracy": accuracies}), as_planned=True)
    found = {}
    for kind, names in labels(study, values).items():
        after = {(c.a, c.b): c for c in kept.get(kind, [])}
        for c in whole.get(kind, []):
            pair = names[c.a], names[c.b]
            if touched & set(pair) and (c.a, c.b) in after:
                found[pair] = c, after[c.a, c.b]
    return found


@dataclass(frozen=True)
class Parts:
    """What the seeds of a study show alone, what those of others show, and the p that both show one difference."""

    own: int
    difference: float
    others: int
    of_others: float
    p: float


@dataclass(frozen=True)
class Verdict:
    """A claim of a study, what was measured, and what follows; ``measured`` is None for less than two seeds. ``parts``
    are there where seeds of other studies count too."""

    claim: Claim
    measured: Comparison | None
    verdict: str
    parts: Parts | None = None


def verdicts(study: Study, values: Final, claims: Sequence[Claim] | None = None) -> list[Verdict]:
    """The study's planned claims, or ``claims``, each arm at its best value of the sweep's key, judged with Holm's
    correction over all of them. One of a metric that runs with an accuracy lack is undecided: the others would be left
    out of what is compared. A claim of the metric ``sweep_gain`` is judged over the sweep's seeds, and one of
    accuracies of two states by how many runs end in the upper one."""
    claims = study.claims if claims is None else claims
    names = labels(study, values)["best"]
    arms = [[_values_of(study, values, claim, arm, names.get(arm, "")) for arm in claim.pair] for claim in claims]
    made = [
        _compared(*claim.pair, of_a, of_b, _bound(study, claim.metric))
        for claim, (of_a, of_b) in zip(claims, arms, strict=True)
    ]
    corrected = iter(holm([comparison for comparison in made if comparison is not None], len(made)))
    found = []
    for claim, comparison, (of_a, of_b) in zip(claims, made, arms, strict=True):
        if comparison is None:
            many = "only one seed has" if of_a.keys() & of_b.keys() else "no seed has"
            found.append(Verdict(claim, None, f"undecided: {many} {claim.metric} of both"))
            continue
        comparison = next(corrected)
        lacking = max(_lack(study, values, names.get(arm, ""), claim.metric) for arm in claim.pair)
        verdict = f"undecided: {lacking} runs lack it"
        if not lacking:
            verdict = judged(comparison, claim.expect, claim.margin)
            verdict = if_normal(comparison, claim.expect, claim.margin, verdict)
        found.append(Verdict(claim, comparison, verdict, _parts(study, of_a, of_b)))
    return found


def looks(study: Study, values: Final) -> list[Verdict]:
    """What was asked of a study once its results were known, corrected over all of that."""
    return verdicts(study, values, study.afterwards.claims)


def _bound(study: Study, metric: str) -> float | None:
    return study.afterwards.two_states if metric == "accuracy" else None


def _values_of(study: Study, values: Final, claim: Claim, arm: str, label: str) -> dict[int, float]:
    """Seed -> what a claim compares of an arm: the mean over the tables that have the seed, where it names others."""
    if claim.metric == SWEEP_GAIN:
        return sweep_gain(study, values, arm)
    found = {seed: [value] for seed, value in of_seeds(study.seeds, values[claim.metric].get(label)).items()}
    for file, other in claim.also.get(arm, {}).items() if isinstance(claim, Look) else ():
        path = beside(file)
        there = _of_table(path, path.stat().st_mtime_ns if path.is_file() else 0)[claim.metric].get(other)
        if not there:
            raise StudyError(f"afterwards: {path} has no {claim.metric} of {other}; name an arm that has")
        for seed, value in there.items():
            found.setdefault(seed, []).append(value)
    return {seed: sum(of) / len(of) for seed, of in sorted(found.items())}


@functools.lru_cache(maxsize=8)
def _of_table(path: Path, changed: int) -> Final:
    """Several claims look at one table; ``changed`` is when it was."""
    return final(read_table(path))


def _parts(study: Study, of_a: Mapping[int, float], of_b: Mapping[int, float]) -> Parts | None:
    """None where all seeds are the study's own, or its sweep's."""
    own = {*study.seeds, *(study.sweep.seeds if study.sweep else ())}
    both = sorted(of_a.keys() & of_b.keys())
    here, there = ([of_a[seed] - of_b[seed] for seed in both if (seed in own) == mine] for mine in (True, False))
    if not here or not there:
        return None
    return Parts(len(here), sum(here) / len(here), len(there), sum(there) / len(there), differ(here, there))


def _lack(study: Study, values: Final, label: str, metric: str) -> int:
    """How many runs of an arm have an accuracy and not ``metric``."""
    if metric == SWEEP_GAIN:
        return 0
    there, has = (of_seeds(study.seeds, values[of].get(label)) for of in ("accuracy", metric))
    return len(there.keys() - has.keys())


def sweep_gain(study: Study, values: Final, arm: str) -> dict[int, float]:
    """Seed of the sweep -> an arm's primary accuracy at the largest value of its key, less that at the smallest."""
    assert study.sweep is not None
    largest, smallest = (
        of_seeds(study.sweep.seeds, values["accuracy"].get(f"{arm}@{value:g}"))
        for value in (max(study.sweep.values), min(study.sweep.values))
    )
    return {seed: largest[seed] - smallest[seed] for seed in largest if seed in smallest}


def counted(study: Study, values: Final) -> tuple[int, int]:
    """How many runs of a study the table has the primary accuracy of, and how many there are to be: the most that there
    may be while the sweep has not said which value is the best of each arm."""
    runs, more = first_runs(study), 0
    if study.sweep is not None:
        best = {arm: float(label.partition("@")[2]) for arm, label in labels(study, values)["best"].items()}
        if len(best) == len(study.arms):
            runs += later_runs(study, best)
        else:
            more = len(study.arms) * len(study.seeds) * (1 if study.sweep.common is None else 2)
    wanted = {(run.label, run.seed) for run in runs}
    there = {(label, seed) for label, seeds in values["accuracy"].items() for seed in seeds}
    return len(there & wanted), len(wanted) + more


def hours(rows: Iterable[Row]) -> dict[str, float]:
    """Device -> hours of it that the runs took, from their metrics ``hours/DEVICE``."""
    found: dict[str, float] = defaultdict(float)
    for *_, metric, value in rows:
        if metric.startswith(HOURS):
            found[metric.removeprefix(HOURS)] += value
    return dict(found)


def of_seeds(seeds: Iterable[int], values: Mapping[int, float] | None) -> dict[int, float]:
    """An arm's values, seed -> value, of those seeds that have one."""
    return {seed: values[seed] for seed in seeds if values is not None and seed in values}


def _compared(
    a: str, b: str, of_a: Mapping[int, float], of_b: Mapping[int, float], bound: float | None = None
) -> Comparison | None:
    """Two arms over the seeds that both have; None for less than two. With ``bound`` their counts above it."""
    if len(set(of_a) & set(of_b)) < 2:
        return None
    return paired(a, b, of_a, of_b) if bound is None else by_state(a, b, of_a, of_b, bound)
