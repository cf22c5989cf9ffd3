"""Test ``vllm serve`` as users run it: it quantizes a BF16 checkpoint on loading and answers the official client."""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

PROMPTS = [[(11 * i + 5 * j) % 500 + 2 for j in range(30 + 7 * i)] for i in range(4)]
NEW = 12


def packed_bytes(engine: Any) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of the quantized linears, as the engine keeps them."""
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "qerl_prefix")}
    return {
        f"{name}.{leaf}": tensor
        for name, module in layers.items()
        for leaf, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def greedy(engine: Any) -> list[tuple[int, ...]]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def engines(start_engine: Callable[..., Any], checkpoints: tuple[Path, Path]) -> tuple[Any, Any]:
    """Start one engine from the BF16 checkpoint and one from the packed checkpoint."""
    small = {"gpu_memory_utilization": 0.15, "max_model_len": 256, "max_num_seqs": 8}
    return start_engine(checkpoints[0], **small), start_engine(checkpoints[1], **small)


def test_a_bf16_checkpoint_becomes_the_weights_of_its_packed_one(engines: tuple[Any, Any]) -> None:
    online, packed = (packed_bytes(engine) for engine in engines)
    assert online.keys() == packed.keys() and len(online) >= 16
    for name, tensor in packed.items():
        ours, theirs = (t.reshape(-1).view(torch.uint8) for t in (online[name], tensor))
        assert torch.equal(ours, theirs), name
    assert greedy(engines[0]) == greedy(engines[1])


@pytest.fixture
def server(checkpoints: tuple[Path, Path], tmp_path: Path, start_process: Callable[..., Any]) -> Iterator[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The console script `vllm` calls this function.
    line = [sys.executable, "-c", "from vllm.entrypoints.cli.main import main; main()", "serve", str(checkpoints[0])]
    line += ["--quantization", "qerl_nvfp4", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "base"]
    line += ["--max-model-len", "256", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.15"]
    log = tmp_path / "server.log"
    return start_process(line, log, VLLM_ENABLE_V1_MULTIPROCESSING="1"), f"http://127.0.0.1:{port}/v1", log


@pytest.mark.timeout(280)
def test_vllm_serve_answers_as_the_engine_does(
    engines: tuple[Any, Any], server: Any, record: Callable[[str, Any], None]
) -> None:
    import openai

    process, address, log = server
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
    began = time.monotonic()
    while True:
        try:
            client.models.list()
            break
        except openai.APIConnectionError:
            assert process.poll() is None and time.monotonic() < began + 200, log.read_text()[-4000:]
            time.sleep(0.5)
    record("vllm serve of a BF16 checkpoint, quantized on the way in: ready after", f"{time.monotonic() - began:.0f} s")
    extra = {"return_token_ids": True, "ignore_eos": True}
    answers = [
        client.completions.create(model="base", prompt=ids, max_tokens=NEW, temperature=0, extra_body=extra).choices[0]
        for ids in PROMPTS
    ]
    # The engine decodes one request at a time and the server four. Sums then differ in order, so a near tie may give
    # the other token.
    same = sum(tuple(answer.token_ids) == tokens for answer, tokens in zip(answers, greedy(engines[1]), strict=True))
    record("its greedy answers that are the engine's own, token by token", f"{same} of {len(PROMPTS)}")
    assert same >= len(PROMPTS) - 1
