"""Test in one new process that vLLM finds the plugin, and that code that torch compiles sees each change.

Compiled code reads the storage of noise and adapter, so it sees their reversal too.
"""

import ast
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from qerl_recipes.machine import processes

# The first attempts run in forked copies of this process, since vLLM has to find the plugin itself afterwards. The
# fastest attempt counts: a busy machine or a cold disk is not the plugin's fault.
REGISTER = """
import os, sys, time
from vllm.platforms import current_platform

# small functions beside the model are not what is tested: the C++ compiler takes 8 s for one of the sampler
current_platform.simple_compile_backend = "eager"
import vllm.engine.arg_utils
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

for attempt in range(3):
    child = os.fork()
    if child == 0:
        before = set(sys.modules)
        start = time.process_time()
        from qerl_vllm_plugin import register
        register()
        milliseconds = 1e3 * (time.process_time() - start)
        register()
        assert QUANTIZATION_METHODS.count("qerl_nvfp4") == 1
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        assert attempt or get_quantization_config("qerl_nvfp4").__name__ == "QerlConfig"
        print("registered", milliseconds, sorted(new), flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child failed"

assert "qerl_vllm_plugin" not in sys.modules and "qerl_nvfp4" not in QUANTIZATION_METHODS
from vllm.plugins import load_general_plugins
import vllm.v1.worker.worker_base
load_general_plugins()
load_general_plugins()
assert QUANTIZATION_METHODS.count("qerl_nvfp4") == 1
assert callable(vllm.v1.worker.worker_base.WorkerBase.qerl_swap)
print("loaded", flush=True)
"""
CHANGE = """
import json
from pathlib import Path


def main(folder, adapter, out, prompts):
    from torch._dynamo.utils import get_compilation_metrics
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


@pytest.fixture(scope="module")
def driven(make_nvfp4, reference, make_adapter, measure, tmp_path_factory):
    """Run the driver -> the checkpoint, the model with the adapter, the answers found and the lines of its log."""
    place = tmp_path_factory.mktemp("driven")
    folder = make_nvfp4("qwen3", num_hidden_layers=1)  # Dynamo takes long for each layer
    peft_model = make_adapter(reference(folder), target_modules=["q_proj", "v_proj", "o_proj", "up_proj"])[2]
    peft_model.save_pretrained(place / "adapter")
    script, out, log = place / "driver.py", place / "found.json", place / "log"
    script.write_text(REGISTER + CHANGE)
    changes = {
        "TORCHDYNAMO_DISABLE": "0",
        "VLLM_CPU_CI_ENV": "1",  # run Dynamo's graphs without the C++ compiler
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
    }
    line = [sys.executable, str(script), str(folder), str(place / "adapter"), str(out), json.dumps(measure.prompts)]
    assert processes.run(line, log=log, environment=changes) == 0, log.read_text()[-6000:]
    found, lines = json.loads(out.read_text()), log.read_text().splitlines()
    return SimpleNamespace(folder=folder, peft_model=peft_model, found=found, lines=lines)


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_register_takes_under_50_ms_and_vllm_finds_it(driven):
    registered = [line.split(" ", 2)[1:] for line in driven.lines if line.startswith("registered ")]
    assert len(registered) == 3
    assert min(float(milliseconds) for milliseconds, _ in registered) < 50
    for _, packages in registered:
        assert set(ast.literal_eval(packages)) <= {"qerl_vllm_plugin", "qerl_kernels"}
    assert "loaded" in driven.lines


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_promise_03_compiled_code_sees_each_change(driven, boot, measure):
    from qerl_vllm_plugin.policy import Policy

    found = driven.found
    assert found["cleared"] == found["removed"] == found["clean"]
    assert found["noisy"][0] == found["noisy"][2] != found["noisy"][1]
    eager = boot(driven.folder, dtype="float32")
    assert measure.difference(torch.tensor(found["clean"]), measure.engine(eager)) < 1e-4
    assert measure.difference(torch.tensor(found["adapter"]), measure.hf(driven.peft_model)) < 1e-4
    assert measure.difference(torch.tensor(found["adapter"]), torch.tensor(found["clean"])) > 1e-2
    Policy(eager).set_noise(0.3, seed=3, rollout=4)
    assert measure.difference(torch.tensor(found["noisy"][1]), measure.engine(eager)) < 1e-4
