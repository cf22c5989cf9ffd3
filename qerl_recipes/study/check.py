"""What of a study can be refused before anything runs: keys that `qerl train` or `qerl evaluate` would not take."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.recipe.keys import CANNOT_RUN
from qerl_recipes.study.base import check_taken
from qerl_recipes.study.plan import Study, StudyError, first_runs, flags
from qerl_recipes.study.taken import taken_rows

if TYPE_CHECKING:
    from qerl_recipes.evaluate.request import Evaluation

OF_THE_STUDY = (
    "base",
    "adapter",
    "quantization",
    "output_dir",
    "adapter_only",
    "quiet",
)  # set by it, in every evaluation


def check(study: Study) -> None:
    """Raises StudyError, naming the arm or the evaluation, for what would be refused as it is read, and for arms of
    another study that would not be the same; nothing is loaded.

    What depends on data, model and machine is checked by each run as it starts.
    """
    check_evaluations(study)
    check_taken(study, taken_rows(study))
    from qerl_recipes.hooks import unknown_names
    from qerl_recipes.recipe import checks
    from qerl_recipes.recipe.configs import parse
    from qerl_recipes.recipe.file import ConfigError

    for run in {run.label: run for run in first_runs(study)}.values():
        try:
            found = parse(["--config", str(study.recipe), *flags({**run.keys, "seed": run.seed})])
        except ConfigError as error:
            raise StudyError(f"arms.{run.arm}: {error}") from error
        if problems := [*checks.problems(*found), *unknown_names(found[1])]:
            raise StudyError(f"arms.{run.arm}: {CANNOT_RUN}: {'; '.join(problems)}")


def check_evaluations(study: Study) -> None:
    """Raises StudyError, naming the evaluation, for unknown options, and for values and tasks without sense."""
    for name, options in study.evaluations.items():
        if taken := sorted(set(options) & set(OF_THE_STUDY)):
            raise StudyError(f"evaluations.{name}: {', '.join(taken)} is set by the study itself; remove it")
        try:
            _evaluation(options).checked()
        except ValueError as error:
            raise StudyError(f"evaluations.{name}: {error}") from error


def check_tasks(study: Study) -> None:
    """Load the problems of every evaluation, and what judges their answers: a training that nothing can judge is lost.

    Raises StudyError, naming the evaluation, where a package, a file or a data set is missing.
    """
    try:
        from qerl_recipes.evaluate import tasks
    except ImportError as error:
        raise StudyError(f"nothing can be evaluated here, so nothing is trained: {error}") from error
    for name, options in study.evaluations.items():
        try:
            with tasks.quietly():
                tasks.load_asked(_evaluation(options))
        except (ValueError, OSError, ImportError) as error:
            raise StudyError(f"evaluations.{name} cannot be made here, so nothing is trained: {error}") from error


def _evaluation(options: dict[str, Any]) -> "Evaluation":
    """What a run will ask, of no run yet."""
    from qerl_recipes.evaluate.request import Evaluation

    return Evaluation.of(base="", adapter="", output_dir=Path(), **with_list(options))


def with_list(options: dict[str, Any]) -> dict[str, Any]:
    """The same with the tasks as a list, where they are one text with commas, as on the command line."""
    tasks = options.get("tasks")
    return {**options, "tasks": [task.strip() for task in tasks.split(",")]} if isinstance(tasks, str) else options
