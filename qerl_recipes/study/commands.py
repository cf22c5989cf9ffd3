"""Run what ``qerl study`` and ``qerl compare`` ask for."""

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from qerl_recipes.files.metrics_file import requested_name
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.study import pages
from qerl_recipes.study.check import check
from qerl_recipes.study.inventory import TABLE, beside, collect, read_table, refuse_other_plan, write_table
from qerl_recipes.study.plan import Study, StudyError, read
from qerl_recipes.study.results import ACCURACY, by_arm, compared, final, of_arm, over_problems
from qerl_recipes.study.runner import RunsFailedError, run
from qerl_recipes.study.statistics import compare as paired


def print_plan(file: Path) -> None:
    """Check the arms and evaluations of a study, run nothing, and print its plan."""
    study = read(file)
    check(study)
    print(pages.outline(study, file), end="")


def conduct(
    file: Path,
    folder: Path | None = None,
    *,
    jobs: int = 1,
    minutes: float | None = None,
    table: Path | None = None,
    finished: Path | None = None,
) -> Path:
    """Run what is missing of a study, write table, plot and page into ``folder``, and return the page.

    With ``table`` nothing runs: the page is made anew from that table, beside it. The runs that the table ``finished``
    has are not made again. Raises StudyError for a study or table that cannot be read, for a ``table`` that is not of
    this study as it is now, and, once all is written, if runs have failed.
    """
    study, failure = read(file), None
    if table is not None:
        folder, rows = table.parent, read_table(table)
        refuse_other_plan(study, rows, table)
    else:
        folder = folder or _default(file)
        try:
            run(study, folder, jobs=jobs, minutes=minutes, table=finished)
        except RunsFailedError as error:
            failure = error  # the page is of the runs that have not
        try:
            rows = collect(study, folder)
        except StudyError as error:
            if failure is None:
                raise
            raise StudyError(f"{error}; and {failure}") from error
        write_table(rows, folder / TABLE)
    _write_page(study, rows, final(rows, study.target_reward), file, folder, finished)
    if failure is not None:
        raise failure
    return folder / "README.md"


def _default(file: Path) -> Path:
    return Path("runs/studies") / file.stem


def _write_page(
    study: Study, rows: pd.DataFrame, values: pd.DataFrame, file: Path, folder: Path, finished: Path | None = None
) -> pd.DataFrame:
    """Write page, plot and tables of a study into ``folder``, and return its comparisons."""
    found = compared(study, values)
    tables = {pages.COMPARISONS: found, pages.CONFIGURATIONS: by_arm(study, rows, values)}
    for name, content in tables.items():
        if content.empty:  # no comparison is planned
            continue
        write_text(folder / name, content.to_csv(index=False, float_format="%.5g", lineterminator="\n"))
    pages.draw(study, rows, values, folder / pages.CURVES)
    output = [] if folder in (_default(file), beside(file).parent) else ["--output", str(folder)]
    given = output if finished is None else [*output, "--finished", str(finished)]
    write_text(folder / "README.md", pages.page(study, rows, values, found, file, *given))
    return found


def sum_up(folder: Path) -> Path:
    """Make each page of a folder's tables, and return one over all; raise StudyError for a table not of its study."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise StudyError(f"{folder} has no study file, NAME.yaml")
    found, tables = {}, {}
    for file in files:
        study, table = read(file), beside(file)
        rows = read_table(table) if table.is_file() else pd.DataFrame()
        values = final(rows, study.target_reward) if len(rows) else pd.DataFrame()
        if len(rows):
            refuse_other_plan(study, rows, table)
            tables[file] = _write_page(study, rows, values, file, table.parent)
        found[file] = study, rows, values
    write_text(folder / "README.md", pages.overview(folder, found, tables))
    return folder / "README.md"


def compare(file: Path, a: str, b: str, metric: str, steps: str | None = None, table: Path | None = None) -> str:
    """Compare any two arms of a study by any metric of its table, in one line.

    The line has the mean of ``a`` - ``b`` over the seeds, its 95 % intervals by t, paired by seed and unpaired, and the
    p of the t test and of all flips of the signs; for the accuracy also the interval over seeds and problems. The last
    value of ``metric`` is compared, or its mean over ``steps``, "FIRST-LAST". Raises StudyError for a table that is not
    of the study, and for an arm, a metric or steps that it does not have.
    """
    study, table, metric = read(file), table or beside(file), requested_name(metric)
    rows = read_table(table)
    refuse_other_plan(study, rows, table)
    values = final(rows, study.target_reward)
    _refuse_unknown("arm", (a, b), set(rows.arm), table)
    of_both = values[values.index.get_level_values("arm").isin([a, b])].dropna(axis="columns", how="all")
    _refuse_unknown("metric", (metric,), set(of_both.columns), table)
    where = "" if steps is None else f" over steps {steps}"
    if steps is not None:
        values = _means(rows[rows.arm.isin([a, b])], metric, steps)
    of_a, of_b = (of_arm(values, metric, arm, study.seeds) for arm in (a, b))
    both = of_a.index.intersection(of_b.index).sort_values()
    found = paired((a, b), of_a, of_b)
    if found is None:
        raise StudyError(
            f"{table}: {len(both)} seeds have {metric} of both {a} and {b}{'' if steps is None else f' in {steps}'}; a "
            "comparison needs at least 2"
        )
    judged = over_problems(study, rows, a, b, both) if (metric, steps) == (ACCURACY, None) else None
    more = f", over seeds and {judged[0]} problems {judged[1]:+.4g} to {judged[2]:+.4g}" if judged else ""
    each = ", ".join(f"{difference:+.4g}" for difference in of_a[both] - of_b[both])
    lacking = [str(seed) for seed in study.seeds if seed not in both]  # of steps_to_target those that did not reach it
    left_out = f"; left out, since one of the two lacks it: {', '.join(lacking)}" if lacking else ""
    return (
        f"{metric}{where}: {a} {of_a[both].mean():.4g}, {b} {of_b[both].mean():.4g}; a - b = {found.difference:+.4g}, "
        f"95 % (t) {found.low:+.4g} to {found.high:+.4g}{more}, p = {found.p:.2g}, exact {found.p_exact:.2g}, not "
        f"corrected; unpaired {found.unpaired_low:+.4g} to {found.unpaired_high:+.4g}; seeds "
        f"{', '.join(map(str, both))}: {each}{left_out}"
    )


def _means(rows: pd.DataFrame, metric: str, steps: str) -> pd.DataFrame:
    """Return the mean over the steps of each run; raise StudyError if a run ends between the first and the last."""
    if not (ends := re.fullmatch(r"(\d+)-(\d+)", steps)) or int(ends[1]) > int(ends[2]):
        raise StudyError(f"--steps {steps}: it is FIRST-LAST, such as 7-12")
    first, last = map(int, ends.groups())
    rows = rows[rows.metric == metric]
    ends = rows.groupby(["arm", "seed"]).step.max()
    if len(early := ends[ends.between(first, last - 1)]):
        (arm, seed), end = early.idxmin(), early.min()
        raise StudyError(f"--steps {steps}: the last step with {metric} of {arm} seed {seed} is {end}; end there")
    return rows[rows.step.between(first, last)].groupby(["arm", "seed"]).value.mean().to_frame(metric)


def _refuse_unknown(kind: str, given: Sequence[str], known: set[str], table: Path) -> None:
    if unknown := [name for name in given if name not in known]:
        raise StudyError(f"{table} has no {kind} {', '.join(unknown)}; it has {', '.join(sorted(known))}")
