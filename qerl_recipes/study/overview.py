"""``qerl study FOLDER``: one page over all studies of a folder, from their plans and committed tables alone."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl_recipes.study.page import OF_CLAIMS, cell, cost, figures, progress, wanted
from qerl_recipes.study.plan import Study, StudyError, read
from qerl_recipes.study.results import Final, Verdict, comparisons, cut, final, labels, looks, verdicts
from qerl_recipes.study.statistics import ALPHA, IF_NORMAL, Comparison, holm
from qerl_recipes.study.table import TABLE, Row, beside, read_table

NOT_RUN = "not run yet"
VERDICTS = ("supported", "not supported", "undecided")  # how those of `statistics.judged` begin
METRICS = ("base_accuracy", "accuracy", "reward_gain", "clipped_end")


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
    before: dict[str, str] = {}  # what a study is of -> the first one that says so
    for one in found:
        name = f"[{one.name}]({one.name}/README.md)" if one.rows else f"[{one.name}]({one.name}.yaml)"
        runs = progress(one.study, one.values) + cost(one.rows) if one.rows else NOT_RUN
        about = " ".join(one.study.about.split())
        first = before.setdefault(about, one.name)
        lines.append(f"| {name} | {about if first == one.name else f'as {first}'} | {runs} |")
    if together := cost([row for one in found for row in one.rows]):
        lines += ["", f"All of them together:{together}"]
    of_plans, afterwards = (_said(found, of) for of in (verdicts, looks))
    head = [f"| {' | '.join(('claim', *VERDICTS, 'not tested'))} |", "|---" * (len(VERDICTS) + 2) + "|"]
    lines += ["", "## What is said, in a line each", "", *head]
    lines += [_in_one_line(claim, those) for claim, those in of_plans.items()]
    lines += [f"| {claim} |  |  |  | {why} |" for one in found for claim, why in one.study.afterwards.untested.items()]
    lines += ["", f"The difference and its 95 % interval by t. {OF_CLAIMS}", ""]
    if afterwards:
        lines += ["## Looked at afterwards", "", "Added once the results were known.", "", *head]
        lines += [*(_in_one_line(claim, those) for claim, those in afterwards.items()), ""]
    shown = [one for one in found if one.rows]
    lines += _decided(shown)
    if named := [(one, run, share) for one in shown for run, share in cut(one.values).items()]:
        lines += ["## Runs that end with more than a tenth of their completions cut", ""]
        lines += ["What follows without them stands on the page of the study.", "", "| study | arm | seed | cut |"]
        lines += ["|---" * 4 + "|", *(f"| {one.name} | {arm} | {s} | {c:.0%} |" for one, (arm, s), c in named), ""]
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


def _said(found: Sequence[Found], judge: Callable[[Study, Final], list[Verdict]]) -> Said:
    said: Said = {}
    for one in found:
        for verdict in judge(one.study, one.values):
            said.setdefault(verdict.claim.claim, []).append((one, verdict))
    return said


def _in_one_line(claim: str, those: Sequence[tuple[Found, Verdict]]) -> str:
    """Which studies say what of a claim, on what figures; "undecided" is said in several ways."""
    cells = []
    for kind in VERDICTS:
        of = [(one.name, v) for one, v in those if one.rows and v.verdict.startswith(kind)]
        cells.append("; ".join(f"{name} {figures(v)}{_rest(v)}" for name, v in of))
    waiting = ", ".join(one.name for one, _ in those if not one.rows)
    return f"| {claim} | {' | '.join(cells)} | {waiting} |"


def _rest(found: Verdict) -> str:
    """What a verdict says beside its kind."""
    _, colon, why = found.verdict.partition(": ")
    return f"({why})" if colon else IF_NORMAL if found.verdict.endswith(IF_NORMAL) else ""


def _decided(shown: Sequence[Found]) -> list[str]:
    """The comparisons that are decided within their study, each arm at its best value; the others stand on its page.
    Beside them Holm's correction over those of all studies, which share seeds and runs."""
    planned = sum(len(one.study.comparisons) for one in shown)
    made = [(one, c) for one in shown for c in comparisons(one.study, one.values).get("best", [])]
    over_all = holm([c for _, c in made], planned)
    decided = [(one, c, of_all) for (one, c), of_all in zip(made, over_all, strict=True) if c.is_decided]
    if not decided:
        return []
    question = "lower or higher in qerl_nvfp4 than in bf16, all other keys equal"
    alike = sum(_differ_in_weights(one.study, c) for one, c, _ in decided)
    still = [f"{c.a} - {c.b} of {one.name}" for one, c, of_all in decided if of_all.p_holm < ALPHA]
    lines = [f"## The {len(decided)} of {planned} planned comparisons of accuracy that are decided", ""]
    lines += [
        f"Corrected within each study. Corrected over all {planned}, {len(still)} are left"
        f"{': ' if still else ''}{', '.join(still)}. {alike} of the {len(decided)} ask one question: {question}.",
        "",
        "| study | a | b | seeds | a - b | 95 % (t) | p, Holm | over all | p, exact | a is |",
        "|---" * 10 + "|",
    ]
    lines += [
        f"| {one.name} | {c.a} | {c.b} | {c.seeds} | {c.difference:+.1%} | {c.t_low:+.1%} to {c.t_high:+.1%} "
        f"| {c.p_holm:.3f} | {of_all.p_holm:.3f} | {c.p_exact:.2g} | {c.verdict()} |"
        for one, c, of_all in decided
    ]
    return [*lines, ""]


def _differ_in_weights(study: Study, c: Comparison) -> bool:
    """Whether the two arms are one recipe on NVFP4 weights and on BF16 weights."""
    of = [study.settled(study.arms[arm]) for arm in (c.a, c.b)]
    weights = [keys.pop("quantization", None) for keys in of]
    return of[0] == of[1] and sorted(map(str, weights)) == ["bf16", "qerl_nvfp4"]


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
