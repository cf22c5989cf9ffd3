import contextlib
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import digit_rewards
import pytest
import torch
from digit_rewards import digits_of_some
from peft import PeftModel
from safetensors.torch import load_file
from waiting import until

from qerl_recipes.files import run_state as checkpoints
from qerl_recipes.model import loading as model
from qerl_recipes.train import run as train

# Has epochs of 3 rollouts, checkpoints at 2 (first epoch) and 4 (second epoch), noise and resampling.
RUN = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "noise_mode": "both",
    "sigma_start": 0.1,
    "sigma_end": 0.01,
    "num_stages": 2,
    "dynamic_sampling": True,
}


def adapter_bits(folder):
    return {name: tensor.view(torch.int32) for name, tensor in load_file(folder / "adapter_model.safetensors").items()}


def same_bits(a, b):
    ours, theirs = adapter_bits(a), adapter_bits(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def unbroken(make_module_trainer, make_nvfp4):
    trainer = make_module_trainer(make_nvfp4("qwen2"), digits_of_some, rows=6, **RUN)
    trainer.train()
    trainer.vllm_generation.close()
    return Path(trainer.args.output_dir)


@pytest.fixture
def finished(unbroken, make_nvfp4, tmp_path):
    """Return the base and a copy of the unbroken run's folder, whose name contains a space."""
    whole = shutil.copytree(unbroken, tmp_path / "the whole")
    return make_nvfp4("qwen2"), whole


class Forked(multiprocessing.get_context("fork").Process):
    """Train a recipe in a fork of this process: a new one would first import torch, vLLM and TRL."""

    def __init__(self, recipe, log, environment):
        super().__init__()
        self.recipe, self.log, self.environment = recipe, log, environment

    def run(self):
        for stream in (1, 2):
            os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.environ.update(self.environment)
        train.main(["--config", self.recipe])

    def poll(self):
        return self.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self, seconds):
        self.join(seconds)
        return self.exitcode


@pytest.mark.integration
@pytest.mark.parametrize(
    "stop",
    [signal.SIGKILL, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (signal.SIGTERM, signal.SIGINT))],
    ids=lambda stop: stop.name,
)
def test_promise_08_a_stopped_run_resumes_to_the_same_bits(
    stop, finished, make_trainer, read_metrics, start_process, write_recipe, tmp_path, resume
):
    base, whole = finished
    broken = tmp_path / "broken"
    recipe = write_recipe(output_dir=str(broken), dataset_size=6, reward_funcs=["pausing_digits.digits_of_some"], **RUN)
    pause = {"PAUSE_AT": "5", "PAUSED": str(tmp_path / "paused")}
    if stop == signal.SIGKILL:
        process = Forked(recipe, tmp_path / "log", pause)
        process.start()
    else:
        command = [sys.executable, "-m", "qerl_recipes.cli", "train", "--config", recipe]
        path = {"PYTHONPATH": str(Path(digit_rewards.__file__).parent)}
        process = start_process(command, tmp_path / "log", **path, **pause)
    assert until(lambda: (tmp_path / "paused").exists() or process.poll() is not None, 250)
    assert (tmp_path / "paused").exists(), (tmp_path / "log").read_text()[-4000:]
    process.send_signal(stop)
    if stop == signal.SIGTERM:  # SIGTERM lets the run finish its step
        (tmp_path / "paused").unlink()
    code = process.wait(120)
    if stop == signal.SIGKILL:
        assert code == -signal.SIGKILL
        assert [path.name for path in checkpoints.whole_checkpoints(broken)] == ["checkpoint-2", "checkpoint-4"]
    elif stop == signal.SIGINT:
        assert code == 130
        *_, last = (tmp_path / "log").read_text().splitlines()
        kept = f"nothing up to {broken}/checkpoint-4 is lost: go on from it with --resume_from_checkpoint true"
        assert last == f"stopped by Ctrl-C; {kept}"
        assert "Traceback" not in (tmp_path / "log").read_text()
        warned = [line for line in (tmp_path / "log").read_text().splitlines() if "WARNING" in line]
        assert all("Using custom scheduler class" in line for line in warned), "noise at the start"
    else:  # it finishes its step and saves
        assert code == 143
        assert checkpoints.whole_checkpoints(broken)[-1].name == "checkpoint-5"
    trainer = make_trainer(base, digits_of_some, rows=6, output_dir=str(broken), **RUN)
    before = [checkpoints.read_state(folder).seconds for folder in checkpoints.whole_checkpoints(broken)]
    resume(trainer)
    assert checkpoints.read_state(broken / "checkpoint-6").seconds > before[-1] > before[0] > 0
    assert same_bits(broken / "checkpoint-6", whole / "checkpoint-6")
    assert read_metrics(broken) == read_metrics(whole)
    dropped = [record["dropped_groups"] for record in read_metrics(whole)]
    assert sum(dropped[:4]) > 0 < sum(dropped[4:]), "the stream of fresh prompts has to go on where it was"


CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod")


def save_and_keep_every_moment(trainer, folder, moments):
    """Save in a forked process that copies ``folder`` into ``moments`` before each change of a file in it.

    Each copy is what SIGKILL would leave at that moment. The process is forked because audit hooks cannot be removed.
    """
    child = os.fork()
    if child == 0:
        numbers, state = itertools.count(), {"copying": False}

        def watch(event, arguments):
            is_change = event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
            if is_change and str(arguments[0]).startswith(str(folder)) and not state["copying"]:
                state["copying"] = True
                shutil.copytree(folder, moments / f"{next(numbers):03}")
                state["copying"] = False

        with contextlib.suppress(BaseException):
            sys.addaudithook(watch)
            trainer._save_checkpoint(trainer.model, None)
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_promise_08_a_kill_while_saving_leaves_a_checkpoint(make_trainer, make_nvfp4, tmp_path):
    """Check a save of the third checkpoint, which takes the second's place.

    Whenever the writer dies, one of them is whole, and nothing else counts as a checkpoint.
    """
    folder, moments = tmp_path / "run", tmp_path / "moments"
    settings = {**RUN, "max_steps": 2, "save_steps": 1, "save_total_limit": 1, "output_dir": str(folder)}
    trainer = make_trainer(make_nvfp4("qwen2"), rows=6, **settings)
    trainer.train()
    second = adapter_bits(folder / "checkpoint-2")
    trainer.state.global_step = 3
    with torch.no_grad():
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight += 1
    save_and_keep_every_moment(trainer, folder, moments)
    left = []
    for moment in (*sorted(moments.iterdir()), folder):
        whole = checkpoints.whole_checkpoints(moment)
        left.append([path.name for path in whole])
        assert checkpoints.starting_point(moment, True) == whole[-1]
        for checkpoint in whole:
            bits = adapter_bits(checkpoint)
            assert all(torch.equal(bits[n], second[n]) == (checkpoint.name == "checkpoint-2") for n in second), moment
    stages = [["checkpoint-2"], ["checkpoint-2", "checkpoint-3"], ["checkpoint-3"]]
    assert [names for names, _ in itertools.groupby(left)] == stages
    assert len(left) > 20


def test_a_checkpoint_is_a_peft_adapter_and_binds_its_base(finished):
    base, whole = finished
    state = checkpoints.read_state(whole / "checkpoint-6")
    assert (state.step, state.rollout, state.adapter_version) == (6, 6, 6)
    assert state.recipe["sigma_start"] == RUN["sigma_start"] and state.recipe["dynamic_sampling"] is True
    assert "dynamic_sampling_metric" in state.recipe
    assert state.base_hash == checkpoints.base_hash(base)
    wrapped = PeftModel.from_pretrained(model.load(base), whole / "checkpoint-6")
    loaded = {n.replace(".default", ""): t for n, t in wrapped.state_dict().items() if ".lora_" in n}
    saved = load_file(whole / "checkpoint-6" / "adapter_model.safetensors")
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert str(base) in (whole / "checkpoint-6" / "README.md").read_text()


@pytest.mark.parametrize(
    "smaller",
    [
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": None, "generation_batch_size": 8, "pack_tokens": 40},
    ],
    ids=["by TRL", "by tokens"],
)
def test_a_run_goes_on_with_smaller_micro_batches(smaller, finished, make_trainer, read_metrics, resume):
    base, whole = finished
    before = read_metrics(whole)
    trainer = make_trainer(base, digits_of_some, rows=6, output_dir=str(whole), **RUN, **smaller)
    resume(trainer, whole / "checkpoint-4")
    for one, other in zip(before[4:], read_metrics(whole)[4:], strict=True):
        assert [one[key] for key in ("step", "epoch", "sigma")] == [other[key] for key in ("step", "epoch", "sigma")]
    fifth = read_metrics(whole)[4]
    assert {key: fifth[key] for key in ("reward", "completion_length", "dropped_groups", "learning_rate")} == {
        key: before[4][key] for key in ("reward", "completion_length", "dropped_groups", "learning_rate")
    }


