"""``qerl study`` from its file to its page."""

import sys
from pathlib import Path

from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.study.curves import draw
from qerl_recipes.study.finished import refuse_other_plan
from qerl_recipes.study.overview import overview, studies
from qerl_recipes.study.page import page
from qerl_recipes.study.plan import StudyError, read
from qerl_recipes.study.results import collect, final, labels
from qerl_recipes.study.run import RunsFailedError, run
from qerl_recipes.study.table import TABLE, read_table, write_table


def conduct(
    file: Path,
    folder: Path | None = None,
    *,
    jobs: int = 1,
    minutes: float | None = None,
    table: Path | None = None,
    finished: Path | None = None,
) -> Path:
    """What `qerl study` does: run what is missing, then write table, picture and page into ``folder`` -> the page.

    With ``table`` nothing runs: the page is made anew from that table, beside it. The runs that the table ``finished``
    has are not made again. ``folder`` is by default runs/studies/NAME, NAME being that of the file. Raises StudyError
    for a study or table that cannot be read, for a ``table`` that is not of this study as it is now, and, once all is
    written, where runs have failed.
    """
    study, failure = read(file), None
    if table is not None:
        folder, rows = table.parent, read_table(table)
        refuse_other_plan(study, rows, table)
    else:
        folder = folder or Path("runs/studies") / file.stem
        try:
            if not run(study, folder, jobs=jobs, minutes=minutes, table=finished):
                print("stopped before the end; the same command goes on", file=sys.stderr)
        except RunsFailedError as error:
            failure = error  # the page is of the runs that have not
        try:
            rows = collect(study, folder)
        except StudyError as error:
            if failure is None:
                raise
            raise StudyError(f"{error}; and {failure}") from error
        write_table(rows, folder / TABLE)
    title = f"Study: {file.stem.replace('_', ' ')}"
    lines = [page(study, rows, title, f"qerl study {file} --table {folder / TABLE}")]
    for kind, arms in labels(study, final(rows)).items():
        draw(rows, arms, study.seeds, folder / f"curves_{kind}.png")
        lines.append(f"![reward and entropy over steps, {kind}](curves_{kind}.png)\n")
    write_text(folder / "README.md", "\n".join(lines))
    if failure is not None:
        raise failure
    return folder / "README.md"


def sum_up(folder: Path) -> Path:
    """What `qerl study FOLDER` does: run nothing, make the page of each study that has a table anew, and one page over
    all of them -> that page. Raises StudyError for a study or table that cannot be read, or a table that is not
    of its study as it is now; the pages before it are made by then."""
    for file, table in studies(folder).items():
        if table.is_file():
            conduct(file, table=table)
    path = folder / "README.md"
    write_text(path, overview(folder))
    return path
