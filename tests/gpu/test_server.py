"""Test a real `vllm serve` on a GPU, with its engine in a separate process: swaps, noise and versions over HTTP."""

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path

import pytest
import tomllib
import torch
from policy_requests import TOKEN, kept

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

VERSION = "x-qerl-policy-version"
PROMPTS = [[(11 * i + 5 * j) % 500 + 2 for j in range(20 + 60 * i)] for i in range(4)]
NEW, RANK = 16, 16
OPTIONS = {"qerl": {"policy_adapter": {"rank": 32}}}
SIZES = {"q_proj": (896, 896), "v_proj": (896, 128), "o_proj": (896, 896), "up_proj": (896, 4864)}
SIZES |= {"down_proj": (4864, 896)}


def adapter(seed):
    """Make a LoRA adapter of the tests' model on the GPU in fp32, with its config."""
    generator, tensors = torch.Generator("cuda").manual_seed(seed), {}
    for layer in range(4):
        for module, (K, N) in SIZES.items():
            part = "self_attn" if module in ("q_proj", "v_proj", "o_proj") else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{part}.{module}"
            for half, shape in (("A", (RANK, K)), ("B", (N, RANK))):
                values = torch.randn(shape, generator=generator, device="cuda")
                tensors[f"{prefix}.lora_{half}.weight"] = 0.05 * values
    return tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(SIZES)}


@pytest.fixture
def entry_points_are_found(tmp_path):
    """Return the PYTHONPATH that lets vLLM find the plugin's entry points even where the project is not installed."""
    group = "vllm.endpoint_plugins"
    if any(point.name == "qerl" for point in importlib.metadata.entry_points(group=group)):
        return os.environ.get("PYTHONPATH", "")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "site" / "qerl_vllm-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: qerl-vllm\nVersion: 0\n")
    groups = {name: points for name, points in project["entry-points"].items() if name.startswith("vllm.")}
    lines = [f"[{name}]\n" + "\n".join(f"{k} = {v}" for k, v in points.items()) for name, points in groups.items()]
    (folder / "entry_points.txt").write_text("\n\n".join(lines) + "\n")
    return f"{folder.parent}:{os.environ.get('PYTHONPATH', '')}"


@pytest.fixture
def server(checkpoints, entry_points_are_found, hold_port, tmp_path):
    """Start the server; yield its address and the seconds until it was ready."""
    from qerl_recipes.machine.serve import started

    port, began = hold_port(), time.monotonic()
    # The console script `vllm` calls this function.
    line = [sys.executable, "-c", "from vllm.entrypoints.cli.main import main; main()", "serve", str(checkpoints[1])]
    line += ["--quantization", "qerl_nvfp4", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "base"]
    line += ["--max-model-len", "2048", "--max-num-seqs", "16", "--gpu-memory-utilization", "0.2"]
    line += ["--kv-cache-memory-bytes", str(1 << 30), "--additional-config", json.dumps(OPTIONS)]
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_PLUGINS": "qerl",
        "QERL_ADMIN_TOKEN": TOKEN,
        "PYTHONPATH": entry_points_are_found,
    }
    with started(line, port, tmp_path / "log", environment, seconds=300) as running:
        yield running.url, time.monotonic() - began


def asked(url):
    """Ask the server for greedy tokens after each prompt; return them with the versions that the answers name."""
    import openai

    client, tokens, versions = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60), [], set()
    extra = {"return_token_ids": True, "ignore_eos": True}
    for ids in PROMPTS:
        raw = client.completions.with_raw_response.create(
            model="base", prompt=ids, max_tokens=NEW, temperature=0, extra_body=extra
        )
        tokens.append(tuple(raw.parse().choices[0].token_ids))
        versions.add(raw.headers[VERSION])
    return tokens, versions


