"""Test two trainers on two GPUs: they sum given completions as one does, have an engine each, and resume to the same
bits.
"""

import json
import os
import sys
from pathlib import Path

import pandas as pd
import pytest
import scripted_rollouts
import torch
from safetensors.torch import load_file

from qerl_recipes.machine.gpu import visible_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(580),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="2 GPUs are needed"),
]

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECIPE = Path(__file__).parents[2] / "recipes/demo/grpo/nvfp4_lora_aqn.yaml"
STEPS, COMPLETIONS = 4, 64
SETTINGS = {
    "use_cpu": "false",
    "bf16": "true",
    "max_steps": STEPS,
    "num_stages": 2,
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "num_generations": 8,
    "gradient_accumulation_steps": 2,
    "reward_funcs": "digit_rewards.digits",
    "reward_weights": 1.0,
    "vllm_kv_cache_memory_bytes": 1 << 30,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "log_completions": "true",
}


@pytest.fixture
def train(checkpoints, run_process, hold_port, tmp_path):
    """Return train(name, processes, *flags, script=False), which gives the folder of a run.

    The number of completions per step is the same for any number of processes.
    """

    def run(name, processes, *flags, script=False):
        folder = tmp_path / name
        share = COMPLETIONS // SETTINGS["gradient_accumulation_steps"] // processes  # type: ignore[operator]
        own = {"model_name_or_path": checkpoints[1], "output_dir": folder, "per_device_train_batch_size": share}
        line = ["--config", str(RECIPE)]
        line += [part for key, value in {**SETTINGS, **own}.items() for part in (f"--{key}", str(value))] + list(flags)
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "accelerate.commands.launch", "--num_processes", str(processes)]
            launcher += ["--main_process_port", str(hold_port())]
        command = [scripted_rollouts.__file__, json.dumps(line)]
        command = command if script else ["-m", "qerl_recipes.cli", "train", *line]
        path = os.pathsep.join([str(FIXTURES / "rewards"), os.environ.get("PYTHONPATH", "")])
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(visible_names()[:processes])}
        run_process([*launcher, *command], tmp_path / f"{name}.log", PYTHONPATH=path, **gpus)
        return folder

    return run


def metrics(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("_tokens_per_s", "step_seconds")
    return [{name: value for name, value in record.items() if not name.endswith(clock)} for record in records]


def column(folder, step, name):
    return pd.read_parquet(folder / "completions" / f"completions_{step:05d}.parquet")[name].tolist()


def adapter(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_on_given_completions_two_have_the_loss_and_the_gradient_of_one(train, record):
    flags = ["--rollout_engine", scripted_rollouts.NAME, "--save_strategy", "no"]
    one, two = (train(f"scripted_{n}", n, *flags, script=True) for n in (1, 2))
    off = dict.fromkeys(("loss", "grad_norm", "entropy", "logp_diff_mean"), 0.0)
    for step, (ours, theirs) in enumerate(zip(metrics(one), metrics(two), strict=True), start=1):
        assert column(one, step, "completion") == column(two, step, "completion")
        assert theirs["reward"] == pytest.approx(ours["reward"])
        off = {name: max(value, abs(theirs[name] - ours[name])) for name, value in off.items()}
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-2) and ours["grad_norm"] > 0
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-4)
    assert step == STEPS
    record("two GPUs to one, given completions: largest difference", ", ".join(f"{k} {v:.1e}" for k, v in off.items()))


def test_two_with_an_engine_each_have_the_prompts_of_one_and_resume_to_the_same_bits(train, record):
    one, two = train("one", 1, "--save_strategy", "no"), train("two", 2, "--share_weights", "true")
    resume = ["--resume_from_checkpoint", str(two / "checkpoint-2"), "--share_weights", "false"]
    resumed = train("resumed", 2, *resume)
    same = 0
    for step, (ours, theirs) in enumerate(zip(metrics(one), metrics(two), strict=True), start=1):
        assert column(one, step, "prompt") == column(two, step, "prompt")
        pairs = zip(column(one, step, "completion"), column(two, step, "completion"), strict=True)
        same += sum(a == b for a, b in pairs)
        assert max(ours["logp_diff_mean"], theirs["logp_diff_mean"]) < 0.025
    assert same > STEPS * COMPLETIONS / 4, "other seeds would leave none"
    record("two GPUs, an engine each: completions that are those of one", f"{same} of {STEPS * COMPLETIONS}")
    assert metrics(resumed) == metrics(two)[2:]
    assert all(torch.equal(adapter(resumed)[name], tensor) for name, tensor in adapter(two).items())
    record("resumed on two GPUs, with weights of the trainers' own: the same bits", "yes")
