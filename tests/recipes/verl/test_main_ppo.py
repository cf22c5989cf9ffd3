"""Run verl's own program on a CPU with the keys of verl.md: two ranks of its trainer, and engines of one and
two ranks.
"""

import json
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580), pytest.mark.usefixtures("verl_on_a_cpu")]

REPOSITORY = Path(__file__).parents[3]
ON_A_CPU = {
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # by default Ray's processes give way to all others of the machine
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
KEYS = (
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.free_cache_engine=false",
    "+actor_rollout_ref.rollout.enable_sleep_mode=false",
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}


@pytest.fixture
def run(run_process, tmp_path):
    """Return run(length, tensor_parallel, extra, gpus, **environment), which trains three steps and checks them."""
    import verl_run

    def train(length, tensor_parallel, extra=(), gpus=2, **environment):
        verl_run.write(tmp_path, "cpu", num_attention_heads=2, num_key_value_heads=2, **SIZES)
        fixtures = REPOSITORY / "tests" / "fixtures" / "verl"
        path = [str(fixtures), str(REPOSITORY), str(REPOSITORY / "kernels"), os.environ.get("PYTHONPATH", "")]
        environment = {**ON_A_CPU, **environment, "PYTHONPATH": os.pathsep.join(path)}
        extra = (*KEYS, f"+ray_kwargs.ray_init.num_gpus={gpus}", *extra)
        sizes = {"gpus": gpus, "tensor_parallel": tensor_parallel, "prompts": 4, "length": length}
        run_process(verl_run.command(tmp_path, **sizes, extra=extra), tmp_path / "log", seconds=560, **environment)
        verl_run.check(*verl_run.events(tmp_path / "log"), engines=gpus // tensor_parallel)

    return train


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_three_steps_of_main_ppo(run, tensor_parallel):
    run(16, tensor_parallel)


def test_episodes_with_a_tool_keep_the_policy_of_their_step(run, tmp_path):
    """Check verl's own loop with tools: ``run`` checks noise, adapters and the mismatch of sampled tokens."""
    import verl_turns

    run(48, 1, verl_turns.keys(tmp_path, turns=3), gpus=1, VERL_TURNS=str(tmp_path / "turns"))
    played = [json.loads(line) for line in (tmp_path / "turns").read_text().splitlines()]
    assert all(len({*one["versions"], one["noted"]}) == 1 for one in played), "one policy an episode"
    assert {one["noted"] for one in played} == {1, 2, 3, 4}
    several = [one for one in played if len(one["versions"]) == 3]
    assert len(several) > len(played) / 2 and all(one["read"] == 6 for one in several if one["sampled"] < 42)