def test_a_run_that_went_back_never_goes_on_from_what_it_left(finished, make_trainer, read_metrics, capfd, resume):
    """Check a run that is stopped before its first own checkpoint.

    The checkpoints that it left behind stay whole, and the run names them.
    """
    base, whole = finished
    settings = {"rows": 6, "output_dir": str(whole), **RUN}

    def until_the_third(completions, trainer_state, **columns):
        if trainer_state.global_step == 3:
            raise KeyboardInterrupt
        return digits_of_some(completions, **columns)

    before = read_metrics(whole)
    with pytest.raises(KeyboardInterrupt):
        resume(make_trainer(base, until_the_third, **settings), whole / "checkpoint-2")
    assert f"what was saved later, with its metrics, lies in {whole}/_left-1 now" in capfd.readouterr().err
    assert [path.name for path in checkpoints.whole_checkpoints(whole)] == ["checkpoint-2"]
    trainer = make_trainer(base, digits_of_some, **settings, save_total_limit=1)
    resume(trainer)
    assert [record["step"] for record in read_metrics(trainer)] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in checkpoints.whole_checkpoints(whole)] == ["checkpoint-6"]
    assert read_metrics(whole) == before == read_metrics(whole / "_left-1")
    left = checkpoints.whole_checkpoints(whole / "_left-1")
    assert [path.name for path in left] == ["checkpoint-4", "checkpoint-6"]
    assert same_bits(left[1], whole / "checkpoint-6")


def test_a_resume_has_no_evaluation_at_the_start(make_trainer, make_nvfp4, read_metrics, resume):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(make_nvfp4("qwen2"), max_steps=2, eval_on_start=True, **settings)
    trainer.train()
    whole = read_metrics(trainer)
    assert [(record["step"], "eval/reward" in record) for record in whole] == [
        (0, True), (1, False), (1, True), (2, False), (2, True),
    ]  # fmt: skip
    shutil.rmtree(Path(trainer.args.output_dir) / "checkpoint-2")
    again = make_trainer(make_nvfp4("qwen2"), max_steps=2, eval_on_start=True, **settings)
    resume(again)
    assert read_metrics(again) == whole


def test_a_run_of_epochs_that_has_ended_trains_no_more(make_trainer, make_nvfp4, read_metrics, resume):
    settings = {"rows": 5, "max_steps": -1, "num_train_epochs": 0.5, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(make_nvfp4("qwen2"), **settings)
    trainer.train()
    resume(trainer)
    assert [record["step"] for record in read_metrics(trainer)] == [1]


@pytest.mark.parametrize("largest_file", [30_000, 60_000], ids=["adapter", "optimizer"])
def test_a_disk_that_fills_up_while_saving_leaves_what_was_there(largest_file, finished, make_trainer, resume):
    base, whole = finished
    shutil.rmtree(whole / "checkpoint-6")
    trainer = make_trainer(base, digits_of_some, rows=6, output_dir=str(whole), **{**RUN, "save_steps": 6})
    trainer.args.save_steps = 6
    before = {path.name: path.read_bytes() for path in (whole / "checkpoint-4").iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))  # the kernel refuses to write more
    try:
        with pytest.raises(
            OSError, match=r"checkpoint-6 could not be saved.*MiB free\). Earlier checkpoints are untouched"
        ):
            resume(trainer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in (whole / "checkpoint-4").iterdir()} == before
    assert sorted(path.name for path in whole.glob("*check*")) == ["checkpoint-2", "checkpoint-4"]


def test_save_steps_in_the_middle_of_a_rollout_are_refused(make_trainer, make_nvfp4):
    settings = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 4}
    trainer = make_trainer(make_nvfp4("qwen2"), save_strategy="steps", save_steps=1, **settings)
    with pytest.raises(ValueError, match="is in mid-rollout; use a multiple of"):
        trainer.train()


@pytest.mark.parametrize(("told", "others"), [(False, 0), (True, 0), (False, 1)], ids=["nobody", "this", "another"])
def test_a_sigterm_to_one_process_stops_all_after_the_same_step(told, others):
    """Stand in for two processes: one that is not told would wait for the other's next step for ever."""
    callbacks = []
    both = SimpleNamespace(num_processes=2, device="cpu", gather=lambda own: torch.cat([own, torch.tensor([others])]))
    trainer = SimpleNamespace(accelerator=both, add_callback=callbacks.append, steps_per_rollout=2)
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    before = signal.getsignal(signal.SIGTERM)
    with train._stops_on_sigterm(trainer) as is_stopped:
        if told:
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "a second one ends the process at once"
        callbacks[0].on_step_end(None, SimpleNamespace(global_step=4), control)
        assert is_stopped() == control.should_training_stop == control.should_save == (told or others == 1)
    assert signal.getsignal(signal.SIGTERM) == before
