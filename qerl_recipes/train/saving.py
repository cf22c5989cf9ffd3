"""Write what a training run leaves in its folder (adapter, checkpoints, state), and resume from it."""

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from qerl_recipes.files import card, run_state
from qerl_recipes.files.adapter import CONFIG, NORMS, TENSORS
from qerl_recipes.files.binding import recorded
from qerl_recipes.files.whole_folder import whole_folder
from qerl_recipes.model import norms
from qerl_recipes.model.fused_lora import ADAPTER
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.rollout.interface import LendsWeights
from qerl_recipes.train import divergence

if TYPE_CHECKING:
    from qerl_recipes.train.trainer import QerlGRPOTrainer


class RunFiles:
    """The files of one trainer: checkpoints are whole or absent, taken between rollouts, and resumed exactly."""

    def __init__(self, trainer: "QerlGRPOTrainer", run: run_state.Run, recipe: Mapping[str, Any] | None) -> None:
        self._trainer, self.run = trainer, run
        self._recipe = dict(recorded(trainer.args) if recipe is None else recipe)
        self._seconds_before, self._began = 0.0, time.monotonic()
        self._versions_before = 0  # how many adapters were installed before a resume
        self._staging: Path | None = None  # the folder in which a checkpoint is being written
        self._destination: Path | None = None  # the final name of the folder that is being written
        self.is_push_due = False

    def adapter_version(self) -> int:
        """Return how many adapters the run has installed in the engine, those before a resume included."""
        return self._versions_before + self._trainer.vllm_generation.version

    def state(self) -> run_state.State:
        """Return the state that ``qerl_state.json`` would record now."""
        return run_state.State(
            **asdict(self.run),
            step=self._trainer.state.global_step,
            rollout=self._trainer.rollout(),
            stream=self._trainer.stream.position,
            adapter_version=self.adapter_version(),
            recipe=self._recipe,
            seconds=round(self._seconds_before + time.monotonic() - self._began, 1),
        )

    def go_on_from(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Take over the state of the checkpoint to resume from, and return its folder; return None for a new run.

        What was saved after that checkpoint is moved aside, and metrics.jsonl is cut back to its step. Raises
        CheckpointMismatch, before anything is changed, for a folder that is not whole or is of another run. It is also
        raised where a new run would mix its checkpoints with those of an earlier one.
        """
        trainer, step = self._trainer, 0
        folder = run_state.starting_point(trainer.args.output_dir, resume_from_checkpoint)
        if folder is not None:
            state = run_state.read_state(folder)
            run_state.check_continues(state, self.run, self._recipe, folder)
            if state.step % trainer.steps_per_rollout and not is_finished(folder, trainer.args):
                raise run_state.CheckpointMismatch(
                    f"{folder} is of a run that ended in the middle of a rollout, each of which serves "
                    f"{trainer.steps_per_rollout} steps, and cannot be made longer from there; resume from an earlier "
                    f"checkpoint. {run_state.ANOTHER_RUN}"
                )
            step, trainer.stream.position = state.step, state.stream
            self._seconds_before = state.seconds
            self._versions_before = state.adapter_version - trainer.vllm_generation.version
        self._began = time.monotonic()
        if trainer.is_world_process_zero():
            moved_to = None
            if folder is not None:
                moved_to = run_state.leave_later(trainer.args.output_dir, step, trainer.metrics_file.path)
            if moved_to is not None:
                print(
                    f"going back to step {step}: what was saved later, with its metrics, lies in {moved_to} now",
                    file=sys.stderr,
                )
            trainer.metrics_file.restart(step)
        return None if folder is None else str(folder)

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter to ``folder``, whole or not at all, in place of an earlier one.

        Raises Diverged if a weight is not finite, OSError if the folder cannot be written.
        """
        self._check_weights()
        if self._trainer.is_world_process_zero():
            with _explaining_failure(f"the adapter {folder}", Path(folder)), self._becomes(Path(folder)):
                with whole_folder(folder, overwrite=True, proof=run_state.STATE_FILE) as partial:
                    self.write_adapter(partial)
                    run_state.write_state(partial, self.state())

    def write_adapter(self, folder: Path) -> None:
        """Write a PEFT adapter folder: fp32 LoRA tensors, config, trained norms if any, tokenizer and card."""
        trainer = self._trainer
        folder.mkdir(parents=True, exist_ok=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.save_pretrained(folder, selected_adapters=[ADAPTER], save_embedding_layers=False)
        trained = norms.trained_norms(norms.named_norms(model))
        if trained is not None:
            norms.save_norms(trained, folder)
        trainer.processing_class.save_pretrained(folder)
        text = card.render(
            self.run.base,
            self.run.base_hash,
            json.loads((folder / CONFIG).read_text(encoding="utf-8")),
            trained_norms=trained is not None,
            quantization=trainer.args.quantization,
            versions=run_state.versions(),
            folder=(self._destination or folder).absolute(),
        )
        (folder / "README.md").write_text(text, encoding="utf-8")

    def save_checkpoint(self, write: Callable[[], None], run_folder: Path) -> Path:
        """Save ``checkpoint-N`` in ``run_folder``, whole or not at all, and return its path.

        Every process must call this. ``write`` is transformers' own saving, which writes ``checkpoint-N`` into
        ``folder()``. Raises ValueError in the middle of a rollout, Diverged if a weight is not finite, OSError if the
        checkpoint cannot be written.
        """
        trainer = self._trainer
        step = trainer.state.global_step
        if step % trainer.steps_per_rollout and step < trainer.state.max_steps:
            raise ValueError(
                f"step {step} is in the middle of a rollout, each of which serves {trainer.steps_per_rollout} steps; "
                "use a multiple of that as save_steps"
            )
        self._check_weights()
        final, is_main = run_folder / f"checkpoint-{step}", trainer.is_world_process_zero()
        with contextlib.ExitStack() as stack:
            if is_main:
                stack.enter_context(_explaining_failure(str(final), final))
                self._staging = stack.enter_context(whole_folder(final, overwrite=True, proof=run_state.STATE_FILE))
            self._staging = _broadcast(self._staging)
            stack.callback(setattr, self, "_staging", None)
            stack.enter_context(self._becomes(final))
            write()
            trainer.accelerator.wait_for_everyone()
            if is_main:
                for path in (self._staging / final.name).iterdir():
                    path.rename(self._staging / path.name)
                (self._staging / final.name).rmdir()
                run_state.write_state(self._staging, self.state())
        trainer.accelerator.wait_for_everyone()
        if is_main:
            run_state.rotate(run_folder, trainer.args.save_total_limit)
        return final

    def prepare_push(self, saved: Path) -> None:
        """Copy norms, state and card of ``saved`` into output_dir for the upload; transformers copies PEFT's files."""
        if self._trainer.is_world_process_zero():
            for name in (NORMS, run_state.STATE_FILE, "README.md"):
                if (saved / name).is_file():
                    shutil.copy(saved / name, self._trainer.args.output_dir)

    def folder(self, default: str) -> str:
        """Return where transformers shall put ``checkpoint-N``: a staging folder while a checkpoint is being saved."""
        return default if self._staging is None else str(self._staging)

    @contextlib.contextmanager
    def _becomes(self, destination: Path) -> Iterator[None]:
        """Let cards written inside the block name ``destination``, while the files are still in a temporary folder."""
        self._destination = destination
        try:
            yield
        finally:
            self._destination = None

    def _check_weights(self) -> None:
        """Raise if a trained weight is not finite, or if a frozen weight that the engine lent has changed."""
        trainer = self._trainer
        trained = ((name, weight) for name, weight in trainer.model.named_parameters() if weight.requires_grad)
        is_half = trainer.loss_settings.half is not None
        divergence.check_weights(trainer.state.global_step, trained, trainer.args, is_half=is_half)
        if isinstance(trainer.vllm_generation, LendsWeights):
            trainer.vllm_generation.check_weights()


def is_finished(folder: str | Path, args: GRPOConfig) -> bool:
    """Return True if the checkpoint ``folder`` has reached the last step of the run that ``args`` describe."""
    state = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))
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


class EpochOrder(TrainerCallback):
    """A callback that makes the order of prompts depend on seed and epoch alone, so that a resumed run keeps it.

    TRL's order depends on how many epochs this process has seen.
    """

    sampler: Any = None  # TRL's sampler of the training set; the trainer sets it

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(self.sampler, "generator", None) is not None:
            self.sampler.generator.manual_seed(args.seed + int((state.epoch or 0.0) + 1e-6))


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
