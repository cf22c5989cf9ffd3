"""Derive from a study's plan and table what its runs show: values of each run, comparisons, and verdicts on claims."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from qerl_recipes.evaluate.figures import unpacked
from qerl_recipes.evaluate.intervals import over_seeds_and_problems
from qerl_recipes.study.inventory import BY_PROBLEM, FACTS, HOURS, beside, read_table, summaries
from qerl_recipes.study.plan import SWEEP_GAIN, Claim, Look, Study, StudyError, best_values, first_runs, later_runs
from qerl_recipes.study.statistics import INCONCLUSIVE, Comparison, compare, correct, judge

CUT = 0.1  # a run that ends with more than this share of its completions cut is named
STEPS_WITHIN = "steps_within"  # a claim's metric: steps_to_target, or the last step of a run that never reached it
IN_UPPER_STATE = "in_upper_state"  # 1 for a run that ends in the upper of two states, 0 for another
ACCURACY = "accuracy"
COLUMNS = [  # of the table of comparisons
    *("kind", "claim", "metric", "expect", "margin", "a", "b", "seeds", "mean_a", "mean_b"),
    *("difference", "low", "high", "unpaired_low", "unpaired_high", "p", "p_holm", "p_exact", "exact_holm"),
    *("above_a", "above_b", "here", "elsewhere", "seeds_elsewhere", "p_same", "verdict"),
]
PLANNED = "planned"  # the kind of a comparison; so are those of `compared`


def final(rows: pd.DataFrame, target: float | None) -> pd.DataFrame:
    """Return a row for each run, by (arm, seed), and a column for each metric: its value at the last step that has it.

    Summaries that the table lacks are made from its steps. When ``target`` was reached is always made anew, so that it
    is this target that counts.
    """
    numbers = rows[~rows.metric.str.startswith(FACTS)].sort_values("step", kind="stable")
    if numbers.empty:
        return pd.DataFrame(index=pd.MultiIndex.from_arrays([[], []], names=["arm", "seed"]))
    last = numbers.groupby(["arm", "seed", "metric"]).value.last().unstack("metric")
    by_step = numbers.pivot_table(index=["arm", "seed", "step"], columns="metric", values="value", aggfunc="last")
    derived = {}
    for key, of_run in by_step.groupby(["arm", "seed"]):
        steps = of_run.droplevel(["arm", "seed"])
        derived[key] = summaries(steps, target) | {"last_step": steps.index.max()}
    made = pd.DataFrame.from_dict(derived, orient="index").rename_axis(["arm", "seed"])
    values = last.drop(columns=["steps_to_target", "seconds_to_target"], errors="ignore").combine_first(made)
    if "steps_to_target" in values:
        values[STEPS_WITHIN] = values.steps_to_target.fillna(values.last_step)
    return values


def of_arm(values: pd.DataFrame, metric: str, label: str, seeds: Iterable[int]) -> pd.Series:
    """Return seed -> the metric's value, of those seeds of an arm that have one."""
    if metric not in values:
        return pd.Series(dtype=float)
    found = values[metric][values.index.get_level_values("arm") == label].droplevel("arm").dropna()
    return found[found.index.isin(list(seeds))]


