"""Run verl's own program with the keys of verl.md on one GPU and on two; its engines sleep while its trainer works."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(580),
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None or importlib.util.find_spec("trl") is not None,
        reason="verl is needed, and no TRL of these years, which verl cannot import",
    ),
]

REPOSITORY = Path(__file__).parents[2]
SIZES = {  # Qwen2.5-0.5B's sizes, except for depth and vocabulary
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32768,
}
KEYS = (
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,8,32,64]",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=2000000000",
)


@pytest.mark.parametrize(("gpus", "tensor_parallel"), [(1, 1), (2, 1), (2, 2)])
def test_three_steps_of_main_ppo(run_process, record, tmp_path, monkeypatch, gpus, tensor_parallel):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are needed")
    fixtures = str(REPOSITORY / "tests" / "fixtures" / "verl")
    monkeypatch.syspath_prepend(fixtures)
    import verl_run

    verl_run.write(tmp_path, "cuda", **SIZES)
    path = [fixtures, str(REPOSITORY), str(REPOSITORY / "kernels"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)  # verl starts a process for each engine
    line = verl_run.command(tmp_path, gpus=gpus, tensor_parallel=tensor_parallel, prompts=16, length=96, extra=KEYS)
    run_process(line, tmp_path / "log", seconds=560, HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join(path))
    batches, differences = verl_run.events(tmp_path / "log")
    verl_run.check(batches, differences, engines=gpus // tensor_parallel)
    what = f"verl, {gpus} ranks, tensor parallel {tensor_parallel}: mean difference of log-probabilities by step"
    record(what, ", ".join(f"{difference:.4f}" for difference in differences))
