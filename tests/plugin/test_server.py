"""Test a real OpenAI-compatible server with the plugin, through the official client."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

TOLERANCE = 1e-3
NOISE = [0.3, 1, 1, ["input_layernorm", "post_attention_layernorm"]]
NO_NOISE = [0.0, 0, 0, []]


@pytest.fixture
def adapter(make_nvfp4, reference, make_adapter, tmp_path):
    peft_model = make_adapter(reference(make_nvfp4("qwen2")), target_modules=["q_proj", "v_proj", "up_proj"])[2]
    peft_model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def start_server(make_nvfp4, start_process, hold_port, tmp_path):
    """start_server(*options) returns a client of a ready server of "base" with vLLM's development endpoints."""
    import openai

    from qerl_recipes.machine.serve import command

    def start(*options):
        port = hold_port()
        line = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "base", "--dtype", "float32"]
        line += ["--max-model-len", "128", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64", "--enforce-eager"]
        log = tmp_path / "server.log"
        process = start_process(
            command(str(make_nvfp4("qwen2")), [*line, *options]),
            log,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            FORK_ENGINES="1",  # tests/fixtures/processes
            VLLM_SERVER_DEV_MODE="1",
            VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        )
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        deadline = time.monotonic() + 500
        while time.monotonic() < deadline:
            try:
                client.models.list()
                return client
            except openai.APIConnectionError:
                assert process.poll() is None, log.read_text()[-6000:]
                time.sleep(0.2)
        raise AssertionError(f"the server did not answer: {log.read_text()[-6000:]}")

    return start


def ask(client, name, ids):
    return client.completions.create(
        model=name,
        prompt=ids,
        max_tokens=6,
        temperature=0.0,
        logprobs=1,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ).choices[0]


def set_noise(client, args, **keywords) -> dict[str, object]:
    """Ask vLLM's development endpoint for noise and return the answer of the server's one worker."""
    body = {"method": "qerl_set_noise", "args": args, "kwargs": keywords}
    (result,) = client.post(str(client.base_url.join("/collective_rpc")), cast_to=object, body=body)["results"]
    return result


def assert_noise_needs_the_callers_word(client, answers, prompts) -> None:
    """Check that a server of two names refuses noise and answers as before. The control shows why: with the caller's
    word, noise changes the answers under the base's own name."""

    def changed() -> set[str]:
        again = {(name, i): ask(client, name, prompts[i]) for name, i in answers}
        return {name for name, i in answers if again[name, i].logprobs != answers[name, i].logprobs}

    error = set_noise(client, NOISE)["error"]
    for part in ("noise of sigma 0.3", "the base's own name", "policy_adapter", "every_request_names_the_policy"):
        assert part in error
    assert changed() == set()
    assert set_noise(client, NOISE, every_request_names_the_policy=True)["noisy_norms"] == 4
    assert changed() == {"base", "tuned"}
    assert "error" not in set_noise(client, NO_NOISE)
    assert changed() == set()


PAGE = (Path(__file__).parents[2] / "qerl_vllm_plugin" / "README.md").read_text()


def page_options() -> list[str]:
    """Return the options that the page gives a server with LoRA slots."""
    (line,) = re.findall(r"^VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE (.*)$", PAGE, flags=re.M)
    options = shlex.split(line)
    assert options[:3] == ["--quantization", "qerl_nvfp4", "--enable-lora"]
    return options


def assert_versions_come_and_go(client, adapter, scores, prompts) -> None:
    """Load each version under a new name and unload the previous one, as TRL's AsyncGRPO and prime-rl do."""
    import openai

    def post(path, **body):
        return client.post(str(client.base_url.join(path)), cast_to=str, body=body)

    for version in (1, 2):
        post("load_lora_adapter", lora_name=f"policy-{version}", lora_path=str(adapter))
        found = [sum(ask(client, f"policy-{version}", ids).logprobs.token_logprobs) for ids in prompts]
        assert found == pytest.approx([scores["tuned", i] for i in range(len(prompts))], abs=TOLERANCE)
        if version > 1:
            post("unload_lora_adapter", lora_name=f"policy-{version - 1}")
    with pytest.raises(openai.NotFoundError):
        ask(client, "policy-1", prompts[0])
    if shutil.which("curl") is not None:  # the page's curl command
        (line,) = re.findall(r"^curl .*load_lora_adapter.*$", PAGE, flags=re.M)
        assert "/RUNS/7" in line
        environment = {**os.environ, "URL": str(client.base_url).removesuffix("/v1/")}
        line = line.replace("/RUNS/7", str(adapter))
        subprocess.run(["bash", "-c", line], env=environment, check=True, timeout=60)
        assert "policy-7" in {model.id for model in client.models.list()}


# test_one_policy.py has the same promise without a server
@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_promise_10_a_server_with_slots_refuses_noise_for_all(
    make_nvfp4, adapter, start_server, boot, carriers, measure
):
    import openai
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    client = start_server(*page_options(), "--lora-modules", f"tuned={adapter}")
    assert {model.id for model in client.models.list()} == {"base", "tuned"}
    answers = {(name, i): ask(client, name, ids) for name in ("base", "tuned") for i, ids in enumerate(measure.prompts)}
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt=[1, 2], max_tokens=1)
    assert_noise_needs_the_callers_word(client, answers, measure.prompts)
    engine = boot(make_nvfp4("qwen2"), **carriers["lora"])
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
    assert_versions_come_and_go(client, adapter, scores, measure.prompts)
    changed = [i for i in range(len(inputs)) if abs(scores["base", i] - scores["tuned", i]) > 10 * TOLERANCE]
    assert changed, "the adapter must change the answers"


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_promise_10_a_resident_adapter_has_one_name(start_server, measure):
    import openai

    client = start_server("--additional-config", json.dumps({"qerl": {"policy_adapter": {"rank": 8}}}))
    assert [model.id for model in client.models.list()] == ["base"]
    clean = ask(client, "base", measure.prompts[0])
    assert set_noise(client, NOISE)["noisy_norms"] == 4
    assert ask(client, "base", measure.prompts[0]).logprobs != clean.logprobs
    for another in ("tuned", "policy"):
        with pytest.raises(openai.NotFoundError):
            ask(client, another, measure.prompts[0])
    assert "error" not in set_noise(client, NO_NOISE)
    assert ask(client, "base", measure.prompts[0]).logprobs == clean.logprobs
