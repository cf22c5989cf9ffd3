"""The results of a study as the rows of one tidy table, and what follows from the table alone.

``arm`` is ``NAME`` or ``NAME@VALUE`` of the sweep's key. Metrics of a step are those of ``metrics.jsonl``. Of a
finished run, at its last step: what ``run.figures`` reads from its evaluations, what ``summaries`` derives from the
steps, ``hours/DEVICE``, what it took of a GPU or of the machine, beside other runs only its share, and
``base/DIGITS`` and ``plan/DIGITS``, always 1, for the weights that it was trained on, and its keys and evaluations.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl_recipes.study.base import base_of
from qerl_recipes.study.finished import kept, plan_of
from qerl_recipes.study.plan import SWEEP_GAIN, Claim, Study, best_values, first_runs, later_runs
from qerl_recipes.study.processes import seconds_of
from qerl_recipes.study.run import says_its_recipe
from qerl_recipes.study.statistics import Comparison, holm, judged, paired
from qerl_recipes.study.table import BASE, HOURS, PLAN, Row
from qerl_recipes.study.taken import taken_rows
from qerl_recipes.study.there import all_runs, figures, is_finished
from qerl_recipes.study.work import METRICS

Final = Mapping[str, Mapping[str, Mapping[int, float]]]  # metric -> arm's label in the table -> seed -> value
ENDS = 5  # steps averaged at the start and at the end of a run


def collect(study: Study, folder: Path) -> list[Row]:
    """The rows of all runs that have finished, and of the arms that are taken from another study."""
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
        if is_of_recipe:
            found[f"{PLAN}{plan_of(study, one)}"] = 1.0
        rows += [(one.label, one.seed, last, name, value) for name, value in found.items()]
    return rows


def summaries(steps: Sequence[Mapping[str, float]], target: float | None) -> dict[str, float]:
    """What the steps of a run come to.

    ``reward_area``: the mean reward over its steps. ``entropy_start`` and ``entropy_end``: mean of its first and of its
    last steps, of the completions that were computed; ``sampled_entropy_start`` and ``..._end`` the same of all, noise
    of the rollout included, estimated by what was sampled: which completions are computed depends on the rewards, so
    that arms can be compared by these alone. ``mismatch`` and ``without_signal``: means over the steps of
    ``logp_mismatch_mean`` and of ``equal_groups``, the share of groups without signal. ``seconds_a_step`` and
    ``tokens_per_s`` (of the rollouts): their medians. ``steps_to_target`` and ``seconds_to_target``: until the mean
    reward of the last five steps reaches ``target``; absent where it never does.
    """
    scored = [step for step in steps if step.get("reward") is not None]  # a rollout for several steps is scored once
    rewards = [step["reward"] for step in scored]
    found = {"reward_area": sum(rewards) / len(rewards)} if rewards else {}

    def of(metric: str, part: slice = slice(None)) -> list[float]:
        return [step[metric] for step in steps[part] if step.get(metric) is not None]

    means = {
        "entropy_start": of("entropy", slice(ENDS)),
        "entropy_end": of("entropy", slice(-ENDS, None)),
        "sampled_entropy_start": of("sampled_entropy", slice(ENDS)),
        "sampled_entropy_end": of("sampled_entropy", slice(-ENDS, None)),
        "mismatch": of("logp_mismatch_mean"),
        "without_signal": of("equal_groups"),
    }
    found |= {name: sum(values) / len(values) for name, values in means.items() if values}
    if seconds := of("step_seconds"):
        found["seconds_a_step"] = statistics.median(seconds)
    if speeds := of("rollout_tokens_per_s"):
        found["tokens_per_s"] = statistics.median(speeds)
    if target is not None:
        for i, step in enumerate(scored):
            window = rewards[max(0, i + 1 - ENDS) : i + 1]
            if len(window) == ENDS and sum(window) / ENDS >= target:
                until = sum(s.get("step_seconds") or 0.0 for s in steps if s["step"] <= step["step"])
                found |= {"steps_to_target": float(step["step"]), "seconds_to_target": until}
                break
    return found


def final(rows: Iterable[Row]) -> Final:
    """metric -> arm -> seed -> the value at the run's last step that has it; empty for a metric that no run has."""
    found: dict[str, dict[str, dict[int, tuple[int, float]]]] = defaultdict(lambda: defaultdict(dict))
    for arm, seed, step, metric, value in rows:
        of = found[metric][arm]
        if step >= of.get(seed, (-1, 0.0))[0]:
            of[seed] = (step, value)
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


def comparisons(study: Study, values: Final, metric: str = "accuracy") -> dict[str, list[Comparison]]:
    """ "best" and "common" -> the study's comparisons by ``metric`` over its seeds, corrected by Holm within each."""
    found = {}
    for kind, names in labels(study, values).items():
        of = {arm: _over(study.seeds, values[metric].get(names.get(arm, ""))) for arm in study.arms}
        made = [_compared(a, b, of[a], of[b]) for a, b in study.comparisons]
        found[kind] = holm([comparison for comparison in made if comparison is not None])
    return found


@dataclass(frozen=True)
class Verdict:
    """A claim of a study, what was measured, and what follows; ``measured`` is None for less than two seeds."""

    claim: Claim
    measured: Comparison | None
    verdict: str


def verdicts(study: Study, values: Final) -> list[Verdict]:
    """The study's claims, each arm at its best value of the sweep's key, judged with Holm's correction over those that
    there are results for. A claim of the metric ``sweep_gain`` is judged over the sweep's seeds."""
    names = labels(study, values)["best"]
    made: list[Comparison | None] = []
    seeds: list[int] = []  # how many both arms of a claim have
    for claim in study.claims:
        if claim.metric == SWEEP_GAIN:
            of = [sweep_gain(study, values, arm) for arm in claim.pair]
        else:
            of = [_over(study.seeds, values[claim.metric].get(names.get(arm, ""))) for arm in claim.pair]
        made.append(_compared(*claim.pair, *of))
        seeds.append(len(set(of[0]) & set(of[1])))
    corrected = iter(holm([comparison for comparison in made if comparison is not None]))
    found = []
    for claim, comparison, count in zip(study.claims, made, seeds, strict=True):
        if comparison is None:
            many = "no seed has" if count == 0 else "only one seed has"
            found.append(Verdict(claim, None, f"undecided: {many} {claim.metric} of both"))
        else:
            comparison = next(corrected)
            found.append(Verdict(claim, comparison, judged(comparison, claim.expect, claim.margin)))
    return found


def sweep_gain(study: Study, values: Final, arm: str) -> dict[int, float]:
    """Seed of the sweep -> an arm's primary accuracy at the largest value of its key, less that at the smallest."""
    assert study.sweep is not None
    largest, smallest = (
        _over(study.sweep.seeds, values["accuracy"].get(f"{arm}@{value:g}"))
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


def _over(seeds: Iterable[int], values: Mapping[int, float] | None) -> dict[int, float]:
    return {seed: values[seed] for seed in seeds if values is not None and seed in values}


def _compared(a: str, b: str, of_a: Mapping[int, float], of_b: Mapping[int, float]) -> Comparison | None:
    """Two arms over the seeds that both have; None for less than two."""
    return paired(a, b, of_a, of_b) if len(set(of_a) & set(of_b)) >= 2 else None
