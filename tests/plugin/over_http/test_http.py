"""Test the policy over HTTP: swaps, noise, versions and counters. The official OpenAI client sends the questions."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import requests
import torch
from policy_requests import API_KEY, HEADERS, TOKEN, VERSION, assert_served, description, done, kept, put
from waiting import PATIENCE

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.client import AsyncPolicyClient, PolicyClient, PolicyRefusedError, body
from qerl_vllm_plugin.options import Options
from qerl_vllm_plugin.wire import cuda_ipc, gpu_memory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
TRIES = 8  # retries where a stall of the machine at the wrong moment leaves a case untested


def test_a_server_answers_as_an_engine_in_process(policy, questions, expected, adapters, measure):
    """Compare with the adapter named at start, after a swap, under noise, without noise, and without an adapter."""
    distinct = {name: expected(name) for name in ("start", "second", None)}
    assert len({round(scores[0], 2) for scores in distinct.values()}) == 3, "these adapters prove nothing"
    state = policy.state()
    assert (state["version"], state["max_rank"]) == (1, 8)
    targets = ["input_layernorm", "post_attention_layernorm"]
    assert state["noise"] == {"sigma": 0.0, "seed": 0, "rollout": 0, "targets": targets}
    assert len(state["hash"]) == len(state["base_hash"]) == 64
    assert_served(questions, measure, distinct["start"], 1)
    assert policy.swap(*adapters[1]["second"]) == 2
    assert_served(questions, measure, distinct["second"], 2)
    noise = {"sigma": 0.1, "seed": 3, "rollout": 4}
    assert policy.set_noise(**noise) == 4
    assert policy.state()["noise"] == {**noise, "targets": targets}
    assert_served(questions, measure, expected("second", noise), 2)
    assert policy.set_noise(0.0, seed=0, rollout=0) == 0
    assert_served(questions, measure, distinct["second"], 2)
    assert policy.swap(None) == 3
    assert_served(questions, measure, distinct[None], 3)


def test_a_folder_is_installed_by_its_name(server, policy, questions, expected, measure):
    version = policy.state()["version"] + 5
    assert put(server, b"", folder="third", version=version).json()["version"] == version
    assert_served(questions, measure, expected("third"), version)
    for name in ("fourth", "../adapters", "..", ".", "third/../../x", "/etc", ""):
        assert put(server, b"", folder=name).status_code == 404, name
    assert policy.state()["version"] == version


def test_a_clients_folder_is_sent_unless_of_another_base(
    server, policy, questions, expected, adapters, measure, tmp_path
):
    assert_served(questions, measure, expected("third"), policy.swap_folder(adapters[0] / "third"))
    folder = shutil.copytree(adapters[0] / "third", tmp_path / "third")
    state, before = folder / "qerl_state.json", policy.state()
    state.write_text(json.dumps({"base": "another", "base_hash": before["base_hash"]}))
    assert done(AsyncPolicyClient(server[0], TOKEN, API_KEY).swap_folder(folder)) == before["version"] + 1
    state.write_text(json.dumps({"base": "another", "base_hash": "0" * 64}))
    with pytest.raises(AdapterError, match="third was trained on another base than the server's"):
        policy.swap_folder(folder)
    assert policy.state()["version"] == before["version"] + 1


def test_equal_deletes_at_once_are_one_change(server, policy):
    def delete(version):
        address = f"{server[0]}/v1/qerl/policy?version={version}"
        return httpx.delete(address, headers=HEADERS, timeout=PATIENCE)

    first = policy.state()["version"] + 1
    with ThreadPoolExecutor(8) as threads:
        for version in range(first, first + 6):
            answers = list(threads.map(delete, [version] * 8))
            assert [answer.status_code for answer in answers] == [200] * 8
            assert sum("unchanged" in answer.json() for answer in answers) == 7


def openai_client(server):
    import openai

    return openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, max_retries=0, timeout=PATIENCE)


def test_requests_run_on_through_swaps(server, policy, adapters):
    """Check also that each answer names the versions that computed it."""
    first = policy.state()["version"]

    async def load():
        questions, pusher = openai_client(server), AsyncPolicyClient(server[0], TOKEN, API_KEY)

        async def one(i):
            raw = await questions.completions.with_raw_response.create(
                model="policy", prompt=[3 + i, 4, 5], max_tokens=300, temperature=1.0, extra_body={"ignore_eos": True}
            )
            return raw.parse().usage.completion_tokens, raw.headers[VERSION]

        running = [asyncio.create_task(one(i)) for i in range(6)]
        swaps = 0
        while not all(task.done() for task in running):  # however long a busy machine takes to start the requests
            await asyncio.sleep(0.1)
            await pusher.swap(*adapters[1]["third" if swaps % 2 else "second"], requests="keep")
            swaps += 1
        return await asyncio.gather(*running), swaps, (await pusher.state())["version"]

    answers, swaps, last = asyncio.run(load())
    assert last == first + swaps
    assert [tokens for tokens, _ in answers] == [300] * 6, "a swap must lose nothing"
    spans = [tuple(map(int, version.split("-"))) for _, version in answers]
    assert all(first <= span[0] <= span[-1] <= last for span in spans)
    assert any(len(span) == 2 for span in spans), "no request ran through a swap: this test proves nothing"


def test_waiting_lets_requests_end_and_aborting_ends_them(server, policy, adapters):
    async def run(mode, name, tokens):
        pusher = AsyncPolicyClient(server[0], TOKEN, API_KEY)
        stream = await openai_client(server).completions.with_raw_response.create(
            model="policy",
            prompt=[9, 4, 5],
            max_tokens=tokens,
            temperature=1.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert stream.headers[VERSION] == str((await pusher.state())["version"])
        swap = asyncio.create_task(pusher.swap(*adapters[1][name], requests=mode))
        reasons = [chunk.choices[0].finish_reason async for chunk in stream.parse() if chunk.choices]
        return reasons[-1], await swap

    first = policy.state()["version"]
    reason, version = asyncio.run(run("wait", "second", 200))
    assert (reason, version) == ("length", first + 1)
    for _ in range(TRIES):
        reason, version = asyncio.run(run("abort", "third", 3500))
        first += 1
        assert version == first + 1
        if reason != "length":
            break  # otherwise it had ended before the abort
    assert reason == "abort"


@pytest.mark.parametrize(
    ("kind", "gpus", "why"),
    [
        (PolicyClient, ["a-gpu"], "this worker computes on a cpu"),
        (AsyncPolicyClient, None, "does not see GPU a-gpu"),
    ],
)
def test_a_gpu_the_server_cannot_read_is_warned_of_once(
    kind, gpus, why, server, questions, expected, adapters, measure, monkeypatch
):
    given = description(adapters)
    monkeypatch.setattr(gpu_memory, "why_not", lambda tensors: None)
    monkeypatch.setattr(cuda_ipc, "uuid", lambda device: "a-gpu")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))

    @contextlib.contextmanager
    def described(tensors):
        yield given["memory"], torch.zeros(8, dtype=torch.uint8)

    monkeypatch.setattr(gpu_memory, "described", described)
    client, strict = (kind(server[0], TOKEN, API_KEY, transport=transport) for transport in ("auto", "ipc"))
    client._ways.gpus = strict._ways.gpus = gpus
    with pytest.warns(UserWarning, match=why):
        done(client.swap(*adapters[1]["third"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        version = done(client.swap(*adapters[1]["second"]))
    assert_served(questions, measure, expected("second"), version)
    with pytest.raises(PolicyRefusedError, match=why):
        done(strict.swap(*adapters[1]["third"]))


def test_without_both_tokens_nothing_is_told_or_changed(server, policy, adapters):
    """Check vLLM's own API key too; test_asked_once.py has the wrong admin tokens."""
    before, content = kept(policy), body(*adapters[1]["second"])
    for name, value in HEADERS.items():
        assert put(server, content, headers={name: value}).status_code == 401
    assert kept(policy) == before
    with pytest.raises(PolicyRefusedError, match="missing or wrong"):
        PolicyClient(server[0], API_KEY, API_KEY).state()


