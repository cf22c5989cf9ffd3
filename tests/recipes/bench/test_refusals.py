"""Test what ``qerl bench`` refuses by name before any process starts, and which scripts ``bench kernels`` runs."""

import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qerl_recipes import cli
from qerl_recipes.machine import processes

TINY = "train --shape tiny --arms bf16,qerl_nvfp4"
GRPO = Path(__file__).parents[3] / "recipes/Qwen2.5-7B-Instruct/grpo"
RECIPE, PAPER = GRPO / "nvfp4_lora.yaml", GRPO / "paper_grpo_nvfp4_lora.yaml"
REFUSALS = (
    ("rollout --shape 8B", "unknown shape '8B'; known: 0.5B"),
    ("rollout --shape 7B", "shape 7B needs a CUDA GPU; on this machine use shape tiny"),
    ("rollout --shape tiny --batch 0", "batch is [0]"),
    ("rollout --shape tiny --batch 1,-2", "batch is [1, -2]"),
    ("rollout --shape tiny --batch a,b", "'--batch': 'a,b' is not whole numbers, comma-separated"),
    ("rollout --shape tiny --rank 16,a", "'--rank': '16,a' is not whole numbers, comma-separated"),
    ("rollout --shape tiny --rank 16,16", "rank is [16, 16]; name each rank once, each at least 1"),
    ("rollout --shape tiny --rank 0", "rank is [0]"),
    ("rollout --shape tiny --rank 16,513", "rank is [16, 513]; vLLM holds at most rank 512"),
    ("rollout --shape tiny --arms bf17", "unknown arm 'bf17'; known: bf16_merged"),
    ("rollout --shape tiny --kv_cache_dtype int4", "unknown kv_cache_dtype 'int4'; known: auto, bfloat16, fp8"),
    ("rollout --shape tiny --repeats 0", "repeats is 0; it is at least 1"),
    ("rollout --shape tiny --tensor-parallel-size 99", "tensor_parallel_size is 99, and this machine has"),
    ('rollout --shape tiny --engine \'{"kv_cache_dtype": "fp8"}\'', "engine names 'kv_cache_dtype', which this"),
    ("rollout --shape tiny --engine async_scheduling=0", "'async_scheduling=0' is not a JSON object"),
    ("rollout --shape tiny --engine [1]", "'[1]' is not a JSON object"),
    ("rollout --shape tiny --interleave --engine '{\"kv_cache_memory_bytes\": 1}'", "engine names 'kv_cache_memory_"),
    ("rollout --shape tiny --interleave --variant 'a={\"gpu_memory_utilization\": 1}'", "variant a names 'gpu_mem"),
    ('rollout --shape tiny --variant \'a={"dtype": "half"}\'', "variant a names 'dtype', which this benchmark sets"),
    ("rollout --shape tiny --variant sync", "'sync' is not NAME=JSON"),
    ("rollout --shape tiny --variant a=0", "'--variant': '0' is not a JSON object"),
    ("rollout --shape tiny --variant a={} --variant a={}", "--variant gives one name twice"),
    ("rollout --shape tiny --variant 'a b={}'", "variant 'a b': a name is of letters"),
    ("rollout --shape tiny --profile", "--profile has gone, and rates alone are measured now"),
    ("rollout --shape tiny --lengths lognormal:9,0.8", "it is lognormal:MEAN,SIGMA,MAX with 1 <= MEAN <= MAX"),
    ("rollout --shape tiny --lengths lognormal:90,0.8,60", "it is lognormal:MEAN,SIGMA,MAX with 1 <= MEAN <= MAX"),
    (
        "rollout --shape tiny --lengths no/file",
        "--lengths no/file: No such file or directory; it is a file or lognormal",
    ),
    ("rollout --shape tiny --lengths LICENSE", "it has a number of tokens in each line or a JSON list"),
    ("swap --shape 8B", "unknown shape '8B'"),
    ("swap --shape 7B", "shape 7B needs a CUDA GPU"),
    ("swap --shape tiny --transport http,pigeon", "['pigeon'] is unknown; it is one of auto, ipc, shared, http"),
    ("swap --shape tiny --transport ipc", "transport ipc needs an NVIDIA GPU"),
    ("swap --shape tiny --rank 0", "'--rank': Input should be greater than or equal to 1"),
    ("soak --minutes 1", "run `python tests/soak` in a clone; it takes the same options"),
    ("kernels --tune --random 3", "choose one"),
    ("kernels --random 0", "--random 0: how many layers and batch sizes to draw; at least 1"),
    ("kernels --random=-3", "at least 1"),
    ("kernels --tune", "the kernels run on Hopper GPUs"),
    ("train --shape 9B", "unknown shape '9B'"),
    ("train --shape tiny-moe --arms nf4", "arm nf4 (bitsandbytes) leaves experts in BF16"),
    ("train --shape tiny --arms bf16,fp8", "unknown arm 'fp8'"),
    ("train --shape tiny-moe --arms trl_stock,fp8_rollout", "arm fp8_rollout merges no adapter of a mixture"),
    ("train --shape tiny --arms bf16,bf16", "name each of them once"),
    ("train --shape tiny --arms bf16,nf4", "arm nf4 (bitsandbytes) needs a CUDA GPU"),
    (f"{TINY} --gpu_memory_gb 80", "a limit of GPU memory needs a CUDA GPU"),
    (f"{TINY} --steps 1", "steps is 1, and must be at least 2; the first step warms up"),
    (f"{TINY} --generations 1", "generations is 1, and must be at least 2"),
    (f"train --config {RECIPE} --groups 4", "--groups is not for --config"),
    (f"train --config {RECIPE} --prompt 513", "--prompt is 513, and max_prompt_length of"),
    (f"train --config {RECIPE} --max_steps 3", "max_steps is not for a flag"),
    (f"train --config {RECIPE} --model_revision old", "model_revision is not for a flag"),
    (f"train --config {PAPER}", "a rollout serves 4 steps, and a step with a rollout is timed"),
    ("train --config nowhere.yaml", "recipe nowhere.yaml cannot be read"),
    (f"{TINY} --part training", "--part is 'training', and whole steps alone are measured now"),
    (f"{TINY} --rank 1024", "'--rank': Input should be less than or equal to 512"),
    (f"{TINY} --lora_r 8", "lora_r is not for a flag"),
    (f"{TINY} fast", "'fast' is neither an option"),
    (f"{TINY} --per_device_train_batch_size 7", "does not divide the 64 completions"),
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("line", "message"), REFUSALS)
def test_is_refused(line: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(processes, "start", fail)
    done = CliRunner().invoke(cli.app, ["bench", *shlex.split(line)])
    assert done.exit_code != 0
    assert message in " ".join((done.output + str(done.exception)).replace("│", " ").split())
