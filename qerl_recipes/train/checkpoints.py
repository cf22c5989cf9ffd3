"""Write what a training run leaves in its folder (adapter, checkpoints, state), and load it again.

Checkpoints are whole or absent, taken between rollouts, and resumed exactly.
"""

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress, hf_api
from trl import GRPOTrainer

from qerl_recipes.files import card, run_state
from qerl_recipes.files.adapter import TENSORS
from qerl_recipes.files.base_model import hub_name
from qerl_recipes.files.whole_folder import whole_folder
from qerl_recipes.hooks import LendsWeights, RolloutEngine
from qerl_recipes.model import norms
from qerl_recipes.model.lora import ADAPTER
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.tasks.sources import hub_ids
from qerl_recipes.train import divergence
from qerl_recipes.train.dynamic_sampling import PromptStream
from qerl_recipes.train.loss import LossSettings
from qerl_recipes.train.metrics import MetricsFile
from qerl_recipes.train.preflight import ResumePoint


class SavingTrainer(GRPOTrainer):
    """Write the files of one run and go on from its checkpoints; every process has one of these."""

    args: GRPOConfig
    vllm_generation: RolloutEngine  # type: ignore[assignment]  # TRL's name for its own engine
    loss_settings: LossSettings
    metrics_file: MetricsFile
    stream: PromptStream
    steps_per_rollout: int
    _run: run_state.Run
    _recipe: dict[str, Any]
    _staging: Path | None = None  # the folder in which a checkpoint is being written
    _destination: Path | None = None  # the final name of the folder that is being written
    push_in_progress: PushInProgress | None = None  # transformers sets it in the main process
    _began: float
    _seconds_before, _versions_before = 0.0, 0  # of the run before it was resumed

    def train(self, resume: ResumePoint | None = None, **kwargs: Any) -> Any:
        """Train, or go on from the checkpoint that ``preflight.resume_point`` has returned.

        What was saved later is moved aside, and metrics.jsonl cut back. A checkpoint of the last step is loaded alone;
        transformers would train one step more.
        """
        self._began, folder, step = time.monotonic(), None, 0
        if resume is not None:
            folder, state = str(resume.folder), resume.state
            step, self.stream.position, self._seconds_before = state.step, state.stream, state.seconds
            self._versions_before = state.adapter_version - self.vllm_generation.version
            self.args.eval_on_start = False  # the run has started before
        if self.is_world_process_zero():
            if resume is not None and (
                left := run_state.leave_later(self.args.output_dir, step, self.metrics_file.path)
            ):
                now = f"what was saved later, with its metrics, lies in {left} now"
                print(f"going back to step {step}: {now}", file=sys.stderr)
            self.metrics_file.restart(() if resume is None else resume.metrics)
        if resume is not None and resume.is_finished:
            self._load_from_checkpoint(str(resume.folder))
            self.state = TrainerState.load_from_json(str(resume.folder / TRAINER_STATE_NAME))
            return None
        return super().train(resume_from_checkpoint=folder, **kwargs)

    def rollout(self) -> int:
        """Return the number of the rollout that the next step learns from; 0 is the first."""
        return self.state.global_step // self.steps_per_rollout

    def adapter_version(self) -> int:
        """Return how many adapters the run has installed in the engine, those before a resume included."""
        return self._versions_before + self.vllm_generation.version

    def recorded_state(self) -> run_state.State:
        """Return what a checkpoint would record of the run now."""
        return run_state.State(
            **asdict(self._run),
            step=self.state.global_step,
            rollout=self.rollout(),
            stream=self.stream.position,
            adapter_version=self.adapter_version(),
            recipe=self._recipe,
            seconds=round(self._seconds_before + time.monotonic() - self._began, 1),
        )

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter to ``folder``, whole or not at all, over an earlier one; raise OSError if it cannot."""
        self._check_weights()
        if self.is_world_process_zero():
            self._destination = folder
            with _explaining_failure(f"the adapter {folder}", folder):
                with whole_folder(folder, overwrite=True, proof=run_state.STATE_FILE) as partial:
                    self._save(str(partial))
                    run_state.write_state(partial, self.recorded_state())

    def _check_weights(self) -> None:
        """Raise if a trained weight is not finite, or if a frozen weight that the engine lent has changed."""
        trained = ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)
        is_half = self.loss_settings.half is not None
        divergence.check_weights(self.state.global_step, trained, self.args, is_half=is_half)
        if isinstance(self.vllm_generation, LendsWeights):
            self.vllm_generation.check_weights()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write a PEFT adapter folder: fp32 LoRA tensors, config, trained norms if any, tokenizer and card."""
        folder, policy = Path(output_dir or self.args.output_dir), self.accelerator.unwrap_model(self.model)
        folder.mkdir(parents=True, exist_ok=True)
        # PEFT looks for the base by these: not in the folder of a hub's copy, and after a push on another machine
        config, is_pushed = policy.peft_config[ADAPTER], self.args.push_to_hub
        base, of_base = self._base_on_hub() if is_pushed else (self._run.base, {})
        config.base_model_name_or_path = card.short(base) if is_pushed else base
        config.revision = of_base.get("revision")
        policy.save_pretrained(folder, selected_adapters=[ADAPTER], save_embedding_layers=False)
        config.base_model_name_or_path, config.revision = self._run.base, None  # the same in all processes
        trained = norms.trained_norms(norms.named_norms(policy))
        if trained is not None:
            norms.save_norms(trained, folder)
        self._tokenizer.save_pretrained(folder)
        text = card.render(
            base,
            self._run.base_hash,
            config.to_dict(),
            trained_norms=trained is not None,
            quantization=self.args.quantization,
            versions=run_state.versions(),
            datasets=hub_ids(self._recipe),
            folder=str(self.hub_model_id) if is_pushed else (self._destination or folder).absolute(),
            **of_base,
        )
        (folder / "README.md").write_text(text, encoding="utf-8")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Leave the card to ``_save``; TRL's own would describe a whole model."""

    def _base_on_hub(self) -> tuple[str, dict[str, Any]]:
        """Return the base's name on the hub, or its folder if that is not known, and what the card says of it."""
        name = self._recipe["model_name_or_path"]
        if not Path(name).is_dir():
            return name, {"revision": self._recipe["model_revision"]}
        base = hub_name(self._run.base)
        return base, {"is_rounded": base != self._run.base}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save ``checkpoint-N``, whole or not at all, in every process; raise OSError if it cannot be written."""
        step, is_main = self.state.global_step, self.is_world_process_zero()
        if step % self.steps_per_rollout and step < self.state.max_steps:
            raise ValueError(f"step {step} is in mid-rollout; use a multiple of {self.steps_per_rollout} as save_steps")
        self._check_weights()
        run_folder, write = Path(super()._get_output_dir(trial)), super()._save_checkpoint
        final = run_folder / f"checkpoint-{step}"
        with contextlib.ExitStack() as stack:
            if is_main:
                stack.enter_context(_explaining_failure(str(final), final))
                self._staging = stack.enter_context(whole_folder(final, overwrite=True, proof=run_state.STATE_FILE))
            (self._staging,) = broadcast_object_list([self._staging], from_process=0)
            self._destination = final
            stack.callback(self.__dict__.update, _staging=None, _destination=None)
            write(model, trial)
            self.accelerator.wait_for_everyone()
            if is_main:
                for path in (self._staging / final.name).iterdir():
                    path.rename(self._staging / path.name)
                (self._staging / final.name).rmdir()
                run_state.write_state(self._staging, self.recorded_state())
        self.accelerator.wait_for_everyone()
        if is_main:
            run_state.rotate(run_folder, self.args.save_total_limit)
        if self.args.push_to_hub:
            self._push_saved(final)

    def _get_output_dir(self, trial: Any) -> str:
        """Return where transformers shall put ``checkpoint-N``: a staging folder while a checkpoint is being saved."""
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Leave the push to ``_save_checkpoint``, which starts it when the folder has its final name."""

    def _push_saved(self, checkpoint: Path) -> None:
        """Start to upload what hub_strategy asks for after a save; hub_always_push waits for the upload before."""
        strategy, before = self.args.hub_strategy, self.push_in_progress
        is_skipped = not self.args.hub_always_push and before is not None and not before.is_done()
        if self.is_world_process_zero() and strategy != HubStrategy.END and not is_skipped:
            is_resumable = strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
            title = f"Training in progress, step {self.state.global_step}"
            job = self.push_to_hub(title, blocking=False, checkpoint=checkpoint if is_resumable else None)
            self.push_in_progress = PushInProgress([job])

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        checkpoint: Path | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload adapter, tokenizer and card, and a ``checkpoint`` to resume from, as one commit.

        It is written to ``output_dir/hub`` first, because later saves may delete the checkpoint before the upload ends.
        """
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder = Path(self.args.output_dir) / "hub"
        shutil.rmtree(folder, ignore_errors=True)
        self._save(str(folder))
        if checkpoint is not None:
            is_last = self.args.hub_strategy == HubStrategy.CHECKPOINT
            copy = folder / ("last-checkpoint" if is_last else checkpoint.name)
            shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns(run_state.STATE_FILE))
            state = run_state.read_state(checkpoint)
            base, recipe = card.short(self._base_on_hub()[0]), run_state.without_paths(state.recipe)
            run_state.write_state(copy, replace(state, base=base, recipe=recipe))
        return hf_api().upload_folder(
            repo_id=self.hub_model_id,
            folder_path=folder,
            commit_message=commit_message,
            token=self.args.hub_token,
            run_as_future=not blocking,
            revision=self.args.hub_revision,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_adapter(self.accelerator.unwrap_model(self.model), resume_from_checkpoint)


def load_adapter(model: PeftModel, folder: str | Path) -> None:
    """Load a checkpoint's adapter and norms into ``model``; raise CheckpointMismatch before anything changes."""
    tensors = load_file(Path(folder) / TENSORS)
    own_tensors = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    shapes, own_shapes = ({name: tensor.shape for name, tensor in named.items()} for named in (tensors, own_tensors))
    if misfits := [name for name in sorted({**shapes, **own_shapes}) if shapes.get(name) != own_shapes.get(name)]:
        raise run_state.CheckpointMismatch(
            f"{folder}: its adapter does not fit this run ({misfits[0]}); use the same lora_r and lora_target_modules"
        )
    set_peft_model_state_dict(model, tensors, adapter_name=ADAPTER)
    norms.load_norms(model, folder)


# with several processes transformers loads the optimizer to each one's device; torch does not know the CPU as "cpu:0"
torch.serialization.register_package(
    15, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


@contextlib.contextmanager
def _explaining_failure(what: str, folder: Path) -> Iterator[None]:
    """Turn any library's failure to write ``what`` in ``folder`` into an OSError with free space and way out."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        existing = next(parent for parent in folder.absolute().parents if parent.is_dir())
        free = shutil.disk_usage(existing).free
        raise OSError(
            f"{what} could not be saved: {error} ({free / 2**20:.0f} MiB free). Earlier checkpoints are untouched; "
            "make room and resume from the last one"
        ) from error
