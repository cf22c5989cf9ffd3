"""``qerl study --finished TABLE``: runs that are not made again because a table has them, wherever their folders are.

So a study goes on on another machine from its published table, or with more seeds. The rows are kept in the study's
folder; of a run that lies there too, they are what counts.
"""

import functools
import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from qerl_recipes.study.base import DIGITS, base_there
from qerl_recipes.study.plan import Run, Study, StudyError, possible_runs
from qerl_recipes.study.summaries import summaries
from qerl_recipes.study.table import BASE, PLAN, Row, named, read_table, write_table

KEPT = "finished.csv.gz"
ROUNDING = 1e-5  # of a reward in a table, which has six digits
Rows = dict[tuple[str, int], list[Row]]  # (an arm's label, a seed) -> the rows of that run


def keep(study: Study, table: Path, folder: Path) -> None:
    """From now on the runs that ``table`` has count as finished in ``folder``, and no others of a table before.

    Raises StudyError, before anything is kept, where the table is none, has a run that the study does not ask for, one
    of other keys, or one without an evaluation, or does not say by which keys and on which base a run was trained.
    """
    found = {key: rows for key, rows in _by_run(read_table(table)).items() if key[0] not in study.taken_arms}
    refuse_other_plan(study, itertools.chain(*found.values()), table)
    possible = possible_runs(study)
    for (label, seed), rows in found.items():
        where, metrics = f"{table}: {label}/seed-{seed}", {metric for *_, metric, _ in rows}
        run = possible[label, seed]
        for name in study.evaluations_of(run):
            if (metric := "accuracy" if name == study.primary else f"accuracy/{name}") not in metrics:
                raise StudyError(f"{where} has no {metric}; leave --finished out, so that it is run")
        for what in (PLAN, BASE):
            if not named(what, rows):
                raise StudyError(
                    f"{where} has no {what}..., which older tables lack; leave --finished out, so that it is run"
                )
    refuse_other_bases(study, found, str(table))
    write_table([row for rows in found.values() for row in rows], folder / KEPT)


def refuse_other_plan(study: Study, rows: Iterable[Row], table: Path) -> None:
    """Raises StudyError where a run of ``table`` is not of this study, or was made by other keys, or for another target
    of the reward, than there are now. A table of before, which does not say its keys, is believed."""
    possible = possible_runs(study)
    for (label, seed), those in _by_run(rows).items():
        run, where = possible.get((label, seed)), f"{table}: {label}/seed-{seed}"
        if run is None and label not in study.taken_arms:
            raise StudyError(f"{where} is no run of this study; name the table of this one")
        if run is not None and (plans := named(PLAN, those)) and plans != {plan_of(study, run)}:
            raise StudyError(
                f"{where} was made by other keys of the recipe, the arm or its evaluations than there are now; put "
                "those back, or begin anew without this table"
            )
        refuse_other_target(study, those, where)


def refuse_other_target(study: Study, rows: Iterable[Row], where: str) -> None:
    """Raises StudyError where a run's rows say another step, or none, at which it reached ``target_reward``."""
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    said = None
    for _, _, step, metric, value in rows:
        if metric in ("reward", "step_seconds"):
            steps[step] |= {"step": step, metric: value}
        elif metric == "steps_to_target":
            said = value
    target = study.target_reward
    within = ROUNDING * max(1.0, abs(target or 0.0))
    near = (None, None) if target is None else (target - within, target + within)
    records = [steps[step] for step in sorted(steps)]
    first, last = (summaries(records, of).get("steps_to_target", math.inf) for of in near)
    if steps and not first <= (math.inf if said is None else said) <= last:
        raise StudyError(
            f"{where} reached its target at another step than follows from target_reward {target}; put back the one "
            "that it was made for, or begin anew without this table"
        )


def kept(folder: Path) -> Rows:
    """The runs that count as finished in ``folder``, whatever lies there of them."""
    path = folder / KEPT
    return _read(path, path.stat().st_mtime_ns) if path.is_file() else {}


def plan_of(study: Study, run: Run) -> str:
    """What decides a run but for the weights, in few digits: the keys of its training, and its evaluations."""
    decides = [study.decided(run.keys), run.seed, study.evaluations_of(run)]
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]


def refuse_other_bases(study: Study, runs: Rows, where: str) -> None:
    """Raises StudyError where a run was trained on weights that its base has no longer; ``where`` it stands."""
    recipe, possible, now = study.settled({}), possible_runs(study), functools.cache(base_there)
    for key, rows in runs.items():
        then, model = named(BASE, rows), {**recipe, **possible[key].keys}["model_name_or_path"]
        if now(model) is not None and then != {now(model)}:
            raise StudyError(
                f"{where}: {possible[key].folder} was trained on another base ({', '.join(sorted(then))}) than the "
                f"{model} that is there now ({now(model)}); put those weights back, or leave --finished out and name "
                "another --output"
            )


def _by_run(rows: Iterable[Row]) -> Rows:
    found: Rows = defaultdict(list)
    for row in rows:
        found[row[0], row[1]].append(row)
    return dict(found)


@functools.lru_cache(maxsize=1)
def _read(path: Path, changed: int) -> Rows:
    """A study looks at all of its runs whenever one has ended; ``changed`` is when the table was."""
    return _by_run(read_table(path))
