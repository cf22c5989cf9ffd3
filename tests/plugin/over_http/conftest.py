"""Provide one real server with a policy, its clients, and the expected answers of an engine in this process."""

import contextlib
import json

import pytest
from policy_requests import API_KEY, LONG, MODULES, TOKEN
from waiting import PATIENCE

from qerl_vllm_plugin.client import PolicyClient
from qerl_vllm_plugin.policy import Policy


@pytest.fixture(scope="package")
def hf(reference, make_nvfp4):
    return reference(make_nvfp4("qwen2", max_position_embeddings=4096))


@pytest.fixture(scope="package")
def adapters(hf, make_adapter, tmp_path_factory):
    """Save the adapters ``start``, ``second`` and ``third`` under one directory. Return it with their tensors and
    configs by name."""
    parent = tmp_path_factory.mktemp("adapters")
    made = {}
    for seed, name in enumerate(("start", "second", "third")):
        tensors, _, model = make_adapter(hf, seed=seed, target_modules=MODULES, r=4)
        model.save_pretrained(parent / name)
        made[name] = (tensors, json.loads((parent / name / "adapter_config.json").read_text()))
    (parent / "start" / "qerl_state.json").write_text("{}")
    return parent, made


@pytest.fixture(scope="package")
def started_servers():
    """Hold the servers that modules share until the package's end; the newest is the last."""
    with contextlib.ExitStack() as held:
        yield held, []


@pytest.fixture(scope="module")
def server(started_servers, start_server):
    """Return the address, log and process of a server that was started with the adapter ``start``.

    Modules share it. One that follows test_when_it_dies.py gets another, for it killed the one before.
    """
    held, servers = started_servers
    if not servers or servers[-1].process.poll() is not None:
        servers.append(held.enter_context(start_server()))
    return servers[-1].url, servers[-1].log, servers[-1].process


@pytest.fixture(scope="package")
def start_server(make_nvfp4, adapters, hold_port, tmp_path_factory):
    """start_server() returns a context with one more such server."""
    from qerl_recipes.machine.serve import command, started

    folder = tmp_path_factory.mktemp("server")
    (folder / "token").write_text(TOKEN + "\n")
    options = {"policy_adapter": {"rank": 8, "path": str(adapters[0] / "start")}, "policy_folders": str(adapters[0])}
    line = ["--host", "127.0.0.1", "--served-model-name", "policy", "--dtype", "float32"]
    line += ["--max-model-len", "4096", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64", "--enforce-eager"]
    line += [
        "--trust-request-chat-template",
        "--chat-template",
        "{{ messages[0]['content'] }}",
        "--api-key",
        API_KEY,
        "--additional-config",
        json.dumps({"qerl": options}),
    ]
    environment = {
        # The engine process also computes: a separate worker process would add 10 s to every start. Engine and worker
        # would also wait for each other in sched_yield loops, which starve all other processes on some Linux kernels.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "FORK_ENGINES": "1",  # tests/fixtures/processes
        "VLLM_PLUGINS": "qerl",
        "QERL_ADMIN_TOKEN_FILE": str(folder / "token"),
        "VLLM_SERVER_DEV_MODE": "1",  # serves vLLM's own /pause and /resume
    }
    checkpoint = str(make_nvfp4("qwen2", max_position_embeddings=4096))

    def start():
        port = hold_port()
        asked = command(checkpoint, [*line, "--port", str(port)])
        return started(asked, port, folder / f"log-{port}", environment, seconds=500)

    return start


@pytest.fixture(scope="module")
def policy(server):
    return PolicyClient(server[0], TOKEN, API_KEY)


@pytest.fixture(scope="module")
def questions(server):
    import openai

    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, max_retries=0, timeout=PATIENCE)


@pytest.fixture(scope="module")
def expected(boot, make_nvfp4, adapters, measure):
    """expected(name, noise=None) returns the log-probability of 6 greedy tokens after each prompt. An engine in this
    process with that adapter computes them."""
    from vllm import SamplingParams

    options = {
        "additional_config": {"qerl": {"policy_adapter": {"rank": 8}}},
        "dtype": "float32",
        "max_model_len": 1024,
    }
    engine = boot(make_nvfp4("qwen2", max_position_embeddings=4096), **options)
    inside = Policy(engine)

    def ask(name, noise=None):
        inside.swap(*(adapters[1][name] if name else (None, None)))
        inside.set_noise(**noise) if noise else inside.clear_noise()
        sampling = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in (*measure.prompts, LONG)]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return [output.outputs[0].cumulative_logprob for output in outputs]

    return ask
