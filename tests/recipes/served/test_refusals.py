"""Test that a server that does not fit, goes away or is changed by others ends a run with an error that names it."""

import dataclasses
import itertools
import os
import time
from unittest.mock import AsyncMock

import httpx
import openai
import pytest
from waiting import PATIENCE

from qerl_recipes.rollout.server_link import (
    NO_NOISE,
    AnotherPolicyError,
    ServerLink,
    ServerLostError,
    ServerRefusedError,
)
from qerl_vllm_plugin.client import PolicyClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_a_server_that_restarts_again_and_again_ends_the_run(against, monkeypatch):
    rollouts = against().vllm_generation
    pushed, restarts = rollouts._push(NO_NOISE), itertools.count()

    async def complete(*given):
        yield ConnectionError("gone")

    monkeypatch.setattr(rollouts._client, "complete", complete)
    monkeypatch.setattr(
        rollouts._link, "settle", lambda *args: dataclasses.replace(pushed, instance=f"the {next(restarts)}th")
    )
    rollouts._seeds.open("train", 0)
    with pytest.raises(ServerLostError, match="was restarted 4 times while it computed one rollout"):
        rollouts.generate(prompts=[[5, 6, 7]] * 4, images=None, num_generations=4)
    assert next(restarts) == 4


@pytest.mark.parametrize(("processes", "transport"), [(1, "auto"), (2, "http")])
def test_after_a_restart_the_policy_may_come_another_way_where_one_process_pushes(
    against, running, make_nvfp4, processes, transport
):
    trainer = against()
    link = ServerLink(make_nvfp4("qwen2"), trainer.args, rank=4, dtype="bfloat16", processes=processes)
    assert link._policy._ways.transport == transport
    pushed = link.push(trainer.vllm_generation._snapshot(), NO_NOISE)
    other = {"instance": "the one before", "digest": "of another way", "version": pushed.version + 1}
    restarted = dataclasses.replace(pushed, **other)
    if processes == 1:
        assert link.settle(restarted, trainer.vllm_generation._snapshot()).version == pushed.version + 1
        return
    with pytest.raises(AnotherPolicyError, match="the processes of this run hold different policies"):
        link.settle(restarted, trainer.vllm_generation._snapshot())


def test_a_server_that_is_started_again_as_another_is_refused_by_name(against, monkeypatch):
    others = {
        "it serves another base": {"base_hash": "1" * 64},
        "its adapter has at most rank 2 and this one has 4": {"max_rank": 2},
        "it holds sequences of 8 tokens": {"max_model_len": 8},
        "start it with --logprobs-mode processed_logprobs": {"logprobs_mode": "raw_logprobs"},
        "vLLM does not apply min_p to drafts": {"speculative": "ngram"},
    }
    rollouts = against(min_p=0.02).vllm_generation
    rollouts.begin(0, None)
    link, state = rollouts._link, rollouts._link.state()
    monkeypatch.setattr(link._policy, "swap", lambda *given, **named: pytest.fail("it was given the policy"))
    for text, change in others.items():
        monkeypatch.setattr(link._policy, "state", lambda change=change: {**state, "instance": "another", **change})
        with pytest.raises(ServerRefusedError, match=f"does not fit this recipe: .*{text}"):
            rollouts.generate(prompts=[[5, 6, 7]] * 4, images=None, num_generations=4)
        with pytest.raises(ServerRefusedError, match=f"does not fit this recipe: .*{text}"):
            rollouts.begin(1, None)


