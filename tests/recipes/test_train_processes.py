import json
import socket
import sys

import pytest


@pytest.mark.integration
def test_two_processes_with_one_tensor_parallel_engine_train_one_policy(write_recipe, run_process, tmp_path):
    """Plain data parallelism in the trainer, tensor parallelism in the engine, noise and resampling agreed by all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    recipe = write_recipe(
        noise_mode="shared",
        sigma_start=0.1,
        num_stages=1,
        dynamic_sampling=True,  # a random model never earns its reward: every group is resampled
        max_steps=2,
        per_device_train_batch_size=4,
        max_completion_length=8,
        vllm_max_model_length=32,
        vllm_tensor_parallel_size=2,
        save_strategy="steps",
        save_steps=2,
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    command += ["-m", "qerl_recipes.cli", "train", "--config", recipe]
    run_process(command, tmp_path / "log")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(r["sigma"], r["adapter_version"], r["touched_norms"]) for r in records] == [(0, 1, 0), (0.1, 2, 4)]
    assert all(record["logp_mismatch_mean"] < 0.05 for record in records)
    assert all(record["dropped_groups"] == 2 and record["sampling_rounds"] == 3 for record in records)
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "qerl_state.json").read_text())
    assert state["stream"] == 2 * 3 * 2  # steps, rounds, groups over both processes
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= state["files"].keys()
