"""A real OpenAI-compatible server with the plugin, asked by the official client."""

import math
import socket
import time

import pytest

TOLERANCE = 1e-3


@pytest.fixture
def adapter(make_nvfp4, reference, make_adapter, tmp_path):
    peft_model = make_adapter(reference(make_nvfp4("qwen2")), target_modules=["q_proj", "v_proj", "up_proj"])[2]
    peft_model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def server(make_nvfp4, adapter, start_process, tmp_path):
    """The process of a server of "base" and, with the adapter, "tuned"; its address; its log."""
    from qerl_recipes.serve import command

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "base", "--dtype", "float32"]
    options += ["--enable-lora", "--lora-modules", f"tuned={adapter}", "--max-lora-rank", "8", "--enforce-eager"]
    options += ["--max-model-len", "128", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64"]
    log = tmp_path / "server.log"
    process = start_process(command(str(make_nvfp4("qwen2")), options), log, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    return process, f"http://127.0.0.1:{port}/v1", log


def wait_until_ready(client, process, log) -> None:
    import openai

    deadline = time.monotonic() + 280
    while time.monotonic() < deadline:
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            assert process.poll() is None, log.read_text()[-6000:]
            time.sleep(0.2)
    raise AssertionError(f"the server did not answer: {log.read_text()[-6000:]}")


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_server_answers_like_the_engine_for_base_and_adapter(make_nvfp4, adapter, server, boot, lora_options, measure):
    import openai
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    process, address, log = server
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
    wait_until_ready(client, process, log)
    assert {model.id for model in client.models.list()} == {"base", "tuned"}
    answers = {
        (name, i): client.completions.create(
            model=name,
            prompt=ids,
            max_tokens=6,
            temperature=0.0,
            logprobs=1,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ).choices[0]
        for name in ("base", "tuned")
        for i, ids in enumerate(measure.prompts)
    }
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt=[1, 2], max_tokens=1)
    engine = boot(make_nvfp4("qwen2"), **lora_options)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, ignore_eos=True)
    inputs = [{"prompt_token_ids": ids} for ids in measure.prompts]
    scores = {}
    for name, request in (("base", None), ("tuned", LoRARequest("tuned", 1, str(adapter)))):
        outputs = engine.generate(inputs, sampling, use_tqdm=False, lora_request=request)
        for i, output in enumerate(outputs):
            expected, answer = output.outputs[0], answers[name, i]
            assert answer.token_ids == list(expected.token_ids)
            scores[name, i] = sum(answer.logprobs.token_logprobs)
            assert math.isclose(scores[name, i], expected.cumulative_logprob, abs_tol=TOLERANCE)
    changed = [i for i in range(len(inputs)) if abs(scores["base", i] - scores["tuned", i]) > 10 * TOLERANCE]
    assert changed, "the adapter must change the answers"
