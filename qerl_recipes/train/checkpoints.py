"""Write what a training run leaves in its folder (adapter, checkpoints, state), and resume from it.

Checkpoints are whole or absent, taken between rollouts, and resumed exactly.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from qerl_recipes.files import card, run_state
from qerl_recipes.files.adapter import CONFIG, NORMS, TENSORS
from qerl_recipes.files.whole_folder import whole_folder
from qerl_recipes.model import norms
from qerl_recipes.model.lora import ADAPTER
from qerl_recipes.recipe.checks import steps_per_rollout
from qerl_recipes.recipe.configs import GRPOConfig


class Progress(NamedTuple):
    """Say how far a run has got.

    ``step`` and ``rollout`` are the finished ones, ``stream`` is the position in the stream of fresh prompts.
    ``adapter_version`` counts the adapters that the engine was given. ``seconds`` is how long the run has trained. All
    of them count what came before a resume.
    """

    step: int
    rollout: int
    stream: int
    adapter_version: int
    seconds: float


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


class Checkpoints:
    """Write the files of one run, in which ``run`` and ``recipe`` describe it; every process has one."""

    def __init__(self, run: run_state.Run, recipe: Mapping[str, Any], args: GRPOConfig) -> None:
        self._run, self._recipe, self._args = run, dict(recipe), args
        self._is_main = args.process_index == 0
        self._staging: Path | None = None  # the folder in which a checkpoint is being written
        self._destination: Path | None = None  # the final name of the folder that is being written

    def leave_later(self, step: int, metrics: Path) -> None:
        """Move aside what was saved after ``step``, with a copy of the file ``metrics``, and say where it lies."""
        moved_to = run_state.leave_later(self._args.output_dir, step, metrics)
        if moved_to is not None:
            print(
                f"going back to step {step}: what was saved later, with its metrics, lies in {moved_to} now",
                file=sys.stderr,
            )

    def save_adapter(
        self, folder: Path, progress: Progress, policy: PeftModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Write the adapter to ``folder``, whole or not at all, in place of an earlier one.

        Raises OSError if the folder cannot be written.
        """
        if self._is_main:
            with _explaining_failure(f"the adapter {folder}", folder), self._becomes(folder):
                with whole_folder(folder, overwrite=True, proof=run_state.STATE_FILE) as partial:
                    self.write_adapter(partial, policy, tokenizer)
                    self._write_state(partial, progress)

    def write_adapter(self, folder: Path, policy: PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a PEFT adapter folder: fp32 LoRA tensors, config, trained norms if any, tokenizer and card."""
        folder.mkdir(parents=True, exist_ok=True)
        policy.save_pretrained(folder, selected_adapters=[ADAPTER], save_embedding_layers=False)
        trained = norms.trained_norms(norms.named_norms(policy))
        if trained is not None:
            norms.save_norms(trained, folder)
        tokenizer.save_pretrained(folder)
        text = card.render(
            self._run.base,
            self._run.base_hash,
            json.loads((folder / CONFIG).read_text(encoding="utf-8")),
            trained_norms=trained is not None,
            quantization=self._args.quantization,
            versions=run_state.versions(),
            folder=(self._destination or folder).absolute(),
        )
        (folder / "README.md").write_text(text, encoding="utf-8")

    def save(self, write: Callable[[], None], run_folder: Path, progress: Progress) -> Path:
        """Save ``checkpoint-N`` in ``run_folder``, whole or not at all, and return its path.

        Every process must call this. ``write`` is transformers' own saving, which writes ``checkpoint-N`` into
        ``folder()``. Raises OSError if the checkpoint cannot be written.
        """
        final, processes = run_folder / f"checkpoint-{progress.step}", self._args.distributed_state
        assert processes is not None
        with contextlib.ExitStack() as stack:
            if self._is_main:
                stack.enter_context(_explaining_failure(str(final), final))
                self._staging = stack.enter_context(whole_folder(final, overwrite=True, proof=run_state.STATE_FILE))
            self._staging = _broadcast(self._staging)
            stack.callback(setattr, self, "_staging", None)
            stack.enter_context(self._becomes(final))
            write()
            processes.wait_for_everyone()
            if self._is_main:
                for path in (self._staging / final.name).iterdir():
                    path.rename(self._staging / path.name)
                (self._staging / final.name).rmdir()
                self._write_state(self._staging, progress)
        processes.wait_for_everyone()
        if self._is_main:
            run_state.rotate(run_folder, self._args.save_total_limit)
        return final

    def prepare_push(self, saved: Path) -> None:
        """Copy norms, state and card of ``saved`` into output_dir for the upload; transformers copies PEFT's files."""
        if self._is_main:
            for name in (NORMS, run_state.STATE_FILE, "README.md"):
                if (saved / name).is_file():
                    shutil.copy(saved / name, self._args.output_dir)

    def folder(self, default: str) -> str:
        """Return where transformers shall put ``checkpoint-N``: a staging folder while a checkpoint is being saved."""
        return default if self._staging is None else str(self._staging)

    def _write_state(self, folder: Path, progress: Progress) -> None:
        state = run_state.State(**asdict(self._run), **progress._asdict(), recipe=self._recipe)
        run_state.write_state(folder, state)

    @contextlib.contextmanager
    def _becomes(self, destination: Path) -> Iterator[None]:
        """Let cards written inside the block name ``destination``, while the files are still in a temporary folder."""
        self._destination = destination
        try:
            yield
        finally:
            self._destination = None


def _has_reached_the_end(folder: Path, args: GRPOConfig) -> bool:
    """Return True if the checkpoint ``folder`` is of the last step of the run that ``args`` describe."""
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    if args.max_steps > 0:
        return state.global_step >= args.max_steps
    return state.epoch is not None and state.epoch > args.num_train_epochs - 1e-6


def load_adapter(model: PeftModel, folder: str | Path) -> None:
    """Load the adapter and the trained norms of a checkpoint into ``model``, tensor by name.

    transformers' own loading looks for subfolders where the model also holds a reference adapter. Raises
    CheckpointMismatch, before anything is changed, if the adapter has another rank or other modules.
    """
    tensors = load_file(Path(folder) / TENSORS)
    own_tensors = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    shapes, own_shapes = ({name: tensor.shape for name, tensor in named.items()} for named in (tensors, own_tensors))
    if misfits := [name for name in sorted({**shapes, **own_shapes}) if shapes.get(name) != own_shapes.get(name)]:
        raise run_state.CheckpointMismatch(
            f"{folder}: its adapter does not fit this run ({misfits[0]}); use the same lora_r and lora_target_modules"
        )
    set_peft_model_state_dict(model, tensors, adapter_name=ADAPTER)
    norms.load_norms(model, folder)


def _on_a_cpu(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    return storage if location.startswith("cpu:") else None


# with several processes transformers loads the optimizer to each one's device; torch does not know the CPU as "cpu:0"
torch.serialization.register_package(15, lambda storage: None, _on_a_cpu)


def _broadcast(value: Any) -> Any:
    holder = [value]
    broadcast_object_list(holder, from_process=0)
    return holder[0]


@contextlib.contextmanager
def _explaining_failure(what: str, folder: Path) -> Iterator[None]:
    """Turn any library's failure to write ``what`` into an OSError that names the free space and the way out.

    ``folder`` is where ``what`` is to be saved; earlier checkpoints are untouched.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        existing = next(parent for parent in folder.absolute().parents if parent.is_dir())
        free = shutil.disk_usage(existing).free
        raise OSError(
            f"{what} could not be saved: {error} ({free / 2**20:.0f} MiB free). Earlier checkpoints are untouched; "
            "make room and resume from the last one"
        ) from error
