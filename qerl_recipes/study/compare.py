"""``qerl compare``: any two arms of a study by any metric of its table, beside the comparisons that were planned."""

from collections.abc import Sequence
from pathlib import Path

from qerl_recipes.study import by_problem
from qerl_recipes.study.finished import refuse_other_plan
from qerl_recipes.study.plan import StudyError, read
from qerl_recipes.study.results import final, of_seeds
from qerl_recipes.study.statistics import paired
from qerl_recipes.study.table import NAMES, Row, beside, read_table


def compare(file: Path, a: str, b: str, metric: str, steps: str | None = None, table: Path | None = None) -> str:
    """One line: the mean of ``a`` - ``b`` over the seeds of the study in ``file``, its 95 % intervals by t, paired by
    seed and unpaired, and the p of the t test and of all flips of the signs; of the accuracy also the interval over
    seeds and problems, where the table has judgements by problem.

    ``a`` and ``b`` are arms as the table names them (ARM@VALUE in a study with a sweep). Compared is the last value of
    ``metric``, or its mean over ``steps``, "FIRST-LAST". ``table``: by default NAME/results.csv.gz beside the plan.
    Raises StudyError for a table that is not of the study, and for an arm, a metric or steps that it does not have.
    """
    study, table = read(file), table or beside(file)
    rows = read_table(table)
    refuse_other_plan(study, rows, table)
    _refuse_unknown("arm", (a, b), {arm for arm, *_ in rows}, table)
    of_table = final(rows)  # and the summaries that older tables lack
    rows = [row for row in rows if row[0] in (a, b)]
    known = {name for name, arms in of_table.items() if (a in arms or b in arms) and not name.startswith(NAMES)}
    _refuse_unknown("metric", (metric,), known, table)
    values = of_table[metric] if steps is None else _means(rows, metric, *_ends(steps))
    of_a, of_b = (of_seeds(study.seeds, values.get(arm)) for arm in (a, b))
    if len(both := sorted(set(of_a) & set(of_b))) < 2:
        raise StudyError(
            f"{table}: {len(both)} seeds have {metric} of both {a} and {b}{'' if steps is None else f' in {steps}'}; a "
            "comparison needs at least 2"
        )
    found, where = paired(a, b, of_a, of_b), "" if steps is None else f" over steps {steps}"
    of = [sum(values[s] for s in both) / len(both) for values in (of_a, of_b)]
    judged = by_problem.interval(study, of_table, (a, b)) if (metric, steps) == ("accuracy", None) else None
    more = f", over seeds and {judged[1]} problems {judged[2][1]:+.4g} to {judged[2][2]:+.4g}" if judged else ""
    each = ", ".join(f"{of_a[s] - of_b[s]:+.4g}" for s in both)
    lacking = [str(s) for s in study.seeds if s not in both]  # of steps_to_target those that did not reach it
    left_out = f"; left out, since one of the two lacks it: {', '.join(lacking)}" if lacking else ""
    return (
        f"{metric}{where}: {a} {of[0]:.4g}, {b} {of[1]:.4g}; a - b = {found.difference:+.4g}, 95 % (t) "
        f"{found.t_low:+.4g} to {found.t_high:+.4g}{more}, p = {found.p:.2g}, exact {found.p_exact:.2g}, not "
        f"corrected; unpaired {found.unpaired_low:+.4g} to {found.unpaired_high:+.4g}; seeds "
        f"{', '.join(map(str, both))}: {each}{left_out}"
    )


def _means(rows: Sequence[Row], metric: str, first: int, last: int) -> dict[str, dict[int, float]]:
    """Arm -> seed -> the mean over the steps from ``first`` to ``last`` that have the metric.

    Raises StudyError where the runs end between the two.
    """
    if first <= (end := max(step for _, _, step, name, _ in rows if name == metric)) < last:
        raise StudyError(f"--steps {first}-{last}: the last step with {metric} is {end}; end there")
    found: dict[str, dict[int, list[float]]] = {}
    for arm, seed, step, name, value in rows:
        if name == metric and first <= step <= last:
            found.setdefault(arm, {}).setdefault(seed, []).append(value)
    return {arm: {seed: sum(of) / len(of) for seed, of in seeds.items()} for arm, seeds in found.items()}


def _ends(steps: str) -> tuple[int, int]:
    first, _, last = steps.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise StudyError(f"--steps {steps}: it is FIRST-LAST, such as 7-12")
    return int(first), int(last)


def _refuse_unknown(kind: str, given: Sequence[str], known: set[str], table: Path) -> None:
    if unknown := [name for name in given if name not in known]:
        raise StudyError(f"{table} has no {kind} {', '.join(unknown)}; it has {', '.join(sorted(known))}")
