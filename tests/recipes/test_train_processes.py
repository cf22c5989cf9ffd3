import json
import socket
import sys

import pytest
import yaml


@pytest.mark.integration
def test_two_processes_with_one_tensor_parallel_engine_train_one_policy(make_nvfp4, run_process, tmp_path):
    """Plain data parallelism in the trainer, tensor parallelism in the engine, noise and resampling agreed by all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    recipe = {
        "model_name_or_path": str(make_nvfp4("qwen2")),
        "output_dir": str(tmp_path / "run"),
        "noise_mode": "shared",
        "sigma_start": 0.1,
        "num_stages": 1,
        "dynamic_sampling": True,
        "lora_r": 4,
        "lora_target_modules": ["all-linear"],
        "dataset_name": "running_sum",
        "dataset_size": 16,
        "reward_funcs": ["running_sum_format"],  # a random model never earns it: every group is resampled
        "learning_rate": 1e-2,
        "max_steps": 2,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "vllm_max_model_length": 32,
        "vllm_tensor_parallel_size": 2,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 2,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    command += ["-m", "qerl_recipes.cli", "train", "--config", str(tmp_path / "recipe.yaml")]
    run_process(command, tmp_path / "log")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(r["sigma"], r["adapter_version"], r["touched_norms"]) for r in records] == [(0, 1, 0), (0.1, 2, 4)]
    assert all(record["logp_mismatch_mean"] < 0.05 for record in records)
    assert all(record["dropped_groups"] == 2 and record["sampling_rounds"] == 3 for record in records)
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "qerl_state.json").read_text())
    assert state["stream"] == 2 * 3 * 2  # steps, rounds, groups over both processes
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= state["files"].keys()
