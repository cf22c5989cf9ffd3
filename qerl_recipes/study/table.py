"""A study's results in one file, ``results.csv.gz``: columns arm, seed, step, metric, value."""

import csv
import gzip
import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from qerl_recipes.files.whole_folder import write_bytes
from qerl_recipes.study.plan import StudyError

TABLE, COLUMNS = "results.csv.gz", ("arm", "seed", "step", "metric", "value")
Row = tuple[str, int, int, str, float]
HOURS = "hours/"  # a metric that begins so is of a device, which follows
BASE = "base/"  # and one that begins so names the base that a run was trained on: value 1
PLAN = "plan/"  # and so its keys and evaluations (`finished.plan_of`)
PROBLEMS = "problems/"  # and so, behind NAME/, the problems of an evaluation
BY_PROBLEM = "by_problem/"  # and so, behind NAME/, the judgements of its answers (`by_problem`): value problems
NAMES = (HOURS, BASE, PLAN, PROBLEMS, BY_PROBLEM)  # how metrics begin that say something by their name


def beside(file: Path) -> Path:
    """Where the published table of the study in ``file``, NAME.yaml, is or is to be: NAME/results.csv.gz."""
    return file.parent / file.stem / TABLE


def named(what: str, rows: Iterable[Row]) -> set[str]:
    """What rows say of BASE, PLAN or PROBLEMS: what stands behind it."""
    return {metric.removeprefix(what) for *_, metric, _ in rows if metric.startswith(what)}


def write_table(rows: Iterable[Row], path: Path) -> None:
    """Write the rows, the same bytes for the same rows; whoever reads the table meanwhile reads it whole.

    Figures of each step have six digits. Those that a run has once are as they are: pages made from the table and from
    the runs are the same.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    rows = list(rows)
    times = Counter((arm, seed, metric) for arm, seed, _, metric, _ in rows)
    for arm, seed, step, metric, value in sorted(rows):
        whole = times[arm, seed, metric] == 1  # what a run comes to, from which verdicts follow
        writer.writerow((arm, seed, step, metric, repr(float(value)) if whole else f"{value:.6g}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, gzip.compress(text.getvalue().encode(), mtime=0))


def read_table(path: Path) -> list[Row]:
    """The rows of a table. Raises StudyError for a file that is none."""
    try:
        lines = list(csv.reader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))
        if tuple(lines[0]) != COLUMNS:
            raise ValueError(f"its columns are {', '.join(lines[0])}")
        return [(arm, int(seed), int(step), metric, float(value)) for arm, seed, step, metric, value in lines[1:]]
    except (OSError, ValueError, IndexError, EOFError) as error:
        raise StudyError(f"{path} is no table of a study ({error}); qerl study writes one") from error