def expected(engine, policy):
    """Compute the same tokens with an engine in this process, also one prompt at a time."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    outputs = [engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0] for ids in PROMPTS]
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def agree(found, wanted):
    """Count the equal answers; a near tie may give the other token."""
    return sum(a == b for a, b in zip(found, wanted, strict=True))


def test_a_running_server_takes_adapter_and_noise_and_names_its_versions(server, start_engine, checkpoints, record):
    import threading

    import vllm

    from qerl_vllm_plugin.client import PolicyClient, PolicyRefusedError
    from qerl_vllm_plugin.policy import Policy

    url, ready = server
    small = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 30, "additional_config": OPTIONS}
    engine = start_engine(checkpoints[1], **small)
    inside = Policy(engine)
    client = {name: PolicyClient(url, TOKEN, transport=name) for name in ("http", "ipc")}
    assert client["http"].state()["version"] == 0
    wanted, found = {}, {}
    inside.swap(None)
    wanted["base"], found["base"] = expected(engine, inside), asked(url)[0]
    for version, (transport, seed) in enumerate((("http", 1), ("ipc", 2)), 1):
        tensors, config = adapter(seed)
        assert client[transport].swap(tensors, config) == version
        inside.swap(tensors, config)
        wanted[transport] = expected(engine, inside)
        found[transport], versions = asked(url)
        assert versions == {str(version)}
    noise = {"sigma": 0.05, "seed": 3, "rollout": 4}
    assert client["http"].set_noise(**noise) == 8
    inside.set_noise(**noise)
    wanted["noise"] = expected(engine, inside)
    found["noise"], versions = asked(url)
    assert versions == {"2"}
    client["http"].set_noise(0.0, seed=0, rollout=0)
    found["cleared"], wanted["cleared"] = asked(url)[0], wanted["ipc"]
    assert len({tuple(answers) for answers in wanted.values()}) == 4, "these policies prove nothing"
    equal = {name: agree(found[name], wanted[name]) for name in wanted}
    assert all(count >= len(PROMPTS) - 1 for count in equal.values()), equal

    before = kept(client["http"])
    tensors, config = adapter(3)
    broken = {**tensors, next(iter(tensors)): torch.full((RANK, 896), float("nan"), device="cuda")}
    for sender in client.values():
        with pytest.raises(PolicyRefusedError, match="NaN"):
            sender.swap(broken, config)
    assert kept(client["http"]) == before
    assert asked(url)[0] == found["cleared"]

    # Sending the same version with the same content again is a no-op over either transport.
    for transport, version in (("ipc", 10), ("http", 20)):
        assert client[transport].swap(tensors, config, version=version) == version
        digest = client[transport].state()["hash"]
        assert client[transport].swap(tensors, config, version=version) == version
        assert client[transport].state()["hash"] == digest and len(digest) == 64
        with pytest.raises(PolicyRefusedError, match="is not newer"):
            client[transport].swap(*adapter(4), version=version)

    import openai

    questions, spans = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120), []

    def stream():
        raw = questions.completions.with_raw_response.create(
            model="base", prompt=PROMPTS[0], max_tokens=1500, temperature=1.0, extra_body={"ignore_eos": True}
        )
        assert raw.parse().usage.completion_tokens == 1500
        spans.append(raw.headers[VERSION])

    streams = [threading.Thread(target=stream) for _ in range(8)]
    for one in streams:
        one.start()
    seconds: dict[str, list[float]] = {"http": [], "ipc": []}
    while any(one.is_alive() for one in streams):
        for transport, seed in (("http", 1), ("ipc", 2)):
            content = adapter(seed)
            began = time.perf_counter()
            client[transport].swap(*content)
            seconds[transport].append(time.perf_counter() - began)
        time.sleep(0.05)
    for one in streams:
        one.join()
    assert len(spans) == 8, "a swap must lose nothing"
    assert any("-" in span for span in spans), "no request ran through a swap: this proves nothing"
    swaps = ", ".join(f"{name} {1e3 * sorted(times)[len(times) // 2]:.0f} ms" for name, times in seconds.items())
    record(f"vllm serve {vllm.__version__} with /v1/qerl: ready after", f"{ready:.0f} s")
    record("greedy answers as those of an engine in process, of 4 each", equal)
    record("swap of 4 layers of 0.5B under 8 streams, median of", f"{swaps} ({sum(map(len, seconds.values()))})")
