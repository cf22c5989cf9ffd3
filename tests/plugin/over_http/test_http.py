"""The policy over HTTP: swaps, noise, versions and what is counted; the official client asks the questions."""

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
import torch
from policy_requests import API_KEY, TOKEN, VERSION, assert_served, description, kept, put
from waiting import PATIENCE

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.client import AsyncPolicyClient, PolicyClient, PolicyRefusedError, body
from qerl_vllm_plugin.options import Options
from qerl_vllm_plugin.wire import cuda_ipc, gpu_memory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
TRIES = 8  # of what a machine that stops in the wrong moment leaves untested


def test_the_adapter_named_at_start_is_served_and_swaps_noise_and_removal_are_what_an_engine_in_process_answers(
    policy, questions, expected, adapters, measure
):
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


def test_equal_deletes_at_once_are_one_change(server, policy):
    def delete(version):
        headers = {"X-QeRL-Admin-Token": TOKEN, "Authorization": f"Bearer {API_KEY}"}
        address = f"{server[0]}/v1/qerl/policy?version={version}"
        return httpx.delete(address, headers=headers, timeout=PATIENCE)

    first = policy.state()["version"] + 1
    with ThreadPoolExecutor(8) as threads:
        for version in range(first, first + 20):
            answers = list(threads.map(delete, [version] * 8))
            assert [answer.status_code for answer in answers] == [200] * 8
            assert sum("unchanged" in answer.json() for answer in answers) == 7


def test_requests_run_on_through_swaps_and_each_says_which_versions_computed_it(server, policy, adapters):
    first = policy.state()["version"]

    async def load():
        import openai

        questions = openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, max_retries=0, timeout=PATIENCE)
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
    first_eight = 'vllm:num_requests_running{engine="0",model_name="policy"} 8.0'

    async def load():
        import openai

        questions = openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, max_retries=0, timeout=PATIENCE)
        pusher = AsyncPolicyClient(server[0], TOKEN, API_KEY)
        options = {
            "model": "policy",
            "prompt": [3, 4, 5],
            "n": 16,
            "max_tokens": 300,
            "extra_body": {"ignore_eos": True},
        }
        answer = asyncio.create_task(questions.completions.with_raw_response.create(**options))
        async with httpx.AsyncClient(timeout=PATIENCE) as metrics:
            while not answer.done() and first_eight not in (await metrics.get(f"{server[0]}/metrics")).text:
                await asyncio.sleep(0.01)
        while not answer.done():
            await pusher.swap(*adapters[1]["third"])
            await asyncio.sleep(0.2)
        return (await answer).headers[VERSION], (await pusher.state())["version"]

    for _ in range(TRIES):
        first = policy.state()["version"]
        header, last = asyncio.run(load())
        ends = [int(end) for end in header.split("-")]
        assert ends[0] == first
        if len(ends) > 1:
            break  # else it was over before anything could come in between
    assert first < ends[1] <= last


def test_waiting_for_requests_lets_them_end_under_their_version_and_aborting_ends_them(server, policy, adapters):

    async def run(mode, name, tokens):
        import openai

        questions = openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, max_retries=0, timeout=PATIENCE)
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

    first = policy.state()["version"]
    reason, version = asyncio.run(run("wait", "second", 200))
    assert (reason, version) == ("length", first + 1)
    for _ in range(TRIES):
        reason, version = asyncio.run(run("abort", "third", 3500))
        first += 1
        assert version == first + 1
        if reason != "length":
            break  # else it had ended before
    assert reason == "abort"


def test_a_stream_ends_with_the_versions_that_computed_it(server, policy):
    version = policy.state()["version"]
    question = {"model": "policy", "prompt": [5, 6], "max_tokens": 4, "stream": True}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    answer = httpx.post(f"{server[0]}/v1/completions", json=question, headers=headers, timeout=PATIENCE)
    assert answer.headers[VERSION] == str(version)
    assert answer.text.rstrip().splitlines()[-1] == f": X-QeRL-Policy-Version: {version}"
    assert "data: [DONE]" in answer.text
    assert VERSION not in httpx.get(f"{server[0]}/v1/models", headers=headers, timeout=PATIENCE).headers


def test_a_client_whose_gpu_the_server_cannot_read_sends_the_tensors_and_says_so_once(
    server, questions, expected, adapters, measure, monkeypatch
):
    given, _ = description(adapters)
    monkeypatch.setattr(gpu_memory, "why_not", lambda tensors: None)
    monkeypatch.setattr(cuda_ipc, "uuid", lambda device: "a-gpu")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))

    @contextlib.contextmanager
    def described(tensors):
        yield given["memory"], torch.zeros(8, dtype=torch.uint8)

    monkeypatch.setattr(gpu_memory, "described", described)
    for kind, gpus, why in (
        (PolicyClient, ["a-gpu"], "this worker computes on a cpu"),
        (AsyncPolicyClient, ["another"], "does not see GPU a-gpu"),
        (PolicyClient, None, "does not see GPU a-gpu"),
    ):
        client = kind(server[0], TOKEN, API_KEY)
        client._ways.gpus = gpus

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
        strict._ways.gpus = gpus
        with pytest.raises(PolicyRefusedError, match=why):
            strict.swap(*adapters[1]["third"])
    with pytest.raises(ValueError, match="transport is 'gpu'; it is one of auto, ipc, shared, http"):
        PolicyClient(server[0], TOKEN, transport="gpu")


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
        answer = httpx.request(method, f"{server[0]}/v1/qerl/{path}", headers=headers, content=b"{}", timeout=PATIENCE)
        assert (answer.status_code, "version" in answer.json()) == (401, False)
    assert put(server, body(*adapters[1]["second"]), headers={"X-QeRL-Admin-Token": TOKEN}).status_code == 401
    assert kept(policy) == before
    with pytest.raises(PolicyRefusedError, match="missing or wrong"):
        PolicyClient(server[0], token or "none", API_KEY).state()


PAGE = (Path(__file__).parents[3] / "qerl_vllm_plugin" / "README.md").read_text()


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
    assert len(commands) == 6 and len(lines) == 9, "a line of the page is not tested"  # with test_pages.py
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
    until_then, clears, _ = program.partition("policy.clear_noise()")
    names: dict = {}
    exec(compile(until_then, "README.md", "exec"), names)
    state = policy.state()
    assert (state["version"], state["noise"]["sigma"], state["noise"]["rollout"]) == (version, 1e-2, 7)
    exec(clears, names)
    assert clears and policy.state()["noise"]["sigma"] == 0


def test_the_token_is_in_no_log_no_metric_and_no_text_of_the_client(server, policy):
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
