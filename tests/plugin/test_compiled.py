"""Test noise and adapter under torch.compile. Compiled code reads their storage, so it sees each change and its
reversal."""

import json
import sys

import pytest
import torch

DRIVER = """
import json, sys
from pathlib import Path


def main(folder, adapter, out, prompts):
    from torch._dynamo.utils import get_compilation_metrics
    from vllm.platforms import current_platform

    # small functions beside the model are not what is tested: the C++ compiler takes 8 s for one of the sampler
    current_platform.simple_compile_backend = "eager"
    from vllm import LLM, SamplingParams

    from qerl_vllm_plugin.policy import Policy

    llm = LLM(
        model=folder, quantization="qerl_nvfp4", dtype="float32", enforce_eager=False, max_model_len=128,
        max_num_seqs=8, num_gpu_blocks_override=64, disable_log_stats=True, seed=0,
        additional_config={"qerl": {"policy_adapter": {"rank": 8}}},
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def answers():
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [
            output.prompt_logprobs[i][ids[i]].logprob
            for ids, output in zip(prompts, outputs)
            for i in range(1, len(ids))
        ]

    policy = Policy(llm)
    found = {"clean": answers()}
    compiled = [(graph.co_filename, graph.co_name) for graph in get_compilation_metrics()]
    assert any("/models/" in file and name == "forward" for file, name in compiled), "the model was not compiled"
    for sigma in (0.05, 0.3, 0.05):
        policy.set_noise(sigma, seed=3, rollout=4)
        found.setdefault("noisy", []).append(answers())
    policy.clear_noise()
    found["cleared"] = answers()
    policy.swap_folder(adapter)
    found["adapter"] = answers()
    policy.swap(None)
    found["removed"] = answers()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4], json.loads(sys.argv[4]))
"""


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_promise_03_compiled_code_sees_each_change(
    make_nvfp4, reference, make_adapter, boot, measure, run_process, tmp_path
):
    from qerl_vllm_plugin.policy import Policy

    folder = make_nvfp4("qwen3", num_hidden_layers=1)  # Dynamo takes long for each layer
    peft_model = make_adapter(reference(folder), target_modules=["q_proj", "v_proj", "o_proj", "up_proj"])[2]
    peft_model.save_pretrained(tmp_path / "adapter")
    script, out = tmp_path / "driver.py", tmp_path / "found.json"
    script.write_text(DRIVER)
    changes = {
        "TORCHDYNAMO_DISABLE": "0",
        "VLLM_CPU_CI_ENV": "1",  # run Dynamo's graphs without the C++ compiler
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    line = [sys.executable, str(script), str(folder), str(tmp_path / "adapter"), str(out), json.dumps(measure.prompts)]
    run_process(line, tmp_path / "log", seconds=500, **changes)
    found = json.loads(out.read_text())
    assert found["cleared"] == found["removed"] == found["clean"]
    assert found["noisy"][0] == found["noisy"][2] != found["noisy"][1]
    eager = boot(folder, dtype="float32")
    assert measure.difference(torch.tensor(found["clean"]), measure.engine(eager)) < 1e-4
    assert measure.difference(torch.tensor(found["adapter"]), measure.hf(peft_model)) < 1e-4
    assert measure.difference(torch.tensor(found["adapter"]), torch.tensor(found["clean"])) > 1e-2
    Policy(eager).set_noise(0.3, seed=3, rollout=4)
    assert measure.difference(torch.tensor(found["noisy"][1]), measure.engine(eager)) < 1e-4
