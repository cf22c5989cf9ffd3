"""Refuse, before anything of a study runs, what a run of it would be refused for."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.recipe.keys import CANNOT_RUN
from qerl_recipes.study.inventory import taken_rows
from qerl_recipes.study.plan import OURS, Run, Study, StudyError, first_runs

if TYPE_CHECKING:
    from qerl_recipes.evaluate.request import Evaluation

OF_THE_STUDY = ("base", "adapter", "quantization", "output_dir", "adapter_only", "quiet")  # set in every evaluation


def check(study: Study) -> None:
    """Raise StudyError, naming the arm or evaluation, for what its command would refuse; nothing is loaded."""
    for name, options in study.evaluations.items():
        if own := sorted(set(options) & set(OF_THE_STUDY)):
            raise StudyError(f"evaluations.{name}: {', '.join(own)} is set by the study itself; remove it")
        try:
            _evaluation(options).checked()
        except ValueError as error:
            raise StudyError(f"evaluations.{name}: {error}") from error
    taken_rows(study)
    from qerl_recipes.hooks import unknown_names
    from qerl_recipes.recipe import checks
    from qerl_recipes.recipe.configs import parse
    from qerl_recipes.recipe.file import ConfigError
    from qerl_recipes.train import stock_trl

    for one in {one.label: one for one in first_runs(study)}.values():
        try:
            parsed = parse(["--config", str(study.recipe), *one.flags])
        except ConfigError as error:
            raise StudyError(f"arms.{one.arm}: {error}") from error
        stock = [] if one.trainer == OURS else stock_trl.problems(*parsed[:2])
        if problems := [*checks.problems(*parsed), *unknown_names(parsed[1]), *stock]:
            raise StudyError(f"arms.{one.arm}: {CANNOT_RUN}: {'; '.join(problems)}")


def check_tasks(study: Study) -> None:
    """Load what judges the runs: a training that nothing can judge is lost. Raise StudyError if it is missing."""
    try:
        from qerl_recipes.evaluate import tasks
    except ImportError as error:
        raise StudyError(f"nothing can be evaluated here, so nothing is trained: {error}") from error
    for name, options in study.evaluations.items():
        try:
            tasks.load_evaluation(_evaluation(options))
        except (ValueError, OSError, ImportError) as error:
            raise StudyError(f"evaluations.{name} cannot be made here, so nothing is trained: {error}") from error


def _evaluation(options: dict[str, Any]) -> "Evaluation":
    from qerl_recipes.evaluate.request import Evaluation

    return Evaluation.of(base="", adapter="", output_dir=Path(), **options)


def refuse_missing_bases(study: Study, runs: Sequence[Run]) -> None:
    """Raise StudyError for a base that is a folder by its name, and missing: every run on it would fail."""
    for model in sorted({study.settled(one.keys)["model_name_or_path"] for one in runs}):
        parts = Path(model).parts
        if (len(parts) > 2 or parts[0] in ("/", ".", "..", "~")) and not Path(model).is_dir():
            raise StudyError(
                f"model_name_or_path: there is no folder {model}; the head of {study.recipe} says how it is made, or "
                "name another one there"
            )
