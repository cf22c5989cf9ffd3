"""Which weights the runs of a study were trained on: runs on a base that was made anew are not to be compared."""

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from qerl_recipes.files.run_state import LAST
from qerl_recipes.study.plan import Run, Study, StudyError
from qerl_recipes.study.table import BASE, Row, named
from qerl_vllm_plugin.adapter.folder import STATE_FILE, base_hash

DIGITS = 12  # of a hash (`base_hash`)


def base_of(folder: Path) -> str | None:
    """Which base the run in ``folder`` was trained on; None where it has no adapter, or one that does not say it."""
    file = folder / LAST / STATE_FILE
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8")).get("base_hash")
    return None if found is None else found[:DIGITS]


def base_there(model: str) -> str | None:
    """Which one ``model_name_or_path`` names as it is now; None for one of the hub, or that is not there yet."""
    folder = Path(model)
    return base_hash(folder)[:DIGITS] if (folder / "config.json").is_file() else None


def refuse_other_weights(study: Study, runs: Iterable[Run], folder: Path) -> None:
    """Raises StudyError where a run below ``folder`` was trained on weights that its base has no longer."""
    recipe, now = study.settled({}), functools.cache(base_there)  # most runs have one base, which may be many files
    for one in runs:
        then, model = base_of(folder / one.folder), {**recipe, **one.keys}["model_name_or_path"]
        if then is not None and now(model) not in (None, then):
            raise StudyError(
                f"{folder / one.folder} was trained on {model} while that held other weights (base {then}, now "
                f"{now(model)}); put those back, or begin anew with another --output"
            )


def refuse_missing_bases(study: Study, runs: Iterable[Run]) -> None:
    """Raises StudyError for a base that is a folder by its name, and not there: every run on it would fail."""
    for model in sorted({study.settled(run.keys)["model_name_or_path"] for run in runs}):
        parts = Path(model).parts
        if (len(parts) > 2 or parts[0] in ("/", ".", "..", "~")) and not Path(model).is_dir():
            raise StudyError(
                f"model_name_or_path: there is no folder {model}; the head of {study.recipe} says how it is made, or "
                "name another one there"
            )


def check_taken(study: Study, rows: Sequence[Row]) -> None:
    """Raises StudyError for an arm of another study, ``rows`` as `taken_rows` gives them, whose base is not the one
    that this study's runs will have, or that does not say which it was. A model of the hub is known by its name."""
    for arm, label in study.taken_arms.items():
        now = base_there(study.settled(study.arms[arm])["model_name_or_path"])
        then = named(BASE, (row for row in rows if row[0] == arm))
        if now is not None and then != {now}:
            was = f"was trained on another base ({', '.join(sorted(then))})" if then else "does not say on which base"
            raise StudyError(
                f"taken.arms.{arm}: {label} {was}, and the one that is there now is {now}; take {arm} out of "
                "taken.arms, so that it is run here"
            )