OTHERS = {
    "base": ({}, "llama", "serves another base, "),
    "rank": (
        {"rank": 8},
        "qwen2",
        'at most rank 4 and this one has 8; start it with --additional-config \'{"qerl": {"p',
    ),
    "length": (
        {"vllm_max_model_length": 512},
        "qwen2",
        "tokens and the recipe's have 512; start it with --max-model-l",
    ),
    "length of a token and an answer": (
        {"vllm_max_model_length": None, "max_completion_length": 256},
        "qwen2",
        "tokens and the recipe's have 257; start it with --max-model-l",
    ),
    "routes": ({"vllm_server_base_url": "{url}/elsewhere"}, "qwen2", "has no /v1/qerl: start it, with the plugin inst"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_server_that_is_not_what_the_recipe_needs_is_refused_by_name(
    case, running, make_trainer, make_nvfp4, monkeypatch
):
    settings, architecture, text = OTHERS[case]
    running.ready()
    settings = {
        key: value.format(url=running.url) if isinstance(value, str) else value for key, value in settings.items()
    }
    monkeypatch.setattr("qerl_recipes.model.loading.load", lambda *a, **o: pytest.fail("loaded before it was refused"))
    with pytest.raises(ServerRefusedError) as refused:
        make_trainer(
            make_nvfp4(architecture), **{"vllm_mode": "server", "vllm_server_base_url": running.url, **settings}
        )
    assert text in str(refused.value) and running.url in str(refused.value)


def test_a_wrong_token_is_refused_and_told_nowhere(running, against, monkeypatch):
    monkeypatch.setenv("QERL_ADMIN_TOKEN", "another-token-of-32-characters!!")
    with pytest.raises(ServerRefusedError, match="X-QeRL-Admin-Token is missing or wrong") as refused:
        against()
    assert "another-token" not in str(refused.value)


def test_nobody_there_is_said_after_the_timeout(hold_port, against):
    began = time.monotonic()
    with pytest.raises(ServerLostError, match=r"has not answered for 1 s \(ConnectError"):
        against(vllm_server_base_url=f"http://127.0.0.1:{hold_port()}", vllm_server_timeout=1)
    assert time.monotonic() - began < PATIENCE


def test_a_server_that_somebody_has_paused_is_waited_for_in_time_and_named(running, against, capfd):
    rollouts = against(vllm_server_timeout=2).vllm_generation
    rollouts.begin(0, 0.1)
    httpx.post(f"{running.url}/pause", params={"mode": "keep"}).raise_for_status()
    try:
        began = time.monotonic()
        with pytest.raises(ServerLostError, match=r"has not answered for 2 s \(Conn.*somebody has paused its"):
            rollouts.generate(prompts=[[5, 6, 7]] * 4, images=None, num_generations=4)
        assert 2 <= time.monotonic() - began < PATIENCE, "neither at once nor after 500 s"
        assert "somebody has paused its engine" in capfd.readouterr().err
    finally:
        httpx.post(f"{running.url}/resume").raise_for_status()
    assert len(rollouts.generate(prompts=[[5, 6, 7]] * 4, images=None, num_generations=4)[1]) == 4


def test_a_key_that_the_server_no_longer_takes_is_a_refusal_by_name(running, against, monkeypatch):
    rollouts = against().vllm_generation
    rollouts.begin(0, 0.1)
    keyless = httpx.Response(401, json={"error": "Unauthorized"}, request=httpx.Request("GET", running.url))
    error = openai.AuthenticationError("Unauthorized", response=keyless, body=None)
    monkeypatch.setattr(openai.resources.AsyncModels, "list", AsyncMock(side_effect=error))
    with pytest.raises(ServerRefusedError, match="does not name its model: Unauthorized"):
        rollouts.generate(prompts=[[5, 6, 7]] * 4, images=None, num_generations=4)


@pytest.mark.parametrize("what", ["policy", "noise", "noise, which it takes back"])
def test_a_server_that_another_program_changes_ends_the_run(what, running, against):
    rollouts = against().vllm_generation
    client = PolicyClient(running.url, os.environ["QERL_ADMIN_TOKEN"])
    prompts = [[5, 6, 7]] * 4
    assert rollouts.begin(0, 0.1) == 4
    rollouts.generate(prompts=prompts, images=None, num_generations=4)
    if what == "policy":
        client.swap(None)
    else:
        client.set_noise(0.1, seed=8, rollout=0)
    if what == "noise, which it takes back":
        client.set_noise(0.1, seed=rollouts._noise.seed, rollout=0)
        assert rollouts._noise.is_that_of(client.state())
    with pytest.raises(AnotherPolicyError, match=r"was given another policy .* or noise since version"):
        rollouts.generate(prompts=prompts, images=None, num_generations=4)
    if what == "policy":
        with pytest.raises(AnotherPolicyError, match="another program pushes policies there"):
            client.swap(None)
            client.swap(None)
            rollouts.begin(1, None)


def test_noise_of_an_earlier_run_is_cleared_and_a_long_prompt_is_refused(running, against):
    client = PolicyClient(running.url, os.environ["QERL_ADMIN_TOKEN"])
    client.set_noise(0.3, seed=1, rollout=1)
    rollouts = against().vllm_generation
    assert rollouts.begin(0, None) == 0
    assert client.state()["noise"]["sigma"] == 0
    with pytest.raises(ValueError, match="a prompt of 64 tokens leaves no room for an answer in the 64"):
        rollouts.generate(prompts=[[5] * 64], images=None, num_generations=1)
    assert len(rollouts.generate(prompts=[[5] * 63], images=None, num_generations=1)[1][0]) == 1
