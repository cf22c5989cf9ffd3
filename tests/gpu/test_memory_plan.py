"""Compare the planned memory of a run with what a GRPO step takes on a GPU when every sequence has full length."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

RECIPE = Path(__file__).parents[2] / "recipes/demo/grpo/nvfp4_lora.yaml"
SCRIPT = """
import json, sys
from qerl_recipes.machine.environment import prepare
prepare()
import torch
from qerl_recipes.machine.gpu import this_gpu
from qerl_recipes.train import preflight, run as train
from qerl_recipes.recipe.configs import parse
from qerl_recipes.memory.table import explained
LIMIT = sys.argv.pop(1) == "limited"
settings = parse(sys.argv[1:])
run = preflight.settle(preflight.check(*settings, this_gpu()))
plan, trainer = run.plan, train.build(run)
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
if LIMIT:  # room for weights and cache, and little more
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 300_000_000) / total)
with explained(plan, settings[1].output_dir, trainer):
    trainer.train()
coming_and_going = torch.cuda.max_memory_allocated() - before
free, total = torch.cuda.mem_get_info()
parts = {part.name: [part.rollout, part.training] for part in plan.parts}
print(json.dumps({"parts": parts, "before": before, "more": coming_and_going, "used": total - free}))
trainer.vllm_generation.close()
"""
PROMPT, COMPLETION = 32, 1008  # two groups of 8 fill one packed row of 16384 tokens, as the plan assumes
LAYERS = 4  # of the random model
HELD = ("engine's weights", "engine's adapter", "trainer's weights", "KV cache", "CUDA graphs", "trained adapter")
COMING_AND_GOING = ("gradients", "optimizer", "activations", "at work")


def step(base, arm, checkpointing, output, limit="unlimited"):
    """Run one GRPO step of 16 completions of full length in a separate process.

    With ``checkpointing`` "true" all blocks are recomputed, not only as many as the plan would choose.
    """
    overrides = {
        "model_name_or_path": base,
        "quantization": arm,
        "use_cpu": "false",
        "bf16": "true",
        "gradient_checkpointing": checkpointing,
        "max_steps": 1,
        "per_device_train_batch_size": 16,
        "skip_zero_advantage": "false",  # random weights earn no reward, so every group would be skipped
        "max_prompt_length": PROMPT,
        "max_completion_length": COMPLETION,
        "vllm_max_model_length": PROMPT + COMPLETION,
        "generation_kwargs": json.dumps({"ignore_eos": True, "min_tokens": COMPLETION}),
        "vllm_gpu_memory_utilization": 0.1,
        "save_strategy": "no",
        "output_dir": output,
    }
    if checkpointing == "true":
        overrides["recompute_layers"] = LAYERS
    flags = [part for key, value in overrides.items() for part in (f"--{key}", str(value))]
    line = [sys.executable, "-c", SCRIPT, limit, "--config", str(RECIPE), *flags]
    return subprocess.run(line, capture_output=True, text=True, env=os.environ, timeout=280)


@pytest.mark.parametrize("checkpointing", ["true", "false"])
@pytest.mark.parametrize("arm", ["qerl_nvfp4", "bf16"])
def test_a_step_takes_what_was_planned(arm, checkpointing, checkpoints, tmp_path, record):
    done = step(checkpoints[arm == "qerl_nvfp4"], arm, checkpointing, tmp_path / "run")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    result = json.loads(next(row for row in done.stdout.splitlines() if row.startswith('{"parts"')))
    parts = result["parts"]
    held = sum(parts[name][0] for name in HELD)
    more = sum(parts[name][1] for name in COMING_AND_GOING)
    more += parts["trained adapter"][1] - parts["trained adapter"][0]
    what = f"memory of a GRPO step, {arm}, gradient checkpointing {checkpointing}"
    record(f"{what}: planned / measured, GB", f"{more / 1e9:.2f} / {result['more'] / 1e9:.2f}")
    total = max(sum(both[phase] for both in parts.values()) for phase in (0, 1))
    record(f"{what}: whole GPU planned / in use at the end, GB", f"{total / 1e9:.2f} / {result['used'] / 1e9:.2f}")
    assert result["before"] == pytest.approx(held, rel=0.05)
    assert 0.6 < result["more"] / more < 1.05


def test_running_out_in_training_is_explained(checkpoints, tmp_path):
    done = step(checkpoints[1], "qerl_nvfp4", "true", tmp_path / "run", limit="limited")
    assert done.returncode
    assert "out of memory in training, after step 0" in done.stderr
    assert f"to need less: pack_tokens: {PROMPT + COMPLETION} (at work, " in done.stderr
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
