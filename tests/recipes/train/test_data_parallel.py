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
from qerl_recipes.machine import processes
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


def adapter(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def policies(folder, rank):
    """Return a hash of each policy that the engine of one process was given."""
    return (folder / f"policies_{rank}").read_text().split()


def table(folder, step):
    return pd.read_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def flags(recipe, folder, *more):
    return ["--config", recipe, *ENGINE, "--output_dir", str(folder), *more]


@pytest.fixture(scope="module")
def place(write_recipe_in, make_nvfp4, hold_port, tmp_path_factory):
    """Let two processes train all runs below, one after the other, in the folder that this returns.

    They import torch and TRL once, which takes longer than the runs.
    """
    folder = tmp_path_factory.mktemp("two")
    for name in ("acting", "engine"):
        (folder / name).mkdir()
    recipe = write_recipe_in(
        folder,
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
    content = yaml.safe_load(Path(recipe).read_text())
    del content["per_device_train_batch_size"]
    by_tokens = folder / "by_tokens.yaml"
    by_tokens.write_text(yaml.safe_dump({**content, "generation_batch_size": 16}))
    acting = write_recipe_in(
        folder / "acting",
        **calling.recipe_keys(make_nvfp4("qwen2"), folder / "acting"),
        reward_funcs=["digit_rewards.digits_of_some"],
        max_steps=3,
        max_completion_length=16,
        per_device_train_batch_size=4,  # one group
        log_completions=True,
    )
    with_an_engine = write_recipe_in(
        folder / "engine",
        noise_mode="both",
        sigma_start=0.1,
        num_stages=1,
        log_completions=True,
        dynamic_sampling=True,  # a random model never earns its reward: every group is resampled
        entropy_coef=0.1,  # gives a loss, which differs between the processes
        max_steps=2,
        per_device_train_batch_size=4,
        max_completion_length=8,
        vllm_max_model_length=32,
        vllm_tensor_parallel_size=2,
        save_strategy="steps",
        save_steps=2,
    )
    runs = [
        flags(recipe, folder / "two", *REPLACED),
        flags(recipe, folder / "whole", *SEVERAL_STEPS, "--save_steps", "2"),
        flags(recipe, folder / "resumed", *RESUMED, str(folder / "whole/checkpoint-2")),
        # the longest completions are in one process, which has more parts than the other
        flags(str(by_tokens), folder / "parts", *REPLACED[:2], "--pack_tokens", "40"),
        flags(acting, folder / "acting/two", *REPLACED),
        ["--config", with_an_engine],
    ]
    command = [sys.executable, scripted_rollouts.__file__, *map(json.dumps, runs)]
    path = os.pathsep.join([str(Path(digit_rewards.__file__).parent), os.environ.get("PYTHONPATH", "")])
    log, environment = folder / "log", {"PYTHONPATH": path, "MASTER_PORT": str(hold_port())}
    assert processes.run(command, log=log, environment=environment) == 0, log.read_text()[-6000:]
    return folder


@pytest.mark.integration
def test_promise_08_two_processes_do_what_one_does_and_resume(place, read_metrics, scripted):
    recipe = str(place / "recipe.yaml")
    one, two, whole, resumed, parts = (place / name for name in ("one", "two", "whole", "resumed", "parts"))
    # One process with all groups has the same prompts, completions, rewards and sums, added in another order.
    train.main(flags(recipe, one, *REPLACED, "--gradient_accumulation_steps", "4"))
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
    alone = flags(recipe, place / "alone", *RESUMED, str(whole / "checkpoint-2"), "--per_device_train_batch_size", "8")
    with pytest.raises(CheckpointMismatch, match="its run had 2 trainer processes and this one has 1; use accelerate"):
        train.main(alone)


@pytest.mark.integration
def test_two_processes_play_the_episodes_that_one_plays(place, read_metrics, scripted):
    """Check turns: a process whose episodes have ended waits for no other, and seeds follow from the place."""
    one, two = place / "acting/one", place / "acting/two"
    train.main(flags(str(place / "acting/recipe.yaml"), one, *REPLACED, "--gradient_accumulation_steps", "4"))
    names = EXACTLY | {"turns", "tool_calls", "tool_failures", "episodes_cut"}
    for ours, theirs in zip(read_metrics(one), read_metrics(two), strict=True):
        assert {name: theirs[name] for name in names} == pytest.approx({name: ours[name] for name in names})
        pd.testing.assert_frame_equal(table(two, ours["step"]), table(one, ours["step"]), rtol=1e-5)
    turns = [(two / f"turns_{rank}").read_text().split() for rank in (0, 1)]
    assert turns[0] != turns[1] and len(turns[0]) == len(turns[1]), "one process takes more turns than the other"


@pytest.mark.integration
def test_two_processes_with_one_engine_train_one_policy(place):
    """Check data parallelism in the trainer with tensor parallelism in the engine.

    All processes must agree on noise and resampling.
    """
    run = place / "engine/run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(r["sigma"], r["adapter_version"], r["noisy_norms"]) for r in records] == [(0, 1, 0), (0.1, 2, 4)]
    assert all(record["logp_diff_mean"] < 0.05 for record in records)
    assert all(record["dropped_groups"] == 2 and record["sampling_rounds"] == 3 for record in records)
    history = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]  # transformers' own mean over the processes
    assert [record["loss"] for record in records] == pytest.approx(losses, abs=2e-4) and min(map(abs, losses)) > 0.01
    state = json.loads((run / "checkpoint-2" / "qerl_state.json").read_text())
    assert state["stream"] == 2 * 3 * 2  # steps, rounds, groups over both processes
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= state["files"].keys()
    for step in (1, 2):  # the table has the rows of both processes, without advantages
        table = pd.read_parquet(run / "completions" / f"completions_{step:05d}.parquet")
        assert table["advantage"].tolist() == [0.0] * 8


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
    ("workers", "size", "problems", "advice"),
    [
        (1, 8, 6, None),
        (1, 8, 7, "the last batch is smaller and counts as much as any other; use per_device_eval_batch_size: 4"),
        (2, 8, 8, None),
        (2, 8, 10, "problems that were counted already; use per_device_eval_batch_size: 4"),
        (2, 2, 7, None),
        (8, 4, 7, "problems that were counted already; use a multiple of 8 held-out problems"),
    ],
)
def test_an_evaluation_with_a_part_of_a_batch_says_so(workers, size, problems, advice, monkeypatch):
    training = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, per_device_eval_batch_size=size)
    training.num_generations_eval = 4
    monkeypatch.setattr(GRPOConfig, "world_size", workers)
    found = uneven_evaluation(training, problems)
    assert found is None if advice is None else found.endswith(advice)
