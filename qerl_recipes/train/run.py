"""``qerl train``: read a recipe, check it, train and save the adapter."""

import contextlib
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from qerl_recipes.machine.environment import prepare

if TYPE_CHECKING:  # torch, TRL and vLLM are imported only after ``prepare`` has set the environment they read
    import torch
    from peft import PeftConfig
    from transformers import PreTrainedModel

    from qerl_recipes.hooks import StartEngine
    from qerl_recipes.memory.parts import Plan
    from qerl_recipes.recipe.configs import GRPOConfig, ModelConfig, ScriptArguments
    from qerl_recipes.train.trainer import QerlGRPOTrainer


def main(argv: Sequence[str]) -> None:
    """Train as the recipe and flags in ``argv`` say: ``["--config", "recipe.yaml", "--learning_rate", "1e-5"]``.

    Everything that can be refused is refused before the model loads. The adapter is saved in ``<output_dir>/adapter``,
    checkpoints beside it. SIGTERM ends the run after the step in progress, with a checkpoint where one may be taken.
    SIGINT (Ctrl-C) ends the run at once and says what is kept. ``--help`` prints the keys.

    Raises ValueError or a subclass for what cannot be honoured and for a run that does not fit the GPU. Raises
    OutOfMemory if the GPU's memory runs out all the same, SystemExit(143) after SIGTERM, SystemExit(130) after SIGINT.
    """
    prepare()
    training = None
    try:
        from qerl_recipes.recipe.configs import parse

        script, training, model_config = parse(argv)
        _train(script, training, model_config)
    except KeyboardInterrupt:
        if training is None or training.process_index == 0:
            print(f"\nstopped by Ctrl-C; {_what_is_kept(training)}", file=sys.stderr)
        raise SystemExit(130) from None


def _what_is_kept(training: "GRPOConfig | None") -> str:
    """Say what an interrupted run leaves; ``training`` is None if its recipe had not been read yet."""
    if training is None:
        return "nothing has begun"
    from qerl_recipes.files.run_state import what_is_kept

    return what_is_kept(training.output_dir)


def _train(script: "ScriptArguments", training: "GRPOConfig", model_config: "ModelConfig") -> None:
    from qerl_recipes.files.run_state import starting_point
    from qerl_recipes.memory.overrun import explained
    from qerl_recipes.recipe.configs import adapter_line, tracker_environment
    from qerl_recipes.train.validate import validate

    validate(script, training, model_config)
    os.environ.update(tracker_environment(training))
    if training.process_index == 0:
        if script.is_without_gpu:
            print("torch sees no CUDA GPU: this runs on the CPU (use_cpu: true, bf16: false)", file=sys.stderr)
        print(adapter_line(script, model_config), file=sys.stderr)
    plan = plan_memory(script, training, model_config)
    with _locked_output_dir(training):
        resumed = starting_point(training.output_dir, training.resume_from_checkpoint)
        if resumed is not None and _has_ended(resumed, script, training, model_config):
            if training.process_index == 0:
                print(f"nothing is left to do: {resumed} is of the last step of this run, and its adapter is there")
            return
        with explained(plan, training.output_dir):
            trainer = build(script, training, model_config, resumed)
        with _stops_on_sigterm(trainer) as stop:
            with explained(plan, training.output_dir, trainer):
                trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
            if stop.requested:
                if training.process_index == 0:
                    print(stop.message(), file=sys.stderr)
                raise SystemExit(143)
            finish(trainer)
    if training.process_index == 0:
        from qerl_recipes.evaluate.as_trained import command
        from qerl_recipes.files.adapter import open_adapter

        folder = Path(training.output_dir)
        print(f"adapter: {folder / 'adapter'}; next:\n  {command(folder, open_adapter(folder).state)}")
        print(f"  {shlex.join(['qerl', 'report', str(folder)])}")


def _has_ended(resumed: Path, script: "ScriptArguments", training: "GRPOConfig", model_config: "ModelConfig") -> bool:
    """Return True if the checkpoint ``resumed`` is of the last step and the adapter of that step has been written.

    Raises CheckpointMismatch if the checkpoint's run had another recipe.
    """
    from qerl_recipes.files import run_state
    from qerl_recipes.files.binding import recorded
    from qerl_recipes.files.run_state import LAST
    from qerl_recipes.train.saving import is_finished

    state = run_state.read_state(resumed)
    run_state.check_recipe(state, recorded(script, training, model_config), resumed)
    if not is_finished(resumed, training):
        return False
    try:
        return run_state.read_state(Path(training.output_dir) / LAST).step == state.step
    except run_state.CheckpointMismatch:
        return False


