import os
import shutil
import sys
from pathlib import Path

import calling
import digit_rewards
import httpx
import pandas as pd
import pytest
import torch
from waiting import PATIENCE

from qerl_recipes.train import (
    checkpoints as checkpoints,  # registers names such as cpu:0 with torch
)

PATH = {"PYTHONPATH": os.pathsep.join([str(Path(digit_rewards.__file__).parent), os.environ.get("PYTHONPATH", "")])}
NOISY = {
    "reward_funcs": ["digit_rewards.digits"],
    "noise_mode": "both",
    "sigma_start": 0.1,
    "num_stages": 1,
    "max_steps": 2,
}


def launch(recipe, *flags, processes=("--standalone", "--nproc_per_node", "2")):
    """Return the command that runs `qerl train` in two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *processes]
    return [*launcher, "-m", "qerl_recipes.cli", "train", "--config", recipe, *flags]


def test_an_optimizer_is_loaded_to_the_cpu_of_a_process(tmp_path):
    """Check loading to cpu:0, the device name that transformers uses where there are several processes."""
    torch.save({"moment": torch.arange(3.0)}, tmp_path / "optimizer.pt")
    for device in ("cpu:0", "cpu:1"):
        found = torch.load(tmp_path / "optimizer.pt", map_location=torch.device(device), weights_only=True)
        assert found["moment"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.slow
@pytest.mark.integration
def test_promise_08_two_processes_resume_to_the_same_bits(write_recipe, run_process, read_metrics, tmp_path):
    recipe = write_recipe(
        **NOISY,
        per_device_train_batch_size=4,
        max_completion_length=8,
        vllm_max_model_length=32,
        vllm_tensor_parallel_size=2,
        save_strategy="steps",
        save_steps=1,
    )
    run_process(launch(recipe), tmp_path / "log", **PATH)
    run = tmp_path / "run"
    whole = {name: (run / "adapter" / name).read_bytes() for name in ("adapter_model.safetensors", "tokenizer.json")}
    records = read_metrics(run)
    for name in ("adapter", "checkpoint-2"):
        shutil.rmtree(run / name)
    run_process(launch(recipe, "--resume_from_checkpoint", "true"), tmp_path / "again", **PATH)
    assert {name: (run / "adapter" / name).read_bytes() for name in whole} == whole
    assert read_metrics(run) == records and records[1]["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(900)
def test_promise_08_two_hosts_train_resume_and_save_as_one(
    write_recipe, start_process, run_process, read_metrics, hold_port, tmp_path
):
    """Check with two launchers that each start one process, as on two hosts with a common folder."""
    recipe = write_recipe(
        **NOISY,
        per_device_train_batch_size=4,
        max_completion_length=8,
        save_strategy="steps",
        save_steps=1,
        log_completions=True,
    )

    def on_two_hosts(*flags):
        rendezvous = ("--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1")
        rendezvous += ("--master_port", str(hold_port()), "--node_rank")
        first, second = (launch(recipe, *flags, processes=(*rendezvous, rank)) for rank in "01")
        other = start_process(second, tmp_path / "second.log", **PATH)
        run_process(first, tmp_path / "first.log", **PATH)
        assert other.wait(PATIENCE) == 0, (tmp_path / "second.log").read_text()[-6000:]

    one, two = tmp_path / "one", tmp_path / "run"
    run_process(launch(recipe, "--output_dir", str(one)), tmp_path / "log", **PATH)
    on_two_hosts()
    for name in ("adapter", "checkpoint-2"):
        shutil.rmtree(two / name)
    on_two_hosts("--resume_from_checkpoint", "true")
    assert read_metrics(two) == read_metrics(one) and read_metrics(two)[1]["grad_norm"] > 0
    names = [{str(file.relative_to(folder)) for file in folder.rglob("*")} for folder in (one, two)]
    assert names[0] == names[1] and "checkpoint-2/rng_state_1.pth" in names[0]
    saved = [(folder / "adapter" / "adapter_model.safetensors").read_bytes() for folder in (one, two)]
    assert saved[0] == saved[1]


@pytest.mark.slow
@pytest.mark.integration
def test_processes_with_one_engine_take_different_numbers_of_turns(
    write_recipe, run_process, read_metrics, make_nvfp4, tmp_path
):
    """Check that a process without calls computes with the other, whose episodes go on."""
    recipe = write_recipe(
        **calling.recipe_keys(make_nvfp4("qwen2"), tmp_path),
        reward_funcs=["digit_rewards.digits"],
        generation_kwargs={"stop_token_ids": calling.ENDS},
        max_tool_calling_iterations=3,
        max_steps=4,
        per_device_train_batch_size=2,
        max_completion_length=40,
        vllm_tensor_parallel_size=2,
        log_completions=True,
    )
    folders = [Path(module.__file__).parent for module in (digit_rewards, calling)]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    run_process(launch(recipe), tmp_path / "log", PYTHONPATH=path)
    records = read_metrics(tmp_path / "run")
    assert max(record["logp_diff_mean"] for record in records) < 0.05
    tables = [pd.read_parquet(file) for file in sorted((tmp_path / "run" / "completions").glob("*.parquet"))]
    turns = [[sum(one["role"] == "assistant" for one in said) for said in table["completion"]] for table in tables]
    assert any(max(of[:2]) != max(of[2:]) for of in turns), turns


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.usefixtures("admin_token")
def test_two_processes_push_to_a_server_once(
    write_recipe, run_process, read_metrics, serve_policy, make_nvfp4, hold_port, tmp_path
):
    port = hold_port()
    serve_policy(make_nvfp4("qwen2"), port, "--max-num-seqs", "1")
    recipe = write_recipe(
        **NOISY,
        num_generations=2,
        per_device_train_batch_size=1,  # one sequence at a time: larger batches round differently
        max_completion_length=8,
    )
    server = ["--vllm_mode", "server", "--vllm_server_base_url", f"http://127.0.0.1:{port}"]
    for name, flags in (("inside", ["--share_weights", "true"]), ("server", server)):
        run_process(launch(recipe, "--output_dir", str(tmp_path / name), *flags), tmp_path / f"{name}.log", **PATH)
    inside, outside = (tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("inside", "server"))
    assert outside.read_bytes() == inside.read_bytes()
    assert read_metrics(tmp_path / "server") == read_metrics(tmp_path / "inside")
    counted = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE).text
    assert 'qerl:swaps_total{kind="swap"} 2.0' in counted.splitlines()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.usefixtures("admin_token")
def test_two_processes_a_rollout_ahead_meet_the_same_prompts(
    write_recipe, run_process, read_metrics, serve_policy, make_nvfp4, hold_port, tmp_path
):
    """Check with a fixed adapter, so that nothing but its age may differ, and that a resumed run ends alike."""
    port = hold_port()
    serve_policy(make_nvfp4("qwen2"), port, "--max-num-seqs", "1")
    recipe = write_recipe(
        reward_funcs=["digit_rewards.digits"],
        learning_rate=0.0,
        max_steps=3,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=8,
        save_strategy="steps",
        save_steps=1,
        vllm_mode="server",
        vllm_server_base_url=f"http://127.0.0.1:{port}",
    )

    def lines(name, *flags):
        run_process(launch(recipe, "--output_dir", str(tmp_path / name), *flags), tmp_path / f"{name}.log", **PATH)
        return read_metrics(tmp_path / name)

    names = ("reward", "loss", "grad_norm", "completion_length", "sampled_entropy", "rewards/digits/mean")
    plain, ahead = lines("plain"), lines("ahead", "--overlap", "1")
    assert [[line[name] for name in names] for line in ahead] == [[line[name] for name in names] for line in plain]
    assert [line["adapter_age"] for line in ahead] == [0, 1, 1]
    shutil.rmtree(tmp_path / "ahead" / "checkpoint-3")
    assert (tmp_path / "ahead" / "checkpoint-2" / "rollout_1.pt").is_file()
    shutil.rmtree(tmp_path / "ahead" / "adapter")
    assert lines("ahead", "--overlap", "1", "--resume_from_checkpoint", "true") == ahead