def labels(study: Study, values: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Return "best" and, of a sweep, "common" -> arm -> its label; an arm without a best value yet is left out."""
    if study.sweep is None:
        return {"best": {arm: arm for arm in study.arms}}
    accuracies = {
        (arm, int(seed), value): accuracy
        for arm in study.arms
        for value in study.sweep.values
        for seed, accuracy in of_arm(values, ACCURACY, f"{arm}@{value:g}", study.sweep.seeds).items()
    }
    found = {"best": {arm: f"{arm}@{value:g}" for arm, value in best_values(study, accuracies).items()}}
    if study.sweep.common is not None:
        found["common"] = {arm: f"{arm}@{study.sweep.common:g}" for arm in study.arms}
    return found


def comparisons(study: Study, values: pd.DataFrame, kind: str = "best", *, by_t: bool = False) -> list[Comparison]:
    """Return the planned comparisons of accuracy of one of ``labels``, corrected by Holm for all that are planned."""
    names, bound = labels(study, values).get(kind, {}), None if by_t else study.afterwards.two_states
    made = [
        compare(
            (names.get(a, a), names.get(b, b)),
            of_arm(values, ACCURACY, names.get(a, ""), study.seeds),
            of_arm(values, ACCURACY, names.get(b, ""), study.seeds),
            bound,
        )
        for a, b in study.comparisons
    ]
    return correct([comparison for comparison in made if comparison is not None], len(made))


def cut(values: pd.DataFrame) -> pd.Series:
    """Return (arm, seed) -> the share of completions cut at the end, of runs where it is above a tenth."""
    return values.clipped_end[values.clipped_end > CUT] if "clipped_end" in values else pd.Series(dtype=float)


def without_cut(study: Study, values: pd.DataFrame, kind: str = "best") -> tuple[pd.DataFrame, list[Comparison]]:
    """Return the values without the seeds' runs of `cut`, and, by t, the comparisons that lose a seed there."""
    named = [(arm, seed) for arm, seed in cut(values).index if seed in study.seeds]
    kept, arms = values.drop(index=named), {arm for arm, _ in named}
    return kept, [one for one in comparisons(study, kept, kind, by_t=True) if {one.a, one.b} & arms]


def verdicts(study: Study, values: pd.DataFrame, claims: Sequence[Claim]) -> pd.DataFrame:
    """Return a row for each claim, each arm at its best value, corrected by Holm over all of ``claims``.

    A claim is inconclusive if a run with an accuracy lacks its metric, since that run would be left out. ``here`` and
    ``elsewhere`` are the differences of the study's own seeds and of those of other studies, where both count;
    ``p_same`` is the p of Welch's test that they are equal.
    """
    best = labels(study, values)["best"]
    made = []
    for claim in claims:
        a, b = claim.pair
        of = [_values_of(study, values, claim, arm, best.get(arm, "")) for arm in claim.pair]
        bound = study.afterwards.two_states if claim.metric == ACCURACY else None
        made.append((claim, of, compare((best.get(a, a), best.get(b, b)), of[0], of[1], bound)))
    corrected = iter(correct([found for *_, found in made if found is not None], len(made)))
    rows = []
    for claim, of, found in made:
        stated = {"claim": claim.claim, "metric": claim.metric, "expect": claim.expect, "margin": claim.margin}
        if found is None:
            a, b = claim.pair
            many = "only one seed has" if len(of[0].index.intersection(of[1].index)) else "no seed has"
            rows.append(stated | {"a": a, "b": b, "verdict": f"{INCONCLUSIVE}: {many} {claim.metric} of both"})
            continue
        found = next(corrected)
        lacking = max(_lacking(study, values, claim, best.get(arm, "")) for arm in claim.pair)
        verdict = f"{INCONCLUSIVE}: {lacking} runs lack it" if lacking else judge(found, claim.expect, claim.margin)
        parts = _by_origin(study, of[0] - of[1])
        rows.append(stated | _row(found, of) | parts | {"verdict": verdict})
    return pd.DataFrame(rows)


def _values_of(study: Study, values: pd.DataFrame, claim: Claim, arm: str, label: str) -> pd.Series:
    """Return seed -> what a claim compares of an arm; a seed that several tables have counts with its mean."""
    if claim.metric == SWEEP_GAIN:
        return sweep_gain(study, values, arm)
    found = [of_arm(values, claim.metric, label, study.seeds)]
    for file, other in claim.also.get(arm, {}).items() if isinstance(claim, Look) else ():
        path = beside(file)
        of_other = _table(path, study.target_reward, path.stat().st_mtime_ns if path.is_file() else 0)
        elsewhere = of_arm(of_other, claim.metric, other, of_other.index.get_level_values("seed"))
        if elsewhere.empty:
            raise StudyError(f"afterwards: {path} has no {claim.metric} of {other}; name an arm that has")
        found.append(elsewhere)
    return pd.concat(found, axis=1).mean(axis=1).sort_index()


@functools.lru_cache(maxsize=8)
def _table(path: Path, target: float | None, changed: int) -> pd.DataFrame:
    """Read a table that several claims look at; ``changed`` is its time."""
    return final(read_table(path), target)


def sweep_gain(study: Study, values: pd.DataFrame, arm: str) -> pd.Series:
    """Return seed of the sweep -> an arm's accuracy at the largest value of its key, less that at the smallest."""
    assert study.sweep is not None
    ends = (max(study.sweep.values), min(study.sweep.values))
    largest, smallest = (of_arm(values, ACCURACY, f"{arm}@{value:g}", study.sweep.seeds) for value in ends)
    return (largest - smallest).dropna()


def _lacking(study: Study, values: pd.DataFrame, claim: Claim, label: str) -> int:
    """Return how many runs of an arm have an accuracy and not the claim's metric."""
    if claim.metric == SWEEP_GAIN:
        return 0
    judged, has = (of_arm(values, metric, label, study.seeds) for metric in (ACCURACY, claim.metric))
    return len(judged.index.difference(has.index))


def _by_origin(study: Study, differences: pd.Series) -> dict[str, float]:
    own = differences.index.isin([*study.seeds, *(study.sweep.seeds if study.sweep else ())])
    here, elsewhere = differences[own].dropna(), differences[~own].dropna()
    if here.empty or elsewhere.empty:
        return {}
    p = stats.ttest_ind(here, elsewhere, equal_var=False).pvalue if min(len(here), len(elsewhere)) > 1 else np.nan
    return {"here": here.mean(), "elsewhere": elsewhere.mean(), "seeds_elsewhere": len(elsewhere), "p_same": float(p)}


def _row(found: Comparison, of: Sequence[pd.Series]) -> dict[str, object]:
    """Return a comparison as a row of a table; ``mean_a`` and ``mean_b`` are over the seeds that both have."""
    both = of[0].index.intersection(of[1].index)
    row = {key: value for key, value in asdict(found).items() if key not in ("differences", "above")}
    row |= {"mean_a": of[0][both].mean(), "mean_b": of[1][both].mean()}
    return row | (dict(zip(("above_a", "above_b"), found.above, strict=True)) if found.above else {})


def compared(study: Study, values: pd.DataFrame) -> pd.DataFrame:
    """Return every comparison of a study, a row each, with its verdict.

    ``kind`` is "planned", "planned, at the common value", the same "without cut runs" (not corrected), "claim", or
    "afterwards", a claim that was made once the results were known.
    """
    tables = []
    for which, kind in (("best", PLANNED), ("common", f"{PLANNED}, at the common value")):
        if which not in labels(study, values):
            continue
        made = [(kind, values, comparison) for comparison in comparisons(study, values, which)]
        if study.afterwards.two_states is not None:
            made += [(f"{kind}, by t", values, one) for one in comparisons(study, values, which, by_t=True)]
        kept, left = without_cut(study, values, which)
        made += [(f"{kind}, without cut runs", kept, one) for one in left]
        for name, runs, found in made:
            of = [of_arm(runs, ACCURACY, arm, study.seeds) for arm in (found.a, found.b)]
            verdict = "" if runs is kept else found.verdict()
            tables.append(pd.DataFrame([{"kind": name, "metric": ACCURACY} | _row(found, of) | {"verdict": verdict}]))
    for kind, claims in (("claim", study.claims), ("afterwards", study.afterwards.claims)):
        if claims:
            tables.append(verdicts(study, values, claims).assign(kind=kind))
    return pd.concat(tables, ignore_index=True).reindex(columns=COLUMNS) if tables else pd.DataFrame(columns=COLUMNS)


def by_arm(study: Study, rows: pd.DataFrame, values: pd.DataFrame) -> pd.DataFrame:
    """Return runs, mean and deviation of each arm and metric, of the study's seeds and of the sweep's."""
    of_steps = rows.metric[rows.duplicated(["arm", "seed", "metric"])].unique()
    values = values.drop(columns=["last_step", *of_steps], errors="ignore")
    if study.afterwards.two_states is not None and ACCURACY in values:
        values = values.assign(**{IN_UPPER_STATE: (values.accuracy > study.afterwards.two_states) * 1.0})
    kind = np.where(values.index.get_level_values("seed").isin(study.seeds), "study", "sweep")
    long = values.assign(runs_of=kind).reset_index().melt(["arm", "seed", "runs_of"], var_name="metric")
    found = long.groupby(["arm", "runs_of", "metric"]).value.agg(["count", "mean", "std"])
    return found[found["count"] > 0].rename(columns={"count": "runs"}).reset_index()


def counted(study: Study, values: pd.DataFrame) -> tuple[int, int]:
    """Return how many runs of a study the table has, and how many, at most, there are to be."""
    runs, more = first_runs(study), 0
    if study.sweep is not None:
        best = {arm: float(label.partition("@")[2]) for arm, label in labels(study, values)["best"].items()}
        if len(best) == len(study.arms):
            runs += later_runs(study, best)
        else:
            more = len(study.arms) * len(study.seeds) * (1 if study.sweep.common is None else 2)
    wanted = {(run.label, run.seed) for run in runs}
    judged = set(values.index[values.accuracy.notna()]) if ACCURACY in values else set()
    return len(judged & wanted), len(wanted) + more


def hours(rows: pd.DataFrame) -> dict[str, float]:
    """Return device -> the hours of it that the runs took."""
    of = rows[rows.metric.str.startswith(HOURS)]
    return of.groupby(of.metric.str.removeprefix(HOURS)).value.sum().to_dict()


def over_problems(
    study: Study, rows: pd.DataFrame, a: str, b: str, seeds: Sequence[int]
) -> tuple[int, float, float] | None:
    """Return the number of problems and the 95 % interval of a - b over those seeds and problems; None for too few."""
    shares = [_shares(rows, study.primary, label) for label in (a, b)]
    if not all(set(seeds) <= of.keys() for of in shares) or min(map(len, shares[0][seeds[0]].values())) < 2:
        return None
    tasks = sorted(shares[0][seeds[0]])
    differences = [np.array([shares[0][seed][task] - shares[1][seed][task] for seed in seeds]) for task in tasks]
    _, low, high = over_seeds_and_problems(differences)
    return sum(of.shape[1] for of in differences), low, high


def _shares(rows: pd.DataFrame, evaluation: str, label: str) -> dict[int, dict[int, np.ndarray]]:
    """Return seed -> task -> the share of right answers to each problem."""
    found: dict[int, dict[int, np.ndarray]] = {}
    of = rows[(rows.arm == label) & rows.metric.str.startswith(f"{BY_PROBLEM}{evaluation}/")]
    for seed, metric, problems in zip(of.seed, of.metric, of.value, strict=True):
        _, _, task, policy, what, answers, digits = metric.split("/")
        if (policy, what) == ("adapter", "right"):
            judged = unpacked(digits, int(problems), int(answers))
            found.setdefault(int(seed), {})[int(task)] = judged.mean(axis=1)
    return found
