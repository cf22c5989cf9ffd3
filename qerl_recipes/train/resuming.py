"""Find the checkpoint that a run goes on from, before the trainer, the engine or a model is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from qerl_recipes.files import run_state
from qerl_recipes.recipe.checks import steps_per_rollout
from qerl_recipes.recipe.configs import GRPOConfig


class ResumePoint(NamedTuple):
    """Hold the checkpoint that a run goes on from, and its state.

    ``is_finished`` is True if the checkpoint has reached the run's last step.
    """

    folder: Path
    state: run_state.State
    is_finished: bool


def resume_point(args: GRPOConfig, recipe: Mapping[str, Any]) -> ResumePoint | None:
    """Return where the run that ``args`` describe goes on; None for a new run. Hold the lock on its output folder.

    ``recipe`` is what ``run_state.recorded`` returned. Raises CheckpointMismatch for a folder that is not whole, is of
    another recipe, or ended in the middle of a rollout. It is also raised where a new run would mix its files with
    those of an earlier one.
    """
    folder = run_state.starting_point(args.output_dir, args.resume_from_checkpoint)
    if folder is None:
        return None
    state, served = run_state.read_state(folder), steps_per_rollout(args)
    run_state.check_recipe(state, recipe, folder)
    point = ResumePoint(folder, state, _has_reached_the_end(folder, args))
    if state.step % served and not point.is_finished:
        raise run_state.CheckpointMismatch(
            f"{folder} is of a run that ended in the middle of a rollout, each of which serves {served} steps, and "
            f"cannot be made longer from there; resume from an earlier checkpoint. {run_state.ANOTHER_RUN}"
        )
    return point


def _has_reached_the_end(folder: Path, args: GRPOConfig) -> bool:
    """Return True if the checkpoint ``folder`` is of the last step of the run that ``args`` describe."""
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    if args.max_steps > 0:
        return state.global_step >= args.max_steps
    return state.epoch is not None and state.epoch > args.num_train_epochs - 1e-6
