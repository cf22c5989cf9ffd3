"""What is there of a study: which runs it has, which of them are finished, and what their evaluations say."""

import hashlib
import json
from pathlib import Path

from qerl_recipes.study import by_problem, finished
from qerl_recipes.study.base import DIGITS
from qerl_recipes.study.plan import Run, Study, best_values, first_runs, later_runs
from qerl_recipes.study.table import PROBLEMS

RESULT = "evaluation.json"


def all_runs(study: Study, folder: Path) -> list[Run]:
    """The runs of a study as far as its results say which they are; one that serves two purposes stands there once."""
    runs = first_runs(study)
    if study.sweep is not None:
        runs += later_runs(study, best_values(study, sweep_accuracies(study, folder)))
    return list({run.folder: run for run in runs}.values())


def is_finished(study: Study, run: Run, folder: Path) -> bool:
    """Whether a run is trained and all its evaluations are there, or a table has them."""
    if (run.label, run.seed) in finished.kept(folder):
        return True
    return all((folder / run.folder / "evaluation" / name / RESULT).is_file() for name in study.evaluations_of(run))


def figures(study: Study, run: Run, folder: Path) -> dict[str, float]:
    """What the evaluations of a finished run say: ``accuracy`` (the primary one) and ``ended``, the share of answers
    that ended by themselves, ``accuracy/NAME`` and ``ended/NAME``, ``pass@K/NAME`` and ``maj@K/NAME`` for several
    answers a problem, and the same of the base, where it was judged, as ``base_...``."""
    found: dict[str, float] = {}
    for name in study.evaluations_of(run):
        path = folder / run.folder / "evaluation" / name / RESULT
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"].values()
        of = "" if name == study.primary else f"/{name}"
        for arm in next(iter(tasks)):
            prefix = "base_" if arm == "base" else ""
            found[f"{prefix}accuracy{of}"] = sum(task[arm]["accuracy"] for task in tasks) / len(tasks)
            if all("ended" in task[arm] for task in tasks):  # an older evaluation does not say it
                found[f"{prefix}ended{of}"] = sum(task[arm]["ended"] for task in tasks) / len(tasks)
            for kind, label in (("pass_at", "pass"), ("maj_at", "maj")):
                for k in next(iter(tasks))[arm].get(kind, {}):
                    mean = sum(task[arm][kind][k]["value"] for task in tasks) / len(tasks)
                    found[f"{prefix}{label}@{k}{of}"] = mean
    return found


def asked_and_judged(study: Study, run: Run, folder: Path) -> dict[str, float]:
    """What a table says by the names of metrics of a finished run's evaluations, as far as these say it:
    problems/NAME/DIGITS, which problems were asked, and how each answer was judged (`by_problem`)."""
    found: dict[str, float] = {}
    for name in study.evaluations_of(run):
        content = json.loads((folder / run.folder / "evaluation" / name / RESULT).read_text(encoding="utf-8"))
        if hashes := content.get("problems_sha256"):
            digest = hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()
            found[f"{PROBLEMS}{name}/{digest[:DIGITS]}"] = 1.0
        found |= by_problem.metrics(name, content)
    return found


def sweep_accuracies(study: Study, folder: Path) -> dict[tuple[str, int, float], float]:
    """(arm, seed, value) -> the primary accuracy of the sweep's runs that have finished."""
    return {
        (run.arm, run.seed, run.value): _accuracy(study, run, folder)
        for run in first_runs(study)
        if run.value is not None and is_finished(study, run, folder)
    }


def _accuracy(study: Study, run: Run, folder: Path) -> float:
    rows = finished.kept(folder).get((run.label, run.seed), ())
    known = [value for *_, metric, value in rows if metric == "accuracy"]
    return known[0] if known else figures(study, run, folder)["accuracy"]
