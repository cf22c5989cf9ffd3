"""Test that two trainer processes train as one does on the same completions.

They must also resume from a checkpoint to the same bits.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import calling
import digit_rewards
import pandas as pd
import pytest
import scripted_rollouts
import torch
import yaml
from safetensors.torch import load_file

from qerl_recipes.files.run_state import CheckpointMismatch
from qerl_recipes.hooks import get_plugin_manager
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.train import run as train
from qerl_recipes.train.divergence import Diverged
from qerl_recipes.train.preflight import uneven_evaluation

ENGINE = ["--rollout_engine", scripted_rollouts.NAME, "--dtype", "float32"]
REPLACED = ["--dynamic_sampling", "true", "--gradient_accumulation_steps", "2"]
# A rollout serves two steps. The random numbers of each process decide which completions are in which step.
SEVERAL_STEPS = ["--steps_per_generation", "2", "--gradient_accumulation_steps", "1", "--save_strategy", "steps"]
RESUMED = [*SEVERAL_STEPS, "--save_steps", "4", "--resume_from_checkpoint"]
EXACTLY = {"step", "reward", "reward_std", "frac_reward_zero_std", "completion_length", "completion_clipped", "sigma"}
EXACTLY |= {
    "accepted_groups",
    "dropped_groups",
    "filled_groups",
    "sampling_rounds",
    "adapter_version",
    "frac_zero_advantage",
}


@pytest.fixture
def scripted():
    """Register the scripted rollout engine in this process, so that a recipe can name it."""
    manager = get_plugin_manager()
    manager.register(scripted_rollouts)
    yield
    manager.unregister(scripted_rollouts)


def adapter(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def policies(folder, rank):
    """Return a hash of each policy that the engine of one process was given."""
    return (folder / f"policies_{rank}").read_text().split()


def table(folder, step):
    return pd.read_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def test_promise_08_two_processes_do_what_one_does_and_resume(
    write_recipe, run_process, read_metrics, scripted, tmp_path
):
    recipe = write_recipe(
        reward_funcs=["digit_rewards.digits_of_some"],
        max_steps=4,
        train_norms=True,
        learning_rate=1e-3,
        noise_mode="both",
        sigma_start=0.1,
        num_stages=2,
        per_device_train_batch_size=4,  # one group
        log_completions=True,
    )
    one, two, whole, resumed, parts = (tmp_path / name for name in ("one", "two", "whole", "resumed", "parts"))
    content = yaml.safe_load(Path(recipe).read_text())
    del content["per_device_train_batch_size"]
    (tmp_path / "by_tokens.yaml").write_text(yaml.safe_dump({**content, "generation_batch_size": 16}))

    def flags(folder, *more):
        return ["--config", recipe, *ENGINE, "--output_dir", str(folder), *more]

    runs = [
        flags(two, *REPLACED),
        flags(whole, *SEVERAL_STEPS, "--save_steps", "2"),
        flags(resumed, *RESUMED, str(whole / "checkpoint-2")),
        # the longest completions are in one process, which has more parts than the other
        ["--config", str(tmp_path / "by_tokens.yaml"), *flags(parts, *REPLACED[:2], "--pack_tokens", "40")[2:]],
    ]
    command = [sys.executable, scripted_rollouts.__file__, "2", *map(json.dumps, runs)]
    path = os.pathsep.join([str(Path(digit_rewards.__file__).parent), os.environ.get("PYTHONPATH", "")])
    run_process(command, tmp_path / "log", PYTHONPATH=path)

    # One process with all groups has the same prompts, completions, rewards and sums, added in another order.
    train.main(flags(one, *REPLACED, "--gradient_accumulation_steps", "4"))
    # In a micro-batch without any advantage one completion is computed all the same: more of them in smaller ones.
    of_computed = {"frac_zero_advantage", "entropy", "logp_diff_mean", "logp_diff_max"}
    for other, left_out in ((two, set()), (parts, of_computed)):
        records = list(zip(read_metrics(one), read_metrics(other), strict=True))
        assert len(records) == 4 and sum(ours["filled_groups"] for ours, _ in records) > 0
        assert any(ours["dropped_groups"] % 2 for ours, _ in records), "every round could be shared equally"
        for ours, theirs in records:
            exactly = EXACTLY - left_out
            assert {name: theirs[name] for name in exactly} == pytest.approx({name: ours[name] for name in exactly})
            assert theirs["extra_tokens"] >= ours["extra_tokens"]
            for name in {"loss", "grad_norm", "entropy", "logp_diff_mean", "logp_diff_max"} - left_out:
                assert theirs[name] == pytest.approx(ours[name], rel=2e-4, abs=1e-7), name
            pd.testing.assert_frame_equal(table(other, ours["step"]), table(one, ours["step"]), rtol=1e-5)
        assert 0 < max(ours["frac_zero_advantage"] for ours, _ in records) < 1
        for name, tensor in adapter(one).items():
            torch.testing.assert_close(adapter(other)[name], tensor, rtol=0, atol=1e-5, msg=name)

    for run, rollouts in ((two, 4), (parts, 4), (whole, 2), (resumed, 1)):  # every process gets the policy of the first
        assert len(set(policies(run, 0))) == rollouts and policies(run, 1) == policies(run, 0)

    assert read_metrics(resumed) == read_metrics(whole)[2:] and len(read_metrics(whole)) == 4
    assert all(torch.equal(adapter(resumed)[name], tensor) for name, tensor in adapter(whole).items())
    assert not all(torch.equal(adapter(two)[name], tensor) for name, tensor in adapter(whole).items())
    alone = flags(tmp_path / "alone", *RESUMED, str(whole / "checkpoint-2"), "--per_device_train_batch_size", "8")
    with pytest.raises(CheckpointMismatch, match="its run had 2 trainer processes and this one has 1; use accelerate"):
        train.main(alone)


def test_two_processes_play_the_episodes_that_one_plays(
    write_recipe, run_process, read_metrics, scripted, make_nvfp4, tmp_path
):
    """Check turns: a process whose episodes have ended waits for no other, and seeds follow from the place."""
    recipe = write_recipe(
        **calling.recipe_keys(make_nvfp4("qwen2"), tmp_path),
        reward_funcs=["digit_rewards.digits_of_some"],
        max_steps=3,
        max_completion_length=16,
        per_device_train_batch_size=4,  # one group
        log_completions=True,
    )
    one, two = tmp_path / "one", tmp_path / "two"
    flags = ["--config", recipe, *ENGINE, *REPLACED]
    command = [sys.executable, scripted_rollouts.__file__, "2", json.dumps([*flags, "--output_dir", str(two)])]
    path = os.pathsep.join([str(Path(digit_rewards.__file__).parent), os.environ.get("PYTHONPATH", "")])
    run_process(command, tmp_path / "log", PYTHONPATH=path)
    train.main([*flags, "--output_dir", str(one), "--gradient_accumulation_steps", "4"])
    names = EXACTLY | {"turns", "tool_calls", "tool_failures", "episodes_cut"}
    for ours, theirs in zip(read_metrics(one), read_metrics(two), strict=True):
        assert {name: theirs[name] for name in names} == pytest.approx({name: ours[name] for name in names})
        pd.testing.assert_frame_equal(table(two, ours["step"]), table(one, ours["step"]), rtol=1e-5)
    turns = [(two / f"turns_{rank}").read_text().split() for rank in (0, 1)]
    assert turns[0] != turns[1] and len(turns[0]) == len(turns[1]), "one process takes more turns than the other"


@pytest.mark.parametrize(("elsewhere", "stops"), [(3.0, False), (torch.nan, True), (-torch.inf, True)])
def test_a_loss_that_is_not_finite_in_one_process_stops_them_all(
    elsewhere, stops, make_trainer, make_nvfp4, monkeypatch
):
    trainer = make_trainer(make_nvfp4("qwen2"))
    monkeypatch.setattr(trainer.accelerator, "gather", lambda own: torch.stack([own, torch.tensor(elsewhere)]))
    trainer._values.add(torch.tensor(1.0), torch.tensor(6))
    with pytest.raises(Diverged, match="step 1 is not taken") if stops else contextlib.nullcontext():
        trainer._get_grad_norm(trainer.model)
    assert stops or trainer._values.loss == 2.0


@pytest.mark.parametrize(
    ("processes", "size", "problems", "advice"),
    [
        (1, 8, 6, None),
        (1, 8, 7, "the last batch is smaller and counts as much as any other; use per_device_eval_batch_size: 4"),
        (2, 8, 8, None),
        (2, 8, 10, "problems that were counted already; use per_device_eval_batch_size: 4"),
        (2, 2, 7, None),
        (8, 4, 7, "problems that were counted already; use a multiple of 8 held-out problems"),
    ],
)
def test_an_evaluation_with_a_part_of_a_batch_says_so(processes, size, problems, advice, monkeypatch):
    training = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, per_device_eval_batch_size=size)
    training.num_generations_eval = 4
    monkeypatch.setattr(GRPOConfig, "world_size", processes)
    found = uneven_evaluation(training, problems)
    assert found is None if advice is None else found.endswith(advice)
