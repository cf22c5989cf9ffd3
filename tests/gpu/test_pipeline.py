"""Test that two pipeline stages answer as one engine does: the base, an adapter, noise, and the base again."""

import json
import sys
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

DRIVER = '''
def answers(folder, stages):
    """Log-probabilities of fixed prompts under each policy in turn, and what every rank holds."""
    import json
    from pathlib import Path

    from vllm import LLM, SamplingParams

    from qerl_recipes.bench import random_model
    from qerl_vllm_plugin.policy import Policy

    llm = LLM(
        folder, quantization="qerl_nvfp4", dtype="bfloat16", gpu_memory_utilization=0.06, kv_cache_memory_bytes=1 << 30,
        max_model_len=256, max_num_seqs=8, enforce_eager=True, disable_log_stats=True, pipeline_parallel_size=stages,
        additional_config={"qerl": {"policy_adapter": {"rank": 16}}},
    )
    config = json.loads(Path(folder, "config.json").read_text())
    prompts = [{"prompt_token_ids": [(13 * i + 7 * row) % 500 + 2 for i in range(60)]} for row in range(4)]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)

    def logprobs():
        # one at a time: in an engine of another process it is chance which requests share a batch, and batches of
        # other sizes round otherwise
        outputs = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
        return [next(iter(place.values())).logprob for output in outputs for place in output.prompt_logprobs[1:]]

    policy = Policy(llm)
    found = {"base": logprobs()}
    policy.swap(*random_model.adapter(config, 16, std=0.05, seed=1))
    found["adapter"] = logprobs()
    policy.set_noise(5e-2, seed=3, rollout=1)
    found["adapter and noise"] = logprobs()
    policy.clear_noise()
    policy.swap(None)
    found["base again"] = logprobs()
    found["stages"] = [rank["stage"] for rank in llm.collective_rpc("qerl_state")]
    return found


if __name__ == "__main__":
    import json, sys

    with open(sys.argv[3], "w") as file:
        json.dump(answers(sys.argv[1], int(sys.argv[2])), file)
'''


def test_two_stages_answer_as_one_engine_does(checkpoints, run_process, record, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("2 GPUs are needed")
    (tmp_path / "driver.py").write_text(DRIVER)
    found: list[dict[str, Any]] = []
    for stages in (1, 2):
        line = [sys.executable, tmp_path / "driver.py", checkpoints[1], str(stages), tmp_path / f"{stages}.json"]
        spawn = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        run_process(line, tmp_path / f"log{stages}", seconds=250, VLLM_ENABLE_V1_MULTIPROCESSING="1", **spawn)
        found.append(json.loads((tmp_path / f"{stages}.json").read_text()))
    one, two = found
    assert len(one.pop("stages")) == 1 and len(set(two.pop("stages"))) == 2
    for answers in found:  # each change of policy must be visible in the answers
        assert answers["base"] == answers["base again"]
        for policy, before in (("adapter", "base"), ("adapter and noise", "adapter")):
            change = (torch.tensor(answers[policy]) - torch.tensor(answers[before])).abs().mean().item()
            assert change > 0.005, f"{policy} changes nothing"
    worst = max((torch.tensor(one[name]) - torch.tensor(two[name])).abs().max().item() for name in one)
    record("two stages of a pipeline to one engine, worst log-probability of base, adapter and noise", f"{worst:.1e}")
    assert worst < 0.01
