"""Read a recipe, check it, train and save the adapter: ``qerl train``."""

import contextlib
import gc
import os
import shlex
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from psutil import Process

from qerl_recipes.machine.environment import prepare, warm_compiler

if TYPE_CHECKING:  # torch, TRL and vLLM are imported only after ``prepare`` has set the environment they read
    import torch
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import PreTrainedModel

    from qerl_recipes.hooks import Snapshot, StartEngine
    from qerl_recipes.recipe.configs import GRPOConfig, ModelConfig, ScriptArguments
    from qerl_recipes.train.preflight import Checked, Preflight
    from qerl_recipes.train.trainer import QerlGRPOTrainer


def main(argv: Sequence[str]) -> None:
    """Train as the recipe and flags in ``argv`` say: ``["--config", "recipe.yaml", "--learning_rate", "1e-5"]``.

    Everything that can be refused is refused before the model loads, by a ValueError. SIGTERM ends the run after the
    step in progress, with a checkpoint where one may be taken, and SystemExit(143). SIGINT (Ctrl-C) ends it at once,
    says what is kept, and raises SystemExit(130).
    """
    prepare()
    training, times = None, StartTimes()
    try:
        from qerl_recipes.recipe.configs import parse

        times.end("imports")
        script, training, model_config = parse(argv)
        _train(script, training, model_config, times)
    except KeyboardInterrupt:
        if training is None:
            print("\nstopped by Ctrl-C; nothing has begun", file=sys.stderr)
        elif training.process_index == 0:
            from qerl_recipes.files.run_state import what_is_kept

            print(f"\nstopped by Ctrl-C; {what_is_kept(training.output_dir)}", file=sys.stderr)
        raise SystemExit(130) from None


def _train(script: "ScriptArguments", training: "GRPOConfig", model_config: "ModelConfig", times: "StartTimes") -> None:
    times.end("checks and data")
    from qerl_recipes.files import run_state
    from qerl_recipes.machine import gpu
    from qerl_recipes.memory.table import explained
    from qerl_recipes.train import preflight

    times.end("imports")
    is_main = training.process_index == 0
    checked = preflight.check(script, training, model_config, None if training.use_cpu else gpu.this_gpu())
    if is_main:
        _announce(checked)
    with _locked_output_dir(training):
        resume = preflight.resume_point(training, run_state.recorded(script, training, model_config))
        last = Path(training.output_dir) / run_state.LAST
        if resume is not None and resume.is_finished and run_state.step_of(last) == resume.state.step:
            if is_main:
                ended = f"{resume.folder} is of the last step of this run, and its adapter is there"
                print(f"nothing is left to do: {ended}")
            return
        run = preflight.settle(checked, resume)
        times.end("checks and data")
        with explained(run.plan, training.output_dir):
            trainer = build(run, times)
            times.watch(trainer)
        gc.enable()  # an engine on a server has not done it
        with _stops_on_sigterm(trainer) as is_stopped:
            with explained(run.plan, training.output_dir, trainer):
                trainer.train(resume)
            if is_stopped():
                if is_main:
                    step = f"stopped by SIGTERM after step {trainer.state.global_step}"
                    print(f"{step}; resume with --resume_from_checkpoint true", file=sys.stderr)
                raise SystemExit(143)
            finish(trainer)
    if is_main:
        _print_next_commands(Path(training.output_dir), checked.rows[1])


def _announce(checked: "Checked") -> None:
    """Say in a line each that the run is on a CPU, what is trained, and what memory is planned."""
    from qerl_recipes.recipe.configs import adapter_line

    if checked.script.is_without_gpu:
        print("torch sees no CUDA GPU: this runs on the CPU (use_cpu: true, bf16: false)", file=sys.stderr)
    print(adapter_line(checked.script, checked.model), file=sys.stderr)
    if checked.plan is not None:
        choice = f", {checked.plan.choice()}" if checked.plan.choice() else ""
        print(f"memory plan: {checked.plan.line()}{choice}", file=sys.stderr)


def _print_next_commands(output_dir: Path, held_out: "Dataset | None") -> None:
    """Print the commands that evaluate and report; leave the problems held out in the folder if the first needs it."""
    from qerl_recipes.evaluate.as_trained import HELD_OUT, acting, command, needs_held_out
    from qerl_recipes.files.adapter import open_adapter
    from qerl_recipes.tasks.held_out import as_lines, whole_lines

    saved = open_adapter(output_dir)
    lines = whole_lines if acting(saved.recipe) else as_lines
    if needs_held_out(output_dir, saved.recipe) and (problems := lines(held_out)):
        (output_dir / HELD_OUT).write_text(problems, encoding="utf-8")
    print(f"adapter: {output_dir / 'adapter'}; next:\n  {command(output_dir, saved.state)}")
    print(f"  {shlex.join(['qerl', 'report', str(output_dir)])}")


@contextlib.contextmanager
def _locked_output_dir(training: "GRPOConfig") -> Iterator[None]:
    """Lock the run's output_dir, if this is its first process; raise ConfigError if another run holds it."""
    from qerl_recipes.files.whole_folder import locked
    from qerl_recipes.recipe.file import ConfigError

    if training.process_index > 0:
        yield
        return
    folder = Path(training.output_dir)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, ConfigError(f"output_dir {folder}: another training writes there; name another one")):
        try:
            yield
        finally:
            if is_new and not any(folder.iterdir()):
                folder.rmdir()