@contextlib.contextmanager
def _locked_output_dir(training: "GRPOConfig") -> Iterator[None]:
    """Hold a lock on the run's output_dir while the block runs; only the run's first process takes it.

    A folder that this created is removed if it stays empty. Raises ConfigError if another run holds the lock.
    """
    from qerl_recipes.files.whole_folder import lock
    from qerl_recipes.recipe.file import ConfigError

    if training.process_index > 0:
        yield
        return
    folder = Path(training.output_dir)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        handle = lock(folder)
    except BlockingIOError as error:
        raise ConfigError(f"output_dir {folder}: another training writes there; name another one") from error
    try:
        yield
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        os.close(handle)


def plan_memory(script: "ScriptArguments", training: "GRPOConfig", model_config: "ModelConfig") -> "Plan | None":
    """Return the memory plan of a run and print it as one line; return None on a CPU.

    Replaces ``checkpointed_layers: -1`` in ``training`` by the number that the plan settles on, or by None without
    one. Raises ValueError, with the largest parts and the way out, for a run that does not fit the GPU.
    """
    from qerl_recipes.machine.gpu import this_gpu
    from qerl_recipes.memory.plan import make
    from qerl_recipes.recipe.configs import AS_FEW_AS_FIT

    gpu = None if training.use_cpu else this_gpu()
    plan = None if gpu is None else make(script, training, model_config, gpu=gpu)
    if plan is not None:
        plan.check()
    if training.checkpointed_layers == AS_FEW_AS_FIT:
        training.checkpointed_layers = None if plan is None else plan.checkpointed
    if plan is None:
        return None
    if training.process_index == 0:
        print(f"memory plan: {plan.line()}", file=sys.stderr)
    return plan


def build(
    script: "ScriptArguments", training: "GRPOConfig", model_config: "ModelConfig", resumed: Path | None = None
) -> "QerlGRPOTrainer":
    """Build the trainer of a recipe, with its engine running.

    ``resumed`` is the checkpoint to go on from. Raises CheckpointMismatch, before any model loads, if it is of another
    run.
    """
    from peft import PeftConfig
    from trl import get_peft_config

    from qerl_recipes.files import run_state
    from qerl_recipes.files.adapter import open_adapter
    from qerl_recipes.files.base_model import local_folder, written_name
    from qerl_recipes.files.binding import recorded
    from qerl_recipes.recipe.configs import DTYPES
    from qerl_recipes.tasks import prompts, rewards
    from qerl_recipes.train.base_fits import refuse_long_prompts, refuse_misfit
    from qerl_recipes.train.continued import check_settings
    from qerl_recipes.train.validate import uneven_evaluation

    recipe = recorded(script, training, model_config)
    base = local_folder(model_config.model_name_or_path, model_config.model_revision)
    refuse_misfit(script, training, model_config, base)
    start = None if script.adapter_name_or_path is None else open_adapter(script.adapter_name_or_path)
    if start is not None:
        start.check_base(run_state.base_hash(base))
    peft_config = get_peft_config(model_config)
    if start is not None and model_config.names_adapter:
        check_settings(start, peft_config, base, f"adapter_name_or_path {start.path}")
    tokenizer = prompts.tokenizer(base, training, padding_side="left", truncation_side="left")
    train_dataset, eval_dataset = prompts.load(script, tokenizer, training.chat_template_kwargs)
    if resumed is not None:
        expected = run_state.describe(training, base, train_dataset, start=None if start is None else start.sha256())
        run_state.check_continues(run_state.read_state(resumed), expected, recipe, resumed)
        as_now = peft_config if start is None else PeftConfig.from_pretrained(str(start.path))
        saved = open_adapter(resumed)
        saved.check_tensors()
        check_settings(saved, as_now, base, f"cannot resume from {resumed}")
    if training.eval_strategy == "no":
        eval_dataset = None
    elif eval_dataset is not None and (line := uneven_evaluation(training, len(eval_dataset))) is not None:
        warnings.warn(line, stacklevel=2)
    refuse_long_prompts({"training": train_dataset, "held-out": eval_dataset}, tokenizer, script, training, base)
    return assemble(
        training,
        base,
        adapter=peft_config if start is None else start.path,
        dtype=DTYPES[model_config.dtype or "bfloat16"],
        attn_implementation=model_config.attn_implementation,
        reward_funcs=rewards.resolve(script.reward_funcs, script),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        base_name=written_name(model_config.model_name_or_path, model_config.model_revision),
        recipe=recipe,
    )


