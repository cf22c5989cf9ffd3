"""Arms of a study whose runs are those of another study: taken from its table, where they would be run alike."""

from pathlib import Path
from typing import Any

import yaml

from qerl_recipes.study.plan import Study, StudyError, read
from qerl_recipes.study.table import HOURS, TABLE, Row, read_table


def taken_rows(study: Study) -> list[Row]:
    """The rows of the arms that ``study`` takes, by its names for them; what they cost is counted where they ran.

    Raises StudyError where a run of the other study is missing, or would not be the same: another recipe, other keys,
    another primary evaluation.
    """
    if study.taken is None:
        return []
    file = study.taken.study
    other, table = read(file), file.with_suffix("") / TABLE
    if not table.is_file():
        raise StudyError(f"taken: {file} has no table {table} yet; run that study first")
    if other.evaluations[other.primary] != study.evaluations[study.primary]:
        raise StudyError(f"taken: the primary evaluation of {file} is another one")
    names = {}
    for arm, label in study.taken.arms.items():
        ours, theirs = _keys(study, arm), _keys(other, *label.split("@"))
        if differing := sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)):
            raise StudyError(f"taken.arms.{arm}: {label} of {file} differs in {', '.join(differing)}")
        names[label] = arm
    rows = [
        (names[label], seed, step, metric, value)
        for label, seed, step, metric, value in read_table(table)
        if label in names and seed in study.seeds and not metric.startswith(HOURS)
    ]
    judged = {(arm, seed) for arm, seed, _, metric, _ in rows if metric == "accuracy"}
    for arm, label in study.taken.arms.items():
        if missing := [seed for seed in study.seeds if (arm, seed) not in judged]:
            raise StudyError(f"taken.arms.{arm}: {table} has no accuracy of {label} with seed {missing[0]}")
    return rows


def _keys(study: Study, arm: str, value: str | None = None) -> dict[str, Any]:
    """The recipe's and the arm's keys, and that of the sweep."""
    if arm not in study.arms or (value is None) != (study.sweep is None):
        label = arm if value is None else f"{arm}@{value}"
        raise StudyError(f"taken: the other study has no {label}; with a sweep its arms are NAME@VALUE")
    keys = {**yaml.safe_load(Path(study.recipe).read_text(encoding="utf-8")), **study.arms[arm]}
    return keys if study.sweep is None else {**keys, study.sweep.key: float(value or "nan")}