def build(run: "Preflight", times: "StartTimes | None" = None) -> "QerlGRPOTrainer":
    """Build the trainer of a run, with its engine running; ``times`` notes how long the parts take."""
    from qerl_recipes.recipe.configs import DTYPES, tracker_environment

    os.environ.update(tracker_environment(run.training))
    return assemble(
        run.training,
        run.base,
        adapter=run.adapter,
        start=None if run.start is None else run.start.path,
        dtype=DTYPES[run.model.dtype or "bfloat16"],
        attn_implementation=run.model.attn_implementation,
        reward_funcs=run.rewards,
        train_dataset=run.train,
        eval_dataset=run.held_out,
        processing_class=run.tokenizer,
        run=run.run,
        recipe=run.recorded,
        times=times,
        **run.interaction.arguments(),
    )


def assemble(
    training: "GRPOConfig",
    base: Path,
    *,
    adapter: "PeftConfig",
    start: Path | None = None,
    dtype: "torch.dtype",
    attn_implementation: str | None = None,
    times: "StartTimes | None" = None,
    **trainer_arguments: Any,
) -> "QerlGRPOTrainer":
    """Build engine, then model, then trainer on the folder ``base``: the model may share the engine's weights."""
    warm_compiler()
    import torch
    from peft import PeftModel

    from qerl_recipes.hooks import find
    from qerl_recipes.model import loading, norms, shared
    from qerl_recipes.train.trainer import QerlGRPOTrainer

    start_engine: StartEngine = find("qerl_rollout_engines", training.rollout_engine)
    times = times or StartTimes()
    times.end("imports")
    built: list[weakref.ref[QerlGRPOTrainer]] = []

    def snapshot() -> "Snapshot":
        trainer = built[0]()
        assert trainer is not None  # only the trainer asks for it
        return trainer.snapshot()

    with contextlib.ExitStack() as on_failure:
        engine = start_engine(
            str(base), training, rank=adapter.r, dtype=dtype, snapshot=snapshot, accelerator=training.distributed_state
        )
        on_failure.callback(engine.close)
        if training.tf32:  # which vLLM's worker switches off in its process
            torch.set_float32_matmul_precision("high")
        times.end("engine", getattr(engine, "start_seconds", {}))
        weights = shared.borrow(engine, training) if shared.is_wanted(training) else None
        policy: PreTrainedModel | PeftModel = loading.load(
            base, dtype, quantization=training.quantization, attn_implementation=attn_implementation, weights=weights
        )
        if start is not None:
            policy = PeftModel.from_pretrained(policy, str(start), is_trainable=True)
            norms.load_norms(policy, start)
        trainer_arguments["peft_config"] = adapter if start is None else None
        trainer = QerlGRPOTrainer(policy, args=training, engine=engine, **trainer_arguments)
        # vLLM takes what an engine holds out of garbage collection (gc.freeze), so that must not hold the trainer
        built.append(weakref.ref(trainer))
        on_failure.pop_all()
    times.end("trainer's model")
    return trainer


class StartTimes:
    """Measure the seconds from the command to the end of the first step by phase, and say them in one line."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._of: dict[str, str] = {}  # what a phase's parts took, in brackets
        self._ended = Process().create_time()  # of the last phase

    def end(self, phase: str, parts: Mapping[str, float] | None = None) -> None:
        """Count the time since the last phase ended as time of ``phase``, of which ``parts`` names some."""
        before, self._ended = self._ended, time.time()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + self._ended - before
        self._of[phase] = f" ({', '.join(f'{part} {took:.1f}' for part, took in parts.items())})" if parts else ""

    def line(self) -> str:
        """Return all phases in the order in which they came first."""
        listed = ", ".join(f"{phase} {seconds:.1f}{self._of[phase]}" for phase, seconds in self._seconds.items())
        return f"start: {sum(self._seconds.values()):.1f} s to the end of the first step: {listed}"

    def watch(self, trainer: "QerlGRPOTrainer") -> None:
        """Print the line after the trainer's first step."""
        from tqdm import tqdm
        from transformers import TrainerCallback

        times = self

        class AtFirstStep(TrainerCallback):
            is_over = False

            def on_evaluate(self, *_: Any, **__: Any) -> None:
                times.end("first evaluation")

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                times.end("trainer's model")

            def on_step_end(self, *_: Any, **__: Any) -> None:
                times.end("first step", {"rollout": trainer.vllm_generation.seconds})
                if not self.is_over and trainer.is_world_process_zero():
                    tqdm.write(times.line(), file=sys.stderr)
                self.is_over = True

        trainer.add_callback(AtFirstStep())


def finish(trainer: "QerlGRPOTrainer") -> None:
    """Save the adapter, and push it if the recipe asks for that."""
    adapter = Path(trainer.args.output_dir) / "adapter"
    trainer.save_adapter(adapter)
    if trainer.args.push_to_hub:
        trainer.push_to_hub()


@contextlib.contextmanager
def _stops_on_sigterm(trainer: "QerlGRPOTrainer") -> Iterator[Callable[[], bool]]:
    """Let the first SIGTERM stop the training after its step, in all processes; yield what tells whether it came."""
    import torch
    from transformers import TrainerCallback

    requested = False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        requested = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    class StopAtStepEnd(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal requested
            accelerator = trainer.accelerator
            if accelerator.num_processes > 1:  # one that was told stops all, after the same step
                requested = bool(accelerator.gather(torch.tensor([int(requested)], device=accelerator.device)).max())
            if requested:
                control.should_training_stop = True
                control.should_save = state.global_step % trainer.steps_per_rollout == 0

    trainer.add_callback(StopAtStepEnd())
    before = signal.signal(signal.SIGTERM, request)
    try:
        yield lambda: requested
    finally:
        signal.signal(signal.SIGTERM, before)
