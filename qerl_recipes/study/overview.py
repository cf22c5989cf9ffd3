"""``qerl study FOLDER``: one page over all studies of a folder, from their plans and committed tables alone."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl_recipes.study.page import OF_CLAIMS, cell, cost, progress, told, wanted
from qerl_recipes.study.plan import Study, StudyError, read
from qerl_recipes.study.results import Final, Verdict, comparisons, final, labels, verdicts
from qerl_recipes.study.table import TABLE, Row, beside, read_table

NOT_RUN = "not run yet"
VERDICTS = ("supported", "not supported", "undecided")  # how those of `statistics.judged` begin
METRICS = (
    *(
        "base_accuracy",
        "accuracy",
        "reward_area",
        "sampled_entropy_start",
        "mismatch",
        "without_signal",
        "seconds_a_step",
    ),
    "steps_to_target",
)


@dataclass(frozen=True)
class Found:
    """A study of the folder with its table's last values; ``rows`` are empty where it has no table."""

    name: str
    study: Study
    rows: Sequence[Row]
    values: Final


Said = dict[str, list[tuple[Found, Verdict]]]  # claim -> what each study that has it says


def studies(folder: Path) -> dict[Path, Path]:
    """The study files of a folder -> where the table of each is, or is to be. Raises StudyError where there is none."""
    found = {file: beside(file) for file in sorted(folder.glob("*.yaml"))}
    if not found:
        raise StudyError(f"{folder} has no study file, NAME.yaml")
    return found


def overview(folder: Path) -> str:
    """The page as Markdown: every study and what they cost, every claim in a line and by study, every arm."""
    found = []
    for file, table in studies(folder).items():
        rows = read_table(table) if table.is_file() else []
        found.append(Found(file.stem, read(file), rows, final(rows)))
    lines = ["# Studies", ""]
    lines += [
        f"Made by `qerl study {os.path.relpath(folder)}` from the plans (`NAME.yaml`) and their tables "
        f"(`NAME/{TABLE}`) alone.",
        "",
        "| study | what it is of | runs |",
        "|---|---|---|",
    ]
    for one in found:
        name = f"[{one.name}]({one.name}/README.md)" if one.rows else f"[{one.name}]({one.name}.yaml)"
        runs = progress(one.study, one.values) + cost(one.rows) if one.rows else NOT_RUN
        lines.append(f"| {name} | {' '.join(one.study.about.split())} | {runs} |")
    if together := cost([row for one in found for row in one.rows]):
        lines += ["", f"All of them together:{together}"]
    said = _said(found)
    lines += ["", "## What is said, in a line each", "", f"| claim | {' | '.join(VERDICTS)} |"]
    lines += ["|---" * (len(VERDICTS) + 1) + "|", *(_in_one_line(claim, those) for claim, those in said.items())]
    lines += ["", OF_CLAIMS]
    lines += ["", "## What was measured", "", "| claim | study | measured | verdict |"]
    lines += ["|---" * 4 + "|", *_by_study(said), ""]
    shown = [one for one in found if one.rows]
    if decided := [line for one in found for line in _decided(one)]:
        planned = sum(len(one.study.comparisons) for one in shown)
        lines += [f"## The {len(decided)} of {planned} planned comparisons of accuracy that are decided", ""]
        lines += ["Corrected within each study, not over all.", ""]
        lines += ["| study | a | b | seeds | a - b | 95 % (t) | p, Holm | a is |", "|---" * 8 + "|", *decided, ""]
    if shown:
        lines += [
            "## Every arm",
            "",
            "Mean over the seeds, and its standard deviation; where not all runs have a value, of how many. Each arm "
            "at its best value.",
            "",
        ]
        lines += [f"| study | arm | seeds | {' | '.join(METRICS)} |", "|---" * (len(METRICS) + 3) + "|"]
        lines += [line for one in shown for line in _arms(one)]
    for one in shown:
        lines += ["", f"![{one.name}: reward and entropy over steps]({one.name}/curves_best.png)"]
    return "\n".join(lines) + "\n"


def _said(found: Sequence[Found]) -> Said:
    said: Said = {}
    for one in found:
        for verdict in verdicts(one.study, one.values):
            said.setdefault(verdict.claim.claim, []).append((one, verdict))
    return said


def _in_one_line(claim: str, those: Sequence[tuple[Found, Verdict]]) -> str:
    """Which studies say what of a claim; "undecided" is said in several ways."""
    run = [(one.name, verdict.verdict) for one, verdict in those if one.rows]
    cells = [", ".join(name for name, verdict in run if verdict.startswith(kind)) for kind in VERDICTS]
    return f"| {claim} | {' | '.join(cells)} |"


def _by_study(said: Said) -> list[str]:
    """Of each claim a line for every study that has runs, and one line for those that have none."""
    lines = []
    for claim, those in said.items():
        lines += [f"| {claim} | {one.name} | {told(v)} | {v.verdict} |" for one, v in those if one.rows]
        if waiting := [one.name for one, _ in those if not one.rows]:
            lines.append(f"| {claim} | {', '.join(waiting)} | | {NOT_RUN} |")
    return lines


def _decided(one: Found) -> list[str]:
    """Those with each arm at its best value; the others stand on the study's page."""
    compared = comparisons(one.study, one.values).get("best", [])
    return [
        f"| {one.name} | {c.a} | {c.b} | {c.seeds} | {c.difference:+.1%} | {c.t_low:+.1%} to {c.t_high:+.1%} "
        f"| {c.p_holm:.3f} | {c.verdict()} |"
        for c in compared
        if c.is_decided
    ]


def _arms(one: Found) -> list[str]:
    values, lines = one.values, []
    for label in labels(one.study, values)["best"].values():
        of = [values[metric].get(label, {}) for metric in METRICS]
        of = [{seed: value for seed, value in seeds.items() if seed in one.study.seeds} for seeds in of]
        count = max(map(len, of))
        pairs = zip(METRICS, of, strict=True)
        cells = " | ".join(cell(list(seeds.values()), wanted(metric, count)) for metric, seeds in pairs)
        lines.append(f"| {one.name} | {label} | {count} | {cells} |")
    return lines
