"""Arms of a study whose runs are those of another study: taken from its table, where they would be run alike."""

from collections.abc import Mapping
from typing import Any

from qerl_recipes.study.finished import plan_of
from qerl_recipes.study.plan import Study, StudyError, possible_runs, read
from qerl_recipes.study.table import BY_PROBLEM, HOURS, PLAN, PROBLEMS, TABLE, Row, named, read_table


def taken_rows(study: Study) -> list[Row]:
    """The rows of the arms that ``study`` takes, by its names for them; what they cost is counted where they ran.

    Raises StudyError where a run of the other study is missing, or would not be the same: another recipe, also than the
    run was made by, other keys, other evaluations, another target of the reward.
    """
    if study.taken is None:
        return []
    file = study.taken.study
    other, table = read(file), file.with_suffix("") / TABLE
    if not table.is_file():
        raise StudyError(f"taken: {file} has no table {table} yet; run that study first")
    if other.evaluations[other.primary] != study.evaluations[study.primary]:
        raise StudyError(f"taken: the primary evaluation of {file} is another one")
    for name in sorted(study.evaluations.keys() - {study.primary}):
        if name == other.primary or other.evaluations.get(name) != study.evaluations[name]:
            raise StudyError(
                f"taken: {file} has no evaluation {name}, or another of that name; run all arms, or leave it out"
            )
    if other.target_reward != study.target_reward:  # steps_to_target is absent where it was not reached
        raise StudyError(f"taken: target_reward of {file} is {other.target_reward}, and here {study.target_reward}")
    names: dict[str, str] = {}
    for arm, label in study.taken.arms.items():
        if label in names:
            raise StudyError(f"taken.arms: {names[label]} and {arm} are both {label}; one of them is enough")
        ours, theirs = _keys(study, arm), _keys(other, *label.partition("@")[::2])
        if differing := sorted(key for key in {*ours, *theirs} if _differs(key, ours, theirs)):
            raise StudyError(f"taken.arms.{arm}: {label} of {file} differs in {', '.join(differing)}")
        names[label] = arm
    of_arms = [row for row in read_table(table) if row[0] in names and row[1] in study.seeds]
    possible = possible_runs(other)
    for label, seed in sorted({row[:2] for row in of_arms}):
        run = possible.get((label, seed))
        plans = named(PLAN, (row for row in of_arms if row[:2] == (label, seed)))
        if run is None or plans != {plan_of(other, run)}:
            # an arm that the other study has itself taken says no keys, either
            was = "was made by other keys than" if plans else "does not say that it was made by the keys that"
            raise StudyError(
                f"taken.arms.{names[label]}: {label}/seed-{seed} of {table} {was} {file} and its recipe have now; put "
                "those back, or take the arm out of taken.arms, so that it is run here"
            )
    rows = [
        (names[label], seed, step, here, value)
        for label, seed, step, metric, value in of_arms
        if (here := _named_here(metric, study, other)) is not None
    ]
    judged = {(arm, seed) for arm, seed, _, metric, _ in rows if metric == "accuracy"}
    for arm, label in study.taken.arms.items():
        if missing := [seed for seed in study.seeds if (arm, seed) not in judged]:
            raise StudyError(f"taken.arms.{arm}: {table} has no accuracy of {label} with seed {missing[0]}")
    return rows


def _named_here(metric: str, study: Study, other: Study) -> str | None:
    """A metric of ``other`` as ``study`` names it; None for one that says something of ``other`` alone."""
    if metric.startswith((HOURS, PLAN)):
        return None
    if not metric.startswith((PROBLEMS, BY_PROBLEM)):
        return metric
    what, name, rest = metric.split("/", 2)
    if name == other.primary:  # it may have another name there
        return f"{what}/{study.primary}/{rest}"
    return metric if name in study.evaluations.keys() - {study.primary} else None


def _differs(key: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """null is a value too, and need not be what a key means that is absent."""
    return (key in ours) != (key in theirs) or ours[key] != theirs[key]


def _keys(study: Study, arm: str, value: str = "") -> dict[str, Any]:
    """The recipe's and the arm's keys, and that of the sweep."""
    if arm not in study.arms or (study.sweep is not None) != bool(value):
        label = f"{arm}@{value}" if value else arm
        raise StudyError(f"taken: the other study has no {label}; with a sweep its arms are NAME@VALUE")
    keys = study.settled(study.arms[arm])
    if study.sweep is None:
        return keys
    values = {f"{of:g}": of for of in study.sweep.values}
    if value not in values:
        raise StudyError(f"taken: {arm}@{value} is of no value of that study's sweep, which are {', '.join(values)}")
    return {**keys, study.sweep.key: values[value]}
