"""The policy over HTTP: one real server for all of it, the official client for the questions, hostile requests too."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
import warnings
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save

from qerl_vllm_plugin import cuda_ipc, gpu_tensors, shared_file
from qerl_vllm_plugin.adapter import AdapterError
from qerl_vllm_plugin.client import AsyncPolicyClient, PolicyClient, PolicyRefusedError, body
from qerl_vllm_plugin.config import Options
from qerl_vllm_plugin.gpu_tensors import MEDIA_TYPE
from qerl_vllm_plugin.policy import Policy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
TOKEN, API_KEY = "an-admin-token-of-32-characters!", "an-api-key"
TOLERANCE = 1e-3
MODULES = ["q_proj", "v_proj", "up_proj", "down_proj"]
VERSION = "x-qerl-policy-version"
LONG = [(7 * i) % 60 + 2 for i in range(300)]  # two blocks of the prefix cache, which a swap must empty


@pytest.fixture(scope="module")
def hf(reference, make_nvfp4):
    return reference(make_nvfp4("qwen2", max_position_embeddings=4096))


@pytest.fixture(scope="module")
def adapters(hf, make_adapter, tmp_path_factory):
    """Folders ``start``, ``second`` and ``third`` under one directory; their tensors and configs by name."""
    parent = tmp_path_factory.mktemp("adapters")
    made = {}
    for seed, name in enumerate(("start", "second", "third")):
        tensors, _, model = make_adapter(hf, seed=seed, target_modules=MODULES, r=4)
        model.save_pretrained(parent / name)
        made[name] = (tensors, json.loads((parent / name / "adapter_config.json").read_text()))
    (parent / "start" / "qerl_state.json").write_text("{}")
    return parent, made


@pytest.fixture(scope="module")
def server(make_nvfp4, adapters, hold_port, tmp_path_factory):
    """The address of a server that has been started with the adapter ``start``; its log, and its process."""
    from qerl_recipes.machine.serve import command
    from qerl_recipes.machine.server_process import started

    port, folder = hold_port(), tmp_path_factory.mktemp("server")
    (folder / "token").write_text(TOKEN + "\n")
    options = {"policy_adapter": {"rank": 8, "path": str(adapters[0] / "start")}, "policy_folders": str(adapters[0])}
    line = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy", "--dtype", "float32"]
    line += ["--max-model-len", "4096", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64", "--enforce-eager"]
    line += ["--api-key", API_KEY, "--additional-config", json.dumps({"qerl": options})]
    environment = {
        # the engine's process computes too: a worker process beside it would cost every start 10 s, and engine and
        # worker wait for each other in loops of sched_yield, which starve all other processes on some Linux kernels
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "qerl",
        "QERL_ADMIN_TOKEN_FILE": str(folder / "token"),
    }
    line = command(str(make_nvfp4("qwen2", max_position_embeddings=4096)), line)
    with started(line, port, folder / "log", environment) as running:
        yield running.url, running.log, running.process


@pytest.fixture(scope="module")
def policy(server):
    return PolicyClient(server[0], TOKEN, API_KEY)


@pytest.fixture(scope="module")
def questions(server):
    import openai

    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def expected(boot, make_nvfp4, adapters, measure):
    """expected(name, noise=None) -> log-probability of 6 greedy tokens after each prompt, of an engine in this process
    with that adapter."""
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


def kept(policy):
    """What a refusal must leave as it was: the state, but for what is counted."""
    return {key: value for key, value in policy.state().items() if key != "counters"}


def ask(questions, prompts):
    """The same from the server, and the versions that its answers name."""
    scores, versions = [], []
    for ids in prompts:
        raw = questions.completions.with_raw_response.create(
            model="policy", prompt=ids, max_tokens=6, temperature=0.0, logprobs=1, extra_body={"ignore_eos": True}
        )
        scores.append(sum(raw.parse().choices[0].logprobs.token_logprobs))
        versions.append(raw.headers[VERSION])
    return scores, versions


def assert_served(questions, measure, scores, version):
    found, versions = ask(questions, [*measure.prompts, LONG])
    assert found == pytest.approx(scores, abs=TOLERANCE)
    assert versions == [str(version)] * len(versions)


def put(server, content, headers=None, **query):
    headers = {"X-QeRL-Admin-Token": TOKEN, "Authorization": f"Bearer {API_KEY}"} if headers is None else headers
    return httpx.put(f"{server[0]}/v1/qerl/policy", content=content, params=query, headers=headers, timeout=30)


def test_the_adapter_named_at_start_is_served_and_swaps_noise_and_removal_are_what_an_engine_in_process_answers(
    policy, questions, expected, adapters, measure
):
    distinct = {name: expected(name) for name in ("start", "second", None)}
    assert len({round(scores[0], 2) for scores in distinct.values()}) == 3, "these adapters prove nothing"
    state = policy.state()
    assert (state["version"], state["noise"]["sigma"], state["max_rank"]) == (1, 0.0, 8)
    assert len(state["hash"]) == len(state["base_hash"]) == 64
    assert_served(questions, measure, distinct["start"], 1)
    assert policy.swap(*adapters[1]["second"]) == 2
    assert_served(questions, measure, distinct["second"], 2)
    noise = {"sigma": 0.1, "seed": 3, "rollout": 4}
    assert policy.set_noise(**noise) == 4
    assert policy.state()["noise"] == {**noise, "targets": ["input_layernorm", "post_attention_layernorm"]}
    assert_served(questions, measure, expected("second", noise), 2)
    assert policy.set_noise(0.0, seed=0, rollout=0) == 0
    assert_served(questions, measure, distinct["second"], 2)
    assert policy.swap(None) == 3
    assert_served(questions, measure, distinct[None], 3)


def test_a_folder_under_the_directory_is_installed_by_its_name_and_no_other(
    server, policy, questions, expected, measure
):
    version = policy.state()["version"] + 5
    assert put(server, b"", folder="third", version=version).json()["version"] == version
    assert_served(questions, measure, expected("third"), version)
    for name in ("fourth", "../adapters", "..", ".", "third/../../x", "/etc", ""):
        assert put(server, b"", folder=name).status_code == 404, name
    assert policy.state()["version"] == version


def test_a_folder_of_the_clients_machine_is_sent_unless_it_is_of_another_base(
    server, policy, questions, expected, adapters, measure, tmp_path
):
    swappers = (
        policy.swap_folder,
        lambda *a: asyncio.run(AsyncPolicyClient(server[0], TOKEN, API_KEY).swap_folder(*a)),
    )
    for swap, name in zip(swappers, ("third", "second"), strict=True):
        assert_served(questions, measure, expected(name), swap(adapters[0] / name))
        folder = shutil.copytree(adapters[0] / name, tmp_path / name)
        state, own = folder / "qerl_state.json", policy.state()["base_hash"]
        for base_hash, is_refused in ((own, False), ("0" * 64, True)):
            state.write_text(json.dumps({"base": "another", "base_hash": base_hash}))
            before = kept(policy)
            if is_refused:
                with pytest.raises(AdapterError, match=f"{name} was trained on another base than the server's"):
                    swap(folder)
                assert kept(policy) == before
            else:
                assert swap(folder) == before["version"] + 1


def test_swaps_are_ordered_and_a_repeated_one_changes_nothing(server, policy, adapters):
    version, hashes = policy.state()["version"], {}
    for name in ("second", "third"):
        version += 1
        assert put(server, body(*adapters[1][name]), version=version).status_code == 200
        hashes[name] = policy.state()["hash"]
    again = put(server, body(*adapters[1]["third"]), version=version)
    assert (again.status_code, again.json()) == (200, {"version": version, "unchanged": True})
    for content, given in ((adapters[1]["second"], version), (adapters[1]["second"], version - 1)):
        refused = put(server, body(*content), version=given)
        assert refused.status_code == 409
        assert f"version {given} is not newer than {version}" in refused.json()["error"]
    assert policy.state()["version"] == version
    assert policy.state()["hash"] == hashes["third"] != hashes["second"]


def test_requests_run_on_through_swaps_and_each_says_which_versions_computed_it(server, policy, adapters):
    first = policy.state()["version"]

    async def load():
        import openai

        questions = openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, max_retries=0, timeout=120)
        pusher = AsyncPolicyClient(server[0], TOKEN, API_KEY)

        async def one(i):
            raw = await questions.completions.with_raw_response.create(
                model="policy", prompt=[3 + i, 4, 5], max_tokens=1000, temperature=1.0, extra_body={"ignore_eos": True}
            )
            return raw.parse().usage.completion_tokens, raw.headers[VERSION]

        running = [asyncio.create_task(one(i)) for i in range(6)]
        swaps = 0
        while not all(task.done() for task in running):  # however long a busy machine takes to start them
            await asyncio.sleep(0.1)
            await pusher.swap(*adapters[1]["third" if swaps % 2 else "second"], requests="keep")
            swaps += 1
        return await asyncio.gather(*running), swaps, (await pusher.state())["version"]

    answers, swaps, last = asyncio.run(load())
    assert last == first + swaps
    assert [tokens for tokens, _ in answers] == [1000] * 6, "a swap must lose nothing"
    spans = [tuple(map(int, version.split("-"))) for _, version in answers]
    assert all(first <= span[0] <= span[-1] <= last for span in spans)
    assert any(len(span) == 2 for span in spans), "no request ran through a swap: this test proves nothing"


def test_an_answer_of_several_sequences_names_the_policy_of_the_first_of_them(server, policy, adapters):
    """Twice as many as the engine takes at a time: the second half begins under another policy than the first."""
    first = policy.state()["version"]

    async def load():
        import openai

        questions = openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, max_retries=0, timeout=120)
        pusher = AsyncPolicyClient(server[0], TOKEN, API_KEY)
        options = {
            "model": "policy",
            "prompt": [3, 4, 5],
            "n": 16,
            "max_tokens": 300,
            "extra_body": {"ignore_eos": True},
        }
        answer = asyncio.create_task(questions.completions.with_raw_response.create(**options))
        async with httpx.AsyncClient() as metrics:
            while (
                'vllm:num_requests_running{engine="0",model_name="policy"} 8.0'
                not in (await metrics.get(f"{server[0]}/metrics")).text
            ):
                await asyncio.sleep(0.01)
        while not answer.done():
            await pusher.swap(*adapters[1]["third"])
            await asyncio.sleep(0.2)
        return (await answer).headers[VERSION], (await pusher.state())["version"]

    header, last = asyncio.run(load())
    ends = [int(end) for end in header.split("-")]
    assert ends[0] == first and first < ends[1] <= last


def test_waiting_for_requests_lets_them_end_under_their_version_and_aborting_ends_them(server, policy, adapters):
    first = policy.state()["version"]

    async def run(mode, name, tokens):
        import openai

        questions = openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, max_retries=0, timeout=120)
        stream = await questions.completions.with_raw_response.create(
            model="policy",
            prompt=[9, 4, 5],
            max_tokens=tokens,
            temperature=1.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert stream.headers[VERSION] == str((await AsyncPolicyClient(server[0], TOKEN, API_KEY).state())["version"])
        swap = asyncio.create_task(AsyncPolicyClient(server[0], TOKEN, API_KEY).swap(*adapters[1][name], requests=mode))
        reasons = [chunk.choices[0].finish_reason async for chunk in stream.parse() if chunk.choices]
        return reasons[-1], await swap

    reason, version = asyncio.run(run("wait", "second", 200))
    assert (reason, version) == ("length", first + 1)
    reason, version = asyncio.run(run("abort", "third", 3500))
    assert (reason, version) == ("abort", first + 2)


def test_a_stream_ends_with_the_versions_that_computed_it(server, policy):
    version = policy.state()["version"]
    question = {"model": "policy", "prompt": [5, 6], "max_tokens": 4, "stream": True}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    answer = httpx.post(f"{server[0]}/v1/completions", json=question, headers=headers, timeout=60)
    assert answer.headers[VERSION] == str(version)
    assert answer.text.rstrip().splitlines()[-1] == f": X-QeRL-Policy-Version: {version}"
    assert "data: [DONE]" in answer.text
    assert VERSION not in httpx.get(f"{server[0]}/v1/models", headers=headers).headers


def uploads(server):
    """The files without a name that the server keeps bodies in: at most that of the last change, for the next."""
    links = Path(f"/proc/{server[2].pid}/fd").iterdir()
    return {os.stat(link).st_ino for link in links if os.path.lexists(link) and "/dev/shm/" in os.readlink(link)}


def spoiled(adapters, change):
    """The body of an adapter after ``change(tensors, config)``."""
    tensors, config = dict(adapters[1]["second"][0]), dict(adapters[1]["second"][1])
    change(tensors, config)
    return body(tensors, config)


def nan(tensors, config):
    name = sorted(tensors)[0]
    tensors[name] = torch.full_like(tensors[name], float("nan"))


BODIES = {
    "nan": (lambda a: spoiled(a, nan), 422, "NaN"),
    "no_file": (lambda a: b"\xff" * 200, 400, "no safetensors file"),
    "empty": (lambda a: b"", 400, "no safetensors file"),
    "pickle": (lambda a: b"\x80\x04\x95" + b"cos\nsystem\n(S'id'\ntR." * 9, 400, "no safetensors file"),
    "no_config": (lambda a: save(a[1]["second"][0]), 400, "lack 'adapter_config'"),
    "config_is_a_list": (
        lambda a: save(a[1]["second"][0], metadata={"adapter_config": "[1]"}),
        400,
        "not a JSON object",
    ),
    "deep_json": (
        lambda a: save(a[1]["second"][0], metadata={"adapter_config": "[" * 100_000}),
        400,
        "not valid JSON",
    ),
    "pattern": (lambda a: spoiled(a, lambda t, c: c.update(target_modules="(a+)+$")), 400, "not a pattern"),
    "pattern_of_layers": (
        lambda a: spoiled(a, lambda t, c: c.update(layers_to_transform=[0], layers_pattern=["(a+)+$"])),
        400,
        "not a pattern",
    ),
    "excluded_pattern": (lambda a: spoiled(a, lambda t, c: c.update(exclude_modules="(a+)+$")), 400, "not a pattern"),
    "rank": (lambda a: spoiled(a, lambda t, c: c.update(r=10**30)), 422, "rank"),
    "alpha": (lambda a: spoiled(a, lambda t, c: c.update(lora_alpha=10**400)), 422, "lora_alpha"),
    "another_base": (lambda a: spoiled(a, lambda t, c: t.update({sorted(t)[0]: torch.ones(4, 128)})), 422, "shape"),
    "norm_of_another_model": (
        lambda a: spoiled(a, lambda t, c: t.update({"a.norm.weight": torch.ones(4)})),
        422,
        "norm",
    ),
    "lists_in_lists": (
        lambda a: spoiled(a, lambda t, c: c.update(megatron_config=json.loads("[" * 800 + "]" * 800))),
        422,
        "megatron_config",
    ),
    "cut_file": (lambda a: body(*a[1]["second"])[:-100], 422, ""),
    "too_large": (lambda a: b"x" * (4 << 20), 413, "at most"),
    "too_large_in_chunks": (lambda a: iter([b"x" * (1 << 20)] * 4), 413, "more than"),
}


@pytest.mark.parametrize("case", BODIES)
def test_hostile_bodies_are_refused_within_a_second(server, policy, adapters, case):
    before, files = kept(policy), uploads(server)
    make, status, text = BODIES[case]
    content, start = make(adapters), time.monotonic()
    answer = put(server, content)
    assert time.monotonic() - start < 1
    assert answer.status_code == status
    assert text in answer.json()["error"]
    assert kept(policy) == before
    assert uploads(server) <= files and len(files) <= 1


def description(adapters, change=None):
    """What a client sends for an adapter on a GPU: (the JSON object, what its proof must hold)."""
    tensors, config = adapters[1]["second"]
    ordered = [[name, "F32", list(tensor.shape)] for name, tensor in tensors.items()]
    size = sum(tensor.nbytes for tensor in tensors.values())
    memory = {"gpu": "a-gpu", "handle": "5a" * 64, "bytes": size, "tensors": json.dumps(ordered), **(change or {})}
    text = json.dumps(memory)
    given = {"memory": text, "checksum": "0" * 64, "proof": "", "adapter_config": config}
    return given, hashlib.sha256(text.encode()).digest()


def put_description(server, given):
    content = given if isinstance(given, bytes) else json.dumps(given).encode()
    headers = {"X-QeRL-Admin-Token": TOKEN, "Authorization": f"Bearer {API_KEY}", "Content-Type": MEDIA_TYPE}
    return put(server, content, headers)


def test_memory_of_a_gpu_is_mapped_only_for_a_process_of_this_user_and_machine(server, policy, adapters, tmp_path):
    before, (given, content) = kept(policy), description(adapters)
    (tmp_path / "named").write_bytes(content)
    with (
        shared_file.proof(content) as good,
        shared_file.proof(content + b"x") as longer,
        shared_file.proof(b"x" * 32) as other,
        open(tmp_path / "named", "rb") as named,
    ):
        here = f"/proc/{os.getpid()}/fd/{named.fileno()}"
        for path in (longer, other, here, str(tmp_path / "named"), "/dev/shm/x", "/proc/self/fd/0", "", "/proc/1/fd/1"):
            answer = put_description(server, {**given, "proof": path})
            assert (answer.status_code, answer.json()["reason"]) == (403, "unreachable"), path
        answer = put_description(server, {**given, "proof": good})
        assert (answer.status_code, answer.json()["reason"]) == (422, "unreachable"), "this server has no GPU"
        assert "and this worker computes on a cpu" in answer.json()["error"]
        for broken in ({**given, "memory": 7}, {**given, "pickle": ""}, {**given, "adapter_config": []}, [], b"{"):
            assert put_description(server, broken).status_code == 400
    whole = {"bytes": 1 << 30, "tensors": json.dumps([["a", "U8", [1 << 30]]])}
    for change, status in (({"bytes": 1}, 400), ({"handle": "5a"}, 400), (whole, 413)):
        given, content = description(adapters, change)
        with shared_file.proof(content) as path:
            assert put_description(server, {**given, "proof": path}).status_code == status
    assert kept(policy) == before


def test_a_client_whose_gpu_the_server_cannot_read_sends_the_tensors_and_says_so_once(
    server, questions, expected, adapters, measure, monkeypatch
):
    given, _ = description(adapters)
    monkeypatch.setattr(gpu_tensors, "why_not", lambda tensors: None)
    monkeypatch.setattr(cuda_ipc, "uuid", lambda device: "a-gpu")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))

    @contextlib.contextmanager
    def described(tensors):
        yield given["memory"], torch.zeros(8, dtype=torch.uint8)

    monkeypatch.setattr(gpu_tensors, "described", described)
    sees, does_not = {"machine": shared_file.machine(), "gpus": ["a-gpu"]}, {"machine": "another", "gpus": ["a-gpu"]}
    for kind, place, why in (
        (PolicyClient, sees, "this worker computes on a cpu"),
        (AsyncPolicyClient, does_not, "does not see GPU a-gpu"),
        (PolicyClient, None, "does not see GPU a-gpu"),
    ):
        client = kind(server[0], TOKEN, API_KEY)
        client._place = place

        def swap(name, client=client):
            made = client.swap(*adapters[1][name])
            return asyncio.run(made) if asyncio.iscoroutine(made) else made

        with pytest.warns(UserWarning, match=why):
            swap("third")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            version = swap("second")
        assert_served(questions, measure, expected("second"), version)
        strict = PolicyClient(server[0], TOKEN, API_KEY, transport="ipc")
        strict._place = place
        with pytest.raises(PolicyRefusedError, match=why):
            strict.swap(*adapters[1]["third"])
    with pytest.raises(ValueError, match="transport is 'shared'; it is one of auto, ipc, http"):
        PolicyClient(server[0], TOKEN, transport="shared")


def test_a_body_that_is_promised_and_never_sent_is_refused_at_once_and_one_that_is_cut_changes_nothing(server, policy):
    before, files, address = kept(policy), uploads(server), server[0].removeprefix("http://").split(":")
    lines = f"PUT /v1/qerl/policy HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
    with socket.create_connection((address[0], int(address[1])), timeout=5) as promise:
        promise.sendall(f"{lines}X-QeRL-Admin-Token: {TOKEN}\r\nContent-Length: {2 << 30}\r\n\r\n".encode())
        assert promise.recv(100).startswith(b"HTTP/1.1 413")
    with socket.create_connection((address[0], int(address[1])), timeout=5) as cut:
        cut.sendall(f"{lines}X-QeRL-Admin-Token: {TOKEN}\r\nContent-Length: 5000\r\n\r\nabc".encode())
    with socket.create_connection((address[0], int(address[1])), timeout=5) as stranger:
        stranger.sendall(f"{lines}Content-Length: {2 << 30}\r\n\r\n".encode())
        assert stranger.recv(100).startswith(b"HTTP/1.1 401")
    assert kept(policy) == before
    deadline = time.monotonic() + 5
    while not uploads(server) <= files and time.monotonic() < deadline:
        time.sleep(0.05)
    assert uploads(server) <= files, "what had arrived of a cut body must go"


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ({"params": {"version": "-1"}}, 400),
        ({"params": {"version": "1e3"}}, 400),
        ({"params": {"version": "9" * 400}}, 400),
        ({"params": {"requests": "drop"}}, 400),
        ({"params": {"verison": "7"}}, 400),
    ],
)
def test_queries_are_honoured_or_refused_by_name(server, policy, adapters, call, status):
    before = kept(policy)
    assert put(server, body(*adapters[1]["second"]), **call["params"]).status_code == status
    assert kept(policy) == before


@pytest.mark.parametrize(
    "noise",
    [
        {"sigma": -1, "seed": 1, "rollout": 1},
        {"sigma": "much", "seed": 1, "rollout": 1},
        {"sigma": None, "seed": 1, "rollout": 1},
        {"sigma": 0.1, "seed": 1.5, "rollout": 1},
        {"sigma": 1e308, "seed": 1, "rollout": 1},
        {"sigma": 0.1, "seed": 2**63, "rollout": 1},
        {"sigma": 10**40, "seed": 1, "rollout": 1},
        {"sigma": 0.1, "seed": 1},
        {"sigma": 0.1, "seed": 1, "rollout": 1, "target": ["norm"]},
        {"sigma": 0.1, "seed": 1, "rollout": 1, "targets": ["no_such_norm"]},
        {"sigma": 0.1, "seed": 1, "rollout": 1, "targets": "norm"},
        [0.1],
    ],
)
def test_impossible_noise_is_refused(server, policy, noise):
    before = kept(policy)
    headers = {"X-QeRL-Admin-Token": TOKEN, "Authorization": f"Bearer {API_KEY}"}
    answer = httpx.put(f"{server[0]}/v1/qerl/noise", json=noise, headers=headers, timeout=30)
    assert answer.status_code in (400, 422)
    assert len(answer.json()["error"]) > 10 and answer.json()["reason"] in ("bad_json", "refused")
    assert kept(policy) == before


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "!", API_KEY])
def test_without_the_token_nothing_is_told_and_nothing_changes(server, policy, adapters, token):
    before = kept(policy)
    headers = {"Authorization": f"Bearer {API_KEY}"} | ({} if token is None else {"X-QeRL-Admin-Token": token})
    for method, path in (
        ("PUT", "policy"),
        ("DELETE", "policy"),
        ("PUT", "noise"),
        ("DELETE", "noise"),
        ("GET", "state"),
    ):
        answer = httpx.request(method, f"{server[0]}/v1/qerl/{path}", headers=headers, content=b"{}")
        assert (answer.status_code, "version" in answer.json()) == (401, False)
    assert put(server, body(*adapters[1]["second"]), headers={"X-QeRL-Admin-Token": TOKEN}).status_code == 401
    assert kept(policy) == before
    with pytest.raises(PolicyRefusedError, match="missing or wrong"):
        PolicyClient(server[0], token or "none", API_KEY).state()


PAGE = (Path(__file__).parents[2] / "qerl_vllm_plugin" / "README.md").read_text()


def block(kind, word):
    """The first block of this kind of the page that has the word."""
    return next(found for found in re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.S) if word in found)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_commands_of_the_page(server, policy, tmp_path):
    """As printed, for a server that is there already."""
    version, lines = policy.state()["version"], block("bash", "/v1/qerl/policy").replace("\\\n", " ").splitlines()
    (start,) = [shlex.split(line.removesuffix(" &")) for line in lines if line.startswith("qerl serve")]
    options = Options.parse(json.loads(start[start.index("--additional-config") + 1]))
    assert (options.adapter_rank, options.policy_folders) == (32, "RUNS")
    assert start[:5] == ["qerl", "serve", "BASE", "--host", "127.0.0.1"] and len(start) == 7
    (names,) = [line for line in lines if line.startswith("URL=")]
    commands = [names.partition("; ")[2], *(line for line in lines if line.startswith("curl "))]
    assert len(commands) == 6 and len(lines) == 8, "a line of the page is not tested"
    (tmp_path / ".curlrc").write_text(f'header = "Authorization: Bearer {API_KEY}"\n')
    environment = {**os.environ, "URL": server[0], "QERL_ADMIN_TOKEN": TOKEN, "CURL_HOME": str(tmp_path)}
    line = ["bash", "-e", "-c", "\n".join(commands)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answers = [json.loads("{" + text) for text in done.stdout.split("{", 1)[1].replace("}{", "}\n{").split("\n{")]
    assert [answer.get("version") for answer in answers] == [version + 1, None, version + 1, None, version + 2]
    assert answers[2]["noise"]["sigma"] == 0.01
    assert policy.state()["noise"]["sigma"] == 0.0


def test_the_program_of_the_page(server, policy, adapters):
    version = policy.state()["version"] + 1
    program = block("python", "PolicyClient")
    for theirs, ours in (
        ("http://127.0.0.1:8000", server[0]),
        ('"THE ADMIN TOKEN"', f"{TOKEN!r}, {API_KEY!r}"),
        ("RUN/adapter", str(adapters[0] / "second")),
        ("version=7)  #", f"version={version})  #"),
    ):
        assert program.count(theirs) == 1, theirs
        program = program.replace(theirs, ours)
    exec(compile(program, "README.md", "exec"), {})
    state = policy.state()
    assert (state["version"], state["noise"]["sigma"], state["noise"]["rollout"]) == (version, 1e-2, 7)
    policy.set_noise(0.0, seed=0, rollout=0)


def test_the_token_is_in_no_log_no_metric_and_no_text_of_the_client(server, policy):
    metrics = httpx.get(f"{server[0]}/metrics").text
    for text in (server[1].read_text(), metrics, repr(policy)):
        assert TOKEN not in text
    command_lines = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert not any(TOKEN.encode() in line for line in command_lines)
    counted = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line[0] != "#"}
    assert counted["qerl:policy_version"] == policy.state()["version"]
    assert counted['qerl:swaps_total{kind="swap"}'] >= 5
    assert counted['qerl:refusals_total{reason="unauthorized"}'] > 0
    assert counted["qerl:swap_seconds_count"] > 0
    assert counted["qerl:swap_bytes_total"] > 0
    counters = policy.state()["counters"]
    assert counters["swaps"]["swap"] == counted['qerl:swaps_total{kind="swap"}']
    assert counters["refusals"]["unauthorized"] == counted['qerl:refusals_total{reason="unauthorized"}']
    assert counters["bytes"] == counted["qerl:swap_bytes_total"]
    assert counters["seconds"] == pytest.approx(counted["qerl:swap_seconds_sum"], abs=1e-3)


def test_what_is_installed_from_a_folder_is_counted_too(server, policy, adapters):
    before = policy.state()["counters"]
    assert put(server, b"", folder="third").status_code == 200
    after, size = policy.state()["counters"], sum(tensor.nbytes for tensor in adapters[1]["third"][0].values())
    assert (after["swaps"]["swap"], after["bytes"]) == (before["swaps"]["swap"] + 1, before["bytes"] + size)
    assert after["seconds"] > before["seconds"]
