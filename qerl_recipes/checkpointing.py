"""How the trainer saves and resumes: the part of QerlGRPOTrainer that deals with files."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from peft.utils import set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import GRPOTrainer

from qerl_recipes import checkpoints, model_card, norms
from qerl_recipes.configs import GRPOConfig
from qerl_recipes.dynamic_sampling import PromptStream
from qerl_recipes.step_metrics import StepRecorder
from qerl_recipes.whole_folder import whole_folder

ADAPTER_FILE = "adapter_model.safetensors"


class Checkpointing(GRPOTrainer):
    """Checkpoints that are whole or absent, taken between rollouts, and resumed from exactly."""

    args: GRPOConfig
    steps_per_rollout: int
    vllm_generation: Any
    _stream: PromptStream
    _recorder: StepRecorder
    _train_sampler: Any

    def rollout(self) -> int:
        """Number of the rollout that the next step learns from; 0 is the first."""
        return self.state.global_step // self.steps_per_rollout

    def _prepare_checkpoints(self, base: str | Path, base_name: str | None) -> None:
        self._run = checkpoints.describe(self.args, base, self.train_dataset, base_name)
        self._version_offset = 0
        self._staging: Path | None = None
        self._destination: Path | None = None  # what the folder that is being written will be called
        self._pushed: str | None = None
        self.add_callback(_EpochOrder(self))

    def adapter_version(self) -> int:
        """Adapters installed in the engine so far, those before a resume included."""
        return self._version_offset + self.vllm_generation.policy.version

    def current_state(self) -> checkpoints.State:
        """What is written into ``qerl_state.json`` now."""
        return checkpoints.State(
            **asdict(self._run),
            step=self.state.global_step,
            rollout=self.rollout(),
            stream=self._stream.position,
            adapter_version=self.adapter_version(),
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """TRL's, with ``resume_from_checkpoint`` a checkpoint folder, or True for the last whole one of output_dir.

        Raises CheckpointMismatch, before anything is changed, for a folder that is not whole or of another run, and
        where a new run would mix its checkpoints with those of an earlier one.
        """
        step, folder = 0, checkpoints.starting_point(self.args.output_dir, resume_from_checkpoint)
        if folder is not None:
            found = checkpoints.read_state(folder)
            checkpoints.check_continues(found, self._run, folder)
            step, self._stream.position = found.step, found.stream
            self._version_offset = found.adapter_version - self.vllm_generation.policy.version
        if self.is_world_process_zero():
            self._recorder.file.restart(step)
        return super().train(resume_from_checkpoint=None if folder is None else str(folder), **kwargs)

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter as a folder of its own, whole or not at all, in place of an earlier one."""
        self._check_weights()
        if self.is_world_process_zero():
            with _explained(f"the adapter {folder}"), self._becomes(Path(folder)):
                with whole_folder(folder, overwrite=True, proof=checkpoints.STATE_FILE) as partial:
                    self._save(str(partial))
                    checkpoints.write_state(partial, self.current_state())

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The card is written with the adapter it describes; TRL's would describe a whole model."""

    @contextlib.contextmanager
    def _becomes(self, destination: Path) -> Iterator[None]:
        """What is saved inside is written elsewhere first and says in its card that it lies in ``destination``."""
        self._destination = destination
        try:
            yield
        finally:
            self._destination = None

    def _get_output_dir(self, trial: Any) -> str:
        """Where transformers puts ``checkpoint-N``: the folder that becomes it once all is there."""
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.global_step % self.steps_per_rollout and self.state.global_step < self.state.max_steps:
            raise ValueError(
                f"step {self.state.global_step} is in the middle of a rollout, each of which serves "
                f"{self.steps_per_rollout} steps; use a multiple of that as save_steps"
            )
        self._check_weights()
        name = f"checkpoint-{self.state.global_step}"
        final = Path(super()._get_output_dir(trial)) / name
        is_main = self.is_world_process_zero()
        with contextlib.ExitStack() as stack:
            if is_main:
                stack.enter_context(_explained(str(final)))
                self._staging = stack.enter_context(whole_folder(final, overwrite=True, proof=checkpoints.STATE_FILE))
            self._staging = self._same_everywhere(self._staging)
            stack.callback(setattr, self, "_staging", None)
            stack.enter_context(self._becomes(final))
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if is_main:
                for path in (self._staging / name).iterdir():
                    path.rename(self._staging / path.name)
                (self._staging / name).rmdir()
                checkpoints.write_state(self._staging, self.current_state())
        self.accelerator.wait_for_everyone()
        if is_main:
            checkpoints.rotate(final.parent, self.args.save_total_limit)
        if self._pushed is not None:
            self._pushed = None
            super()._push_from_checkpoint(str(final))

    def _check_weights(self) -> None:
        """Nothing is saved that was computed with weights that have changed under way."""
        if hasattr(self.vllm_generation, "check_weights"):
            self.vllm_generation.check_weights()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """After the folder has its name; the upload goes on in the background."""
        self._pushed = checkpoint_folder

    def _same_everywhere(self, value: Any) -> Any:
        holder = [value]
        broadcast_object_list(holder, from_process=0)
        return holder[0]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """A PEFT adapter folder: fp32 LoRA tensors, config, trained norms beside them, tokenizer and card."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        model = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)
        trained = norms.trained_norms(model)
        if trained is not None:
            norms.save_norms(trained, folder)
        self.processing_class.save_pretrained(folder)
        card = model_card.render(
            self._run.base,
            self._run.base_hash,
            json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")),
            trained_norms=trained is not None,
            quantization=self.args.quantization,
            versions=checkpoints.versions(),
            folder=(self._destination or folder).absolute(),
        )
        (folder / "README.md").write_text(card, encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The adapter by name: transformers would load only subfolders where a reference adapter exists."""
        target = self.accelerator.unwrap_model(self.model)
        tensors = load_file(Path(resume_from_checkpoint) / ADAPTER_FILE)
        result = set_peft_model_state_dict(target, tensors, adapter_name="default")
        missing = [name for name in result.missing_keys if ".lora_" in name and ".default." in name]
        if missing or result.unexpected_keys:
            wrong = (missing + list(result.unexpected_keys))[0]
            raise checkpoints.CheckpointMismatch(
                f"{resume_from_checkpoint}: its adapter does not fit this run ({wrong}); use the same lora_r and "
                "lora_target_modules"
            )
        norms.load_norms(target, resume_from_checkpoint)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler


class _EpochOrder(TrainerCallback):
    """The order of prompts depends on the epoch alone; TRL's depends on how many epochs this process has seen."""

    def __init__(self, trainer: Checkpointing) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sampler = self._trainer._train_sampler
        if getattr(sampler, "generator", None) is not None:
            sampler.generator.manual_seed(args.seed + int((state.epoch or 0.0) + 1e-6))


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Says what could not be saved and that nothing is lost, whichever library failed to write."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        free = shutil.disk_usage(Path(what.split()[-1]).parent).free
        raise OSError(
            f"{what} could not be saved: {error} ({free / 2**20:.0f} MiB free). Earlier checkpoints are untouched; "
            "make room and resume from the last one"
        ) from error