PAGE = (Path(__file__).parents[3] / "qerl_vllm_plugin" / "README.md").read_text()


def block(kind, word):
    """Return the first code block of this kind on the page that contains the word."""
    return next(found for found in re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.S) if word in found)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_commands_of_the_page(server, policy, tmp_path):
    """Run them as printed, on a server that is already running."""
    version, lines = policy.state()["version"], block("bash", "/v1/qerl/policy").replace("\\\n", " ").splitlines()
    (start,) = [shlex.split(line.removesuffix(" &")) for line in lines if line.startswith("qerl serve")]
    options = Options.parse(json.loads(start[start.index("--additional-config") + 1]))
    assert (options.adapter_rank, options.policy_folders) == (32, "RUNS")
    assert start[:5] == ["qerl", "serve", "BASE", "--host", "127.0.0.1"] and len(start) == 7
    (names,) = [line for line in lines if line.startswith("URL=")]
    commands = [names.partition("; ")[2], *(line for line in lines if line.startswith("curl "))]
    assert len(commands) == 6 and len(lines) == 9, "a line of the page is not tested"  # test_pages.py tests the others
    (tmp_path / ".curlrc").write_text(f'header = "Authorization: Bearer {API_KEY}"\n')
    environment = {**os.environ, "URL": server[0], "QERL_ADMIN_TOKEN": TOKEN, "CURL_HOME": str(tmp_path)}
    line = ["bash", "-e", "-c", "\n".join(commands)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE)
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
    assert policy.state()["version"] == version


