"""``qerl train``: a recipe from its keys to a saved adapter."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl_recipes.memory_parts import Plan


def main(argv: Sequence[str]) -> None:
    """Train as the recipe and flags in ``argv`` say: ``["--config", "recipe.yaml", "--learning_rate", "1e-5"]``.

    Everything that can be refused is refused before the model loads. The adapter ends in ``<output_dir>/adapter``,
    checkpoints beside it. SIGTERM ends the run after the step in progress, with a checkpoint where one may be taken;
    SIGINT (Ctrl-C) ends it at once and says what is kept. ``--help`` prints the keys.

    Raises ValueError and its kin for what cannot be honoured and for a run that does not fit the GPU, OutOfMemory where
    its memory runs out all the same, SystemExit(143) after SIGTERM, SystemExit(130) after SIGINT.
    """
    from qerl_recipes.environment import prepare

    prepare()  # before anything imports torch or vllm
    training = None
    try:
        from qerl_recipes.configs import parse

        script, training, model_config = parse(argv)
        _train(script, training, model_config)
    except KeyboardInterrupt:
        if training is None or training.process_index == 0:
            print(f"\nstopped by Ctrl-C; {_kept(training)}", file=sys.stderr)
        raise SystemExit(130) from None


def _kept(training: Any) -> str:
    """What an interrupted run leaves; ``training`` is None where its recipe had not been read."""
    if training is None:
        return "nothing has begun"
    from qerl_recipes.checkpoints import what_is_kept

    return what_is_kept(training.output_dir)


def _train(script: Any, training: Any, model_config: Any) -> None:
    from qerl_recipes.checkpoints import starting_point
    from qerl_recipes.configs import tracker_environment
    from qerl_recipes.out_of_memory import explained
    from qerl_recipes.validate import validate

    validate(script, training, model_config)
    os.environ.update(tracker_environment(training))
    plan = plan_memory(script, training, model_config)
    with _alone(training):
        resumed = starting_point(training.output_dir, training.resume_from_checkpoint)
        with explained(plan, training.output_dir):
            trainer = build(script, training, model_config, resumed)
        with _stops_on_sigterm(trainer) as stop:
            with explained(plan, training.output_dir, trainer):
                trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
            if stop.requested:
                print(stop.message(), file=sys.stderr)
                raise SystemExit(143)
            finish(trainer)
    if training.process_index == 0:
        adapter, base = Path(training.output_dir) / "adapter", model_config.model_name_or_path
        evaluate = (
            f"qerl evaluate {base} --adapter {adapter} --tasks gsm8k --output_dir {training.output_dir}/evaluation"
        )
        print(f"adapter: {adapter}; next: qerl report {training.output_dir}, {evaluate}")


@contextlib.contextmanager
def _alone(training: Any) -> Iterator[None]:
    """Holds a lock on the folder of a run; the other processes of one run need none. A new folder goes if left empty.

    Raises ConfigError if another run holds it.
    """
    from qerl_recipes.config_file import ConfigError
    from qerl_recipes.whole_folder import lock

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


def plan_memory(script: Any, training: Any, model_config: Any) -> "Plan | None":
    """The memory plan of a run, printed as one line; None on a CPU. Settles ``checkpointed_layers: -1``.

    Raises ValueError, with the largest parts and the way out, for a run that does not fit the GPU.
    """
    from qerl_recipes.configs import AS_FEW_AS_FIT
    from qerl_recipes.memory_parts import this_gpu
    from qerl_recipes.memory_plan import make

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


def build(script: Any, training: Any, model_config: Any, resumed: Path | None = None) -> Any:
    """The trainer of a recipe, its engine running -> QerlGRPOTrainer.

    Where the weights are shared the engine starts first, and the trainer's model reads them in it. Raises
    CheckpointMismatch, before either loads, if ``resumed``, the checkpoint to go on from, is of another run.
    """
    import torch
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoTokenizer
    from trl import get_peft_config

    from qerl_recipes import checkpoints, data, model, norms, rewards, shared_weights
    from qerl_recipes.base_model import local_folder, written_name
    from qerl_recipes.hooks import find
    from qerl_recipes.trainer import QerlGRPOTrainer

    base = local_folder(model_config.model_name_or_path, model_config.model_revision)
    model.refuse_experts(AutoConfig.from_pretrained(base).to_dict())
    start = script.adapter_name_or_path
    if start is not None:
        checkpoints.check_adapter_base(start, checkpoints.base_hash(base))
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left", truncation_side="left")
    if training.chat_template is not None:
        tokenizer.chat_template = training.chat_template
    train_dataset, eval_dataset = data.load(script, tokenizer)
    if resumed is not None:
        expected = checkpoints.describe(training, base, train_dataset)
        checkpoints.check_continues(checkpoints.read_state(resumed), expected, resumed)
    reward_funcs = rewards.resolve(script.reward_funcs, script)
    peft_config = get_peft_config(model_config)
    dtype = torch.float32 if model_config.dtype == "float32" else torch.bfloat16
    trainer: Any = None
    with contextlib.ExitStack() as on_failure:
        engine = weights = None
        if shared_weights.is_wanted(training):
            engine = find("qerl_rollout_engines", training.rollout_engine)(
                str(base),
                training,
                rank=(peft_config if start is None else PeftConfig.from_pretrained(start)).r,
                dtype=dtype,
                snapshot=lambda: trainer.snapshot(),
                accelerator=training.distributed_state,
            )
            on_failure.callback(engine.close)
            weights = shared_weights.borrow(engine, training)
        policy = model.load(
            base,
            dtype,
            "fp32" if training.quantization == "qerl_nvfp4" else "rounded",
            quantization=training.quantization,
            attn_implementation=model_config.attn_implementation,
            weights=weights,
        )
        if start is not None:
            policy, peft_config = PeftModel.from_pretrained(policy, start, is_trainable=True), None
            norms.load_norms(policy, start)
        trainer = QerlGRPOTrainer(
            policy,
            reward_funcs,
            training,
            train_dataset,
            base=base,
            base_name=written_name(model_config.model_name_or_path, model_config.model_revision),
            processing_class=tokenizer,
            eval_dataset=eval_dataset if training.eval_strategy != "no" else None,
            peft_config=peft_config,
            engine=engine,
        )
        on_failure.pop_all()
    return trainer


def finish(trainer: Any) -> None:
    """Save the adapter, and push it if the recipe asks for that."""
    trainer.save_adapter(Path(trainer.args.output_dir) / "adapter")
    if trainer.args.push_to_hub:
        trainer.push_to_hub()


class _Stop:
    """Set by the first SIGTERM; a second one ends the process at once."""

    def __init__(self, trainer: Any) -> None:
        self.requested = False
        self._trainer = trainer

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def agreed(self) -> bool:
        """Whether any process was told to stop: all of them must stop after the same step."""
        import torch

        accelerator = self._trainer.accelerator
        if accelerator.num_processes > 1:
            told = torch.tensor([int(self.requested)], device=accelerator.device)
            self.requested = bool(accelerator.gather(told).max())
        return self.requested

    def message(self) -> str:
        step = self._trainer.state.global_step
        return f"stopped by SIGTERM after step {step}; resume with --resume_from_checkpoint true"


@contextlib.contextmanager
def _stops_on_sigterm(trainer: Any) -> Iterator[_Stop]:
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
