"""Test ``vllm serve`` as users run it: it quantizes a BF16 checkpoint on loading and answers the official client."""

import sys
import time

import pytest
import torch

pytestmark = pytest.mark.gpu

PROMPTS = [[(11 * i + 5 * j) % 500 + 2 for j in range(30 + 7 * i)] for i in range(4)]
NEW = 12


def packed_bytes(engine):
    """Return all parameters and buffers of the quantized linears, as the engine keeps them."""
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "qerl_prefix")}
    return {
        f"{name}.{leaf}": tensor
        for name, module in layers.items()
        for leaf, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def greedy(engine):
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def engines(start_engine, checkpoints):
    """Start one engine from the BF16 checkpoint and one from the packed checkpoint."""
    small = {"gpu_memory_utilization": 0.15, "max_model_len": 256, "max_num_seqs": 8}
    return start_engine(checkpoints[0], **small), start_engine(checkpoints[1], **small)


def test_a_bf16_checkpoint_becomes_the_weights_of_its_packed_one(engines):
    online, packed = (packed_bytes(engine) for engine in engines)
    assert online.keys() == packed.keys() and len(online) >= 16
    for name, tensor in packed.items():
        ours, theirs = (t.reshape(-1).view(torch.uint8) for t in (online[name], tensor))
        assert torch.equal(ours, theirs), name
    assert greedy(engines[0]) == greedy(engines[1])


@pytest.mark.timeout(280)
def test_vllm_serve_answers_as_the_engine_does(engines, checkpoints, hold_port, record, tmp_path):
    import openai

    from qerl_recipes.machine.serve import started

    port, began = hold_port(), time.monotonic()
    # The console script `vllm` calls this function.
    line = [sys.executable, "-c", "from vllm.entrypoints.cli.main import main; main()", "serve", str(checkpoints[0])]
    line += ["--quantization", "qerl_nvfp4", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "base"]
    line += ["--max-model-len", "256", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.15"]
    with started(line, port, tmp_path / "log", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, seconds=200) as server:
        took = time.monotonic() - began
        record("vllm serve of a BF16 checkpoint, quantized on the way in: ready after", f"{took:.0f} s")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        asked = {"model": "base", "max_tokens": NEW, "temperature": 0}
        asked["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
        answers = [client.completions.create(prompt=ids, **asked).choices[0] for ids in PROMPTS]
    # The engine decodes one request at a time and the server four. Sums then differ in order, so a near tie may give
    # the other token.
    same = sum(tuple(answer.token_ids) == tokens for answer, tokens in zip(answers, greedy(engines[1]), strict=True))
    record("its greedy answers that are the engine's own, token by token", f"{same} of {len(PROMPTS)}")
    assert same >= len(PROMPTS) - 1
