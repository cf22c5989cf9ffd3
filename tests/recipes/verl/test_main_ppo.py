"""Run verl's own program on a CPU with the keys of verl.md: two ranks of its trainer, and engines of one and
two ranks.
"""

import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580), pytest.mark.usefixtures("verl_on_a_cpu")]

REPOSITORY = Path(__file__).parents[3]
ON_A_CPU = {
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
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


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_three_steps_of_main_ppo(run_process, tmp_path, tensor_parallel):
    import verl_run

    verl_run.write(tmp_path, "cpu", num_attention_heads=2, num_key_value_heads=2, **SIZES)
    fixtures = REPOSITORY / "tests" / "fixtures" / "verl"
    path = [str(fixtures), str(REPOSITORY), str(REPOSITORY / "kernels"), os.environ.get("PYTHONPATH", "")]
    line = verl_run.command(
        tmp_path,
        gpus=2,
        tensor_parallel=tensor_parallel,
        prompts=4,
        length=16,
        extra=(*KEYS, "+ray_kwargs.ray_init.num_gpus=2"),
    )
    run_process(line, tmp_path / "log", seconds=560, **ON_A_CPU, PYTHONPATH=os.pathsep.join(path))
    verl_run.check(*verl_run.events(tmp_path / "log"), engines=2 // tensor_parallel)