def assemble(
    training: "GRPOConfig",
    base: Path,
    *,
    adapter: "PeftConfig | Path",
    dtype: "torch.dtype",
    attn_implementation: str | None = None,
    **trainer_arguments: Any,
) -> "QerlGRPOTrainer":
    """Build engine, model and trainer on the folder ``base``, in this order: the model may share the engine's weights.

    ``adapter`` is the config of a new adapter, or the folder of one to continue from. ``trainer_arguments`` are further
    arguments of QerlGRPOTrainer. If a later part fails, the engine is shut down.
    """
    from peft import PeftConfig, PeftModel

    from qerl_recipes.files.adapter import open_adapter
    from qerl_recipes.hooks import find
    from qerl_recipes.model import loading, norms, shared_weights
    from qerl_recipes.train.trainer import QerlGRPOTrainer

    config = adapter if isinstance(adapter, PeftConfig) else PeftConfig.from_pretrained(str(adapter))
    start_hash = None if config is adapter else open_adapter(adapter).sha256()
    start_engine: StartEngine = find("qerl_rollout_engines", training.rollout_engine)
    built: list[QerlGRPOTrainer] = []
    with contextlib.ExitStack() as on_failure:
        engine = start_engine(
            str(base),
            training,
            rank=config.r,
            dtype=dtype,
            snapshot=lambda: built[0].snapshot(),
            accelerator=training.distributed_state,
        )
        on_failure.callback(engine.close)
        weights = shared_weights.borrow(engine, training) if shared_weights.is_wanted(training) else None
        policy: PreTrainedModel | PeftModel = loading.load(
            base,
            dtype,
            quantization=training.quantization,
            attn_implementation=attn_implementation,
            weights=weights,
        )
        if config is not adapter:
            policy = PeftModel.from_pretrained(policy, str(adapter), is_trainable=True)
            norms.load_norms(policy, adapter)
        trainer_arguments |= {"peft_config": config if config is adapter else None, "start": start_hash}
        built.append(QerlGRPOTrainer(policy, args=training, engine=engine, base=base, **trainer_arguments))
        on_failure.pop_all()
    return built[0]


def finish(trainer: "QerlGRPOTrainer") -> None:
    """Save the adapter, and push it if the recipe asks for that."""
    adapter = Path(trainer.args.output_dir) / "adapter"
    trainer.save_adapter(adapter)
    if trainer.args.push_to_hub:
        trainer.files.prepare_push(adapter)
        trainer.push_to_hub()


class _Stop:
    """A handler of SIGTERM: the first asks for a stop after the step, a second ends the process at once."""

    def __init__(self, trainer: "QerlGRPOTrainer") -> None:
        self.requested = False
        self._trainer = trainer

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def agreed(self) -> bool:
        """Return True if any process was told to stop; every process calls this, so that all stop after one step."""
        import torch

        accelerator = self._trainer.accelerator
        if accelerator.num_processes > 1:
            requested = torch.tensor([int(self.requested)], device=accelerator.device)
            self.requested = bool(accelerator.gather(requested).max())
        return self.requested

    def message(self) -> str:
        step = self._trainer.state.global_step
        return f"stopped by SIGTERM after step {step}; resume with --resume_from_checkpoint true"


@contextlib.contextmanager
def _stops_on_sigterm(trainer: "QerlGRPOTrainer") -> Iterator[_Stop]:
    from transformers import TrainerCallback

    stop = _Stop(trainer)

    class StopAtStepEnd(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if stop.agreed():
                control.should_training_stop = True
                control.should_save = state.global_step % trainer.steps_per_rollout == 0

    trainer.add_callback(StopAtStepEnd())
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