def test_vllms_own_weight_transfer_changes_nothing(server, policy, questions, expected, adapters, measure):
    """Push as a stack does that speaks vLLM's interface, with vLLM's client for it."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    version = policy.swap(*adapters[1]["second"])
    client, before = HTTPVLLMWeightSyncClient(server[0], timeout=PATIENCE), kept(policy)
    named = {"names": ["lm_head.weight"], "dtype_names": ["float32"], "shapes": [[1]]}
    calls = (
        lambda: client.init_weight_transfer_engine({}),
        client.start_weight_update,
        lambda: client.update_weights(named),
        client.finish_weight_update,
    )
    for call in calls:
        with pytest.raises(requests.HTTPError, match="500"):
            call()
    assert kept(policy) == before
    assert_served(questions, measure, expected("second"), version)


def test_the_token_is_in_no_log_and_no_metric(server, policy):
    metrics = httpx.get(f"{server[0]}/metrics", timeout=PATIENCE).text
    for text in (server[1].read_text(), metrics, repr(policy)):
        assert TOKEN not in text
    root = psutil.Process(server[2].pid)
    command_lines = [" ".join(process.cmdline()) for process in (root, *root.children(recursive=True))]
    assert any("--additional-config" in line for line in command_lines)
    assert not any(TOKEN in line for line in command_lines)
    counted = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line[0] != "#"}
    assert counted["qerl:policy_version"] == policy.state()["version"]
    assert counted['qerl:swaps_total{kind="swap"}'] >= 5
    assert counted['qerl:refusals_total{reason="unauthorized"}'] > 0
    assert counted["qerl:swap_seconds_count"] > 0
    counters = policy.state()["counters"]
    assert counters["swaps"]["swap"] == counted['qerl:swaps_total{kind="swap"}']
    assert counters["refusals"]["unauthorized"] == counted['qerl:refusals_total{reason="unauthorized"}']
    assert counters["bytes"] == counted["qerl:swap_bytes_total"]
    assert counters["seconds"] == pytest.approx(counted["qerl:swap_seconds_sum"], abs=1e-3)


@pytest.mark.parametrize("way", ["http", "shared", "folder"])
def test_what_is_installed_is_counted_whichever_way_it_came(way, server, policy, adapters):
    before, third = policy.state()["counters"], adapters[1]["third"]
    if way == "folder":
        size, answered = sum(tensor.nbytes for tensor in third[0].values()), put(server, b"", folder="third").json()
    else:
        size, client = len(body(*third)), PolicyClient(server[0], TOKEN, API_KEY, transport=way)
        client.swap(*third)
        answered = client.answered
    after = policy.state()["counters"]
    assert (after["swaps"]["swap"], after["bytes"]) == (before["swaps"]["swap"] + 1, before["bytes"] + size)
    assert after["seconds"] - before["seconds"] == pytest.approx(answered["seconds"], abs=3e-4)
