"""Test training against a server in another process, and agents that own their loop against the same server.

The run must give the same bits as in process, whatever happens to the server.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import calling
import httpx
import numpy as np
import openai
import pytest
from digit_rewards import digits, digits_of_some
from safetensors.torch import load_file
from transformers import TrainerCallback
from waiting import PATIENCE, until

from qerl_recipes.rollout import engine
from qerl_recipes.rollout.agents import rollout_of
from qerl_recipes.rollout.server_link import (
    NO_NOISE,
    AnotherPolicyError,
    ServerLink,
    ServerLostError,
    ServerRefusedError,
)
from qerl_recipes.train import loss
from qerl_vllm_plugin.client import PolicyClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
# Both engines take one sequence at a time, because products of other batch sizes sometimes round differently.
ALONE = ("--max-num-seqs", "1")
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # enables vLLM's own /pause and /resume
CHECKPOINT = "checkpoint-2/adapter_model.safetensors"
RUN = {
    "max_steps": 3,
    "max_completion_length": 10,
    "save_strategy": "steps",
    "save_steps": 1,
    "noise_mode": "both",
    "sigma_start": 0.1,
    "sigma_end": 0.1,
    "num_stages": 1,
    "dynamic_sampling": True,
    "train_norms": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
}


@pytest.fixture(scope="module")
def running(serve_policy, make_nvfp4, hold_port, tmp_path_factory):
    """Start a server of the tiny model with a chat template.

    Return its ``model``, ``url`` and ``process``, and ``restart()``, which starts another in its place.
    """
    model = calling.recipe_keys(make_nvfp4("qwen2"), tmp_path_factory.mktemp("served"))["model_name_or_path"]
    port = hold_port()
    found = SimpleNamespace(model=model, url=f"http://127.0.0.1:{port}")

    def restart():
        found.process = serve_policy(model, port, *ALONE, **DEVELOPMENT)

    restart()
    found.restart = restart
    return found


@pytest.fixture(scope="module")
def watched(make_nvfp4):
    """Return watched(make_trainer, folder, **settings), which makes a trainer that keeps completions in ``outputs``."""

    def make(make_trainer, folder, **settings):
        trainer = make_trainer(
            make_nvfp4("qwen2"), digits_of_some, rows=6, output_dir=str(folder), **{**RUN, **settings}
        )
        rollouts = trainer.vllm_generation
        generate, trainer.outputs, trainer.sigmas = rollouts.generate, [], set()

        def keep(**options):
            trainer.outputs.append(generate(**options))
            if hasattr(rollouts, "_pushed"):
                trainer.sigmas.add((trainer.model.training, rollouts._pushed.noise.sigma))
            return trainer.outputs[-1]

        trainer.vllm_generation.generate = keep
        return trainer

    return make


@pytest.fixture(scope="module")
def inside(running, make_module_trainer, watched, tmp_path_factory):
    """Train in process, for the result that every other run must reach; the server starts meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.estimates, "sequences", lambda training: 1)
        trainer = watched(make_module_trainer, tmp_path_factory.mktemp("inside"))
    trainer.norms = {name: norm.detach().clone() for name, norm in trainer.vllm_generation._snapshot().norms.items()}
    trainer.train()
    trainer.vllm_generation.close()
    return trainer


@pytest.fixture
def against(running, inside, make_trainer, watched, tmp_path):
    """Return against(**settings), which makes a trainer with the server's rollouts."""

    def make(**settings):
        assert until(lambda: answers(running.url), 500), running.process.log.read_text()[-4000:]
        # Wait twice as long as by default, because the server may restart while all other tests run.
        mode = {"vllm_mode": "server", "vllm_server_base_url": running.url, "vllm_server_timeout": 500}
        return watched(make_trainer, tmp_path / "run", **{**mode, **settings})

    return make


@pytest.fixture
def same(inside, read_metrics):
    """Return a check that a run in ``folder`` ended in the bits, metrics and rewards of the one in process."""

    def check(folder):
        assert read_metrics(folder) == read_metrics(inside)
        for name in ("adapter_model.safetensors", "norms.safetensors"):
            ours, theirs = (load_file(Path(of) / "checkpoint-3" / name) for of in (folder, inside.args.output_dir))
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[key].numpy(), theirs[key].numpy()) for key in theirs)
        assert any(not np.array_equal(theirs[key].numpy(), norm.numpy()) for key, norm in inside.norms.items())

    return check


@pytest.mark.slow
def test_a_server_that_drafts_gives_the_bits_of_drafts_in_process(
    serve_policy, running, watched, make_trainer, hold_port, read_metrics, tmp_path, monkeypatch
):
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    url = f"http://127.0.0.1:{(port := hold_port())}"
    server = serve_policy(running.model, port, *ALONE, "--speculative-config", json.dumps(drafts))
    with monkeypatch.context() as patch:
        patch.setattr(engine.estimates, "sequences", lambda training: 1)
        here = watched(make_trainer, tmp_path / "here", vllm_speculative_config=drafts)
    here.train()
    here.vllm_generation.close()
    assert until(lambda: server.poll() is not None or answers(url), 500), server.log.read_text()[-4000:]
    there = watched(make_trainer, tmp_path / "there", vllm_mode="server", vllm_server_base_url=url)
    there.train()
    assert read_metrics(there) == read_metrics(here)
    assert max(line.get("logp_diff_mean", 0) for line in read_metrics(here)) < 0.03


def answers(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=PATIENCE).is_success


def at_first_answer(trainer, rollout, act):
    """Call ``act()`` when the first completion of a rollout has come and the others are being computed."""
    client, done = trainer.vllm_generation._client, []
    one = client._one

    async def ask(*args):
        answer = await one(*args)
        if trainer.rollout() == rollout and not done:
            done.append(time.monotonic())
            act()
        return answer

    client._one = ask
    return done


def test_a_silent_server_ends_the_run_in_time_and_the_run_resumes_to_the_bits_of_one_in_process(
    against, running, inside, same, capfd, resume
):
    trainer = against(vllm_server_timeout=5)  # longer than a busy machine stays silent
    stopped = at_first_answer(trainer, 1, lambda: os.killpg(running.process.pid, signal.SIGSTOP))
    try:
        with pytest.raises(ServerLostError) as lost:
            trainer.train()
        assert 1 < time.monotonic() - stopped[0] < PATIENCE, "neither at once nor after 500 s"
    finally:
        os.killpg(running.process.pid, signal.SIGCONT)
    assert running.url in str(lost.value) and "has not answered for 5 s" in str(lost.value)
    assert f"nothing up to {trainer.args.output_dir}/checkpoint-1 is lost: go on from it with --res" in str(lost.value)
    assert "waiting for it for up to 5 s" in capfd.readouterr().err
    again = against()
    resume(again)
    assert again.outputs == inside.outputs[-len(again.outputs) :] and len(again.outputs) > 3, "it asks more than once"
    logprobs = [value for output in again.outputs for steps in output[2] for (value,) in steps]
    assert all(float(np.float32(value)) == value for value in logprobs) and len(set(logprobs)) > 100
    assert trainer.sigmas | again.sigmas == {(True, 0.0), (True, 0.1), (False, 0.0)}, "no noise in an evaluation"
    same(again.args.output_dir)


@pytest.mark.slow  # test_server_replies.py has restarts without a server
def test_a_server_that_is_killed_and_started_again_ends_the_run_in_the_same_bits(against, running, same, capfd):
    trainer = against()
    before = running.process

    def kill():
        os.killpg(before.pid, signal.SIGKILL)
        before.wait()
        running.restart()

    killed = at_first_answer(trainer, 1, kill)
    trainer.train()
    assert killed and before.poll() == -signal.SIGKILL
    said = capfd.readouterr().err
    waited = [float(seconds) for seconds in re.findall(r"answers, after ([\d.]+) s", said)]
    assert waited and 0 <= sum(waited) <= time.monotonic() - killed[0] + 0.1
    assert "does not answer" in said and "was restarted: the policy is pushed again" in said
    same(trainer.args.output_dir)


def test_turns_against_a_server_have_the_bits_of_those_in_process(
    against, make_module_trainer, watched, read_metrics, tmp_path, monkeypatch
):
    settings = {"max_completion_length": 40, "max_tool_calling_iterations": 3, "max_steps": 2, "save_steps": 2}
    settings |= {"train_norms": False, "eval_strategy": "no"}
    settings |= {"turns": {"tools": [calling.double]}, "generation_kwargs": {"stop_token_ids": calling.ENDS}}
    with monkeypatch.context() as patched:
        patched.setattr(engine.estimates, "sequences", lambda training: 1)
        inside = watched(make_module_trainer, tmp_path / "inside", **settings)
    inside.train()
    inside.vllm_generation.close()
    trainer = against(**settings)
    trainer.train()
    records = read_metrics(trainer)
    assert records == read_metrics(inside) and all(record["turns"] > 1 for record in records)
    ours, theirs = (load_file(Path(of.args.output_dir) / CHECKPOINT) for of in (trainer, inside))
    assert all(np.array_equal(ours[name].numpy(), theirs[name].numpy()) for name in ours)


OVERLAP = {"overlap": 1, "dynamic_sampling": False, "max_steps": 4, "train_norms": False, "eval_strategy": "no"}
OVERLAP |= {"max_completion_length": 16}


def overlapped(trainer, lines):
    """Check that a run with OVERLAP was a rollout ahead, and that engine and trainer agree on one adapter."""
    assert [line["adapter_age"] for line in lines] == [0, 1, 1, 1]
    assert [line["noisy_norms"] for line in lines] == [0, 0, 4, 4] and trainer.vllm_generation.version == 4
    differences = [line["logp_diff_mean"] for line in lines]  # of the adapter and the noise that sampled
    assert all(0 < difference < 0.03 for difference in differences), differences
    assert min(line["logp_staleness_mean"] for line in lines[1:]) > 0.05, "steps of 1e-2 move the adapter far"
    return load_file(Path(trainer.args.output_dir) / "checkpoint-4" / "adapter_model.safetensors")


def test_promise_06_engine_and_trainer_agree_a_rollout_ahead(against, resume, read_metrics):
    whole = against(**OVERLAP)
    whole.train()
    lines = read_metrics(whole)
    theirs = overlapped(whole, lines)
    resumed = against(**OVERLAP)
    resume(resumed, Path(whole.args.output_dir) / "checkpoint-2")
    assert read_metrics(resumed) == lines
    ours = load_file(Path(whole.args.output_dir) / "checkpoint-4" / "adapter_model.safetensors")
    assert all(np.array_equal(ours[name].numpy(), theirs[name].numpy()) for name in theirs)


@pytest.mark.slow
def test_a_server_killed_under_a_rollout_in_flight_changes_nothing(against, running, read_metrics, capfd):
    whole = against(**OVERLAP)
    whole.train()
    lines, theirs = read_metrics(whole), overlapped(whole, read_metrics(whole))
    shutil.rmtree(whole.args.output_dir)
    trainer, before, killed = against(**OVERLAP), running.process, []
    client, asked, restarted = trainer.vllm_generation._client, threading.Event(), threading.Event()
    one = client._one

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **named):
            if state.global_step == 2:  # the adapter has moved since the third rollout began
                assert asked.wait(PATIENCE)
                killed.append(os.killpg(before.pid, signal.SIGKILL))
                before.wait()
                running.restart()
                restarted.set()

    async def ask(*given):
        answer = await one(*given)
        if trainer.vllm_generation._seeds._rollout == 2 and not killed:
            asked.set()
            assert restarted.wait(PATIENCE)
        return answer

    client._one = ask
    trainer.add_callback(Kill())
    trainer.train()
    assert killed and "was restarted: the policy is pushed again" in capfd.readouterr().err
    ours = overlapped(trainer, read_metrics(trainer))
    assert read_metrics(trainer) == lines
    assert all(np.array_equal(ours[name].numpy(), theirs[name].numpy()) for name in theirs)


def test_a_rollout_keeps_to_the_recipes_length_and_counts_all_of_it(against, monkeypatch):
    rollouts = against(vllm_max_model_length=32, max_completion_length=16).vllm_generation
    rollouts.begin(0, None)
    prompts, began = [[5] * 24] * 8, time.perf_counter()
    first = rollouts.generate(prompts=prompts, images=None, num_generations=4)[1]
    assert max(map(len, first)) == 8, "of the 16 of max_completion_length and the 40 that the server has room for"
    seconds = rollouts.seconds
    second = rollouts.generate(prompts=prompts[:1], images=None, num_generations=4)[1]
    assert rollouts.tokens == sum(map(len, first + second))
    assert 0 < seconds < rollouts.seconds < time.perf_counter() - began
    rollouts.begin(0, None)
    assert rollouts.tokens == rollouts.seconds == 0
    monkeypatch.setattr(rollouts, "_accelerator", SimpleNamespace(process_index=1))
    others = rollouts.generate(prompts=prompts, images=None, num_generations=4)[1]
    assert others != first, "the second process draws answers of its own"


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
        {"vllm_max_model_length": 128},
        "qwen2",
        "tokens and the recipe's have 128; start it with --max-model-l",
    ),
    "length of a token and an answer": (
        {"vllm_max_model_length": None, "max_completion_length": 64},
        "qwen2",
        "tokens and the recipe's have 65; start it with --max-model-l",
    ),
    "routes": ({"vllm_server_base_url": "{url}/elsewhere"}, "qwen2", "has no /v1/qerl: start it, with the plugin inst"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_server_that_is_not_what_the_recipe_needs_is_refused_by_name(
    case, running, make_trainer, make_nvfp4, monkeypatch
):
    settings, architecture, text = OTHERS[case]
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


# agents that own their loop

AGENTS = {name: RUN[name] for name in ("noise_mode", "sigma_start", "sigma_end", "num_stages")}
AGENTS |= {"max_steps": 2, "max_completion_length": 40, "vllm_mode": "server", "vllm_server_timeout": 500}


@pytest.fixture
def train(running, make_trainer, read_metrics):
    """Return train(agent, reward, **settings), which trains with an agent and returns the trainer and the lines."""

    def run(agent, reward=digits, **settings):
        turns = {"rollout_func": rollout_of(agent)}
        settings = {**AGENTS, "vllm_server_base_url": running.url, **settings}
        trainer = make_trainer(running.model, reward, turns=turns, **settings)
        trainer.train()
        return trainer, read_metrics(trainer)

    return run


async def says(client, messages, tokens=8):
    answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=tokens)
    return answer.choices[0].message.content or ""


async def talks(client, prompt):
    """Ask twice; forget the first answer, which the second turn then lacks, where the prompt begins with 5 or more."""
    first = await says(client, prompt)
    history = [*prompt, {"role": "assistant", "content": first}]
    if int(prompt[-1]["content"][0]) >= 5:
        history = [{"role": "user", "content": "7"}]
    await says(client, [*history, {"role": "user", "content": "3"}], tokens=6)
    return len(history)


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_agents_calls_are_trained_on_as_they_were_sampled(overlap, train, monkeypatch):
    seen, outcomes = [], []
    inner = loss.MicroBatch.of
    monkeypatch.setattr(loss.MicroBatch, "of", lambda batch, **kw: seen.append(batch) or inner(batch, **kw))

    def reward(completions, outcome, **columns):
        outcomes.append(outcome)
        return digits(completions)

    trainer, lines = train(talks, reward, overlap=overlap)
    assert [line["noisy_norms"] for line in lines] == [0, 4]
    assert all(0 < line["logp_diff_mean"] < 0.05 for line in lines), (
        "ids, masks and log-probabilities are of one policy"
    )
    forked = [sum(kept == 1 for kept in of) / len(of) for of in outcomes]
    assert [line["forked"] for line in lines] == forked and max(forked) > 0 and min(forked) < 1
    assert trainer.vllm_generation.tokens > 0 < lines[0]["completion_length"] <= 14
    assert any((batch["tool_mask"] == 0).any() for batch in seen), "what lies between two turns is read, not learned"


def test_an_agent_samples_as_the_recipe_says_and_again_so(train):
    seen = []

    async def agent(client, prompt):
        seen.append(await says(client, prompt))

    def of(**settings):
        seen.clear()
        train(agent, max_steps=1, **settings)
        return sorted(seen)

    first = of()
    assert first == of() and len(set(first)) > 2, "each episode has a seed of its own, the same in each run"
    assert first != of(seed=1)
    assert len(set(of(top_k=1))) == 2, "two prompts"


def test_another_program_that_changes_the_policy_ends_the_rollout(train, running):
    async def agent(client, prompt):
        await says(client, prompt)
        PolicyClient(running.url, os.environ["QERL_ADMIN_TOKEN"]).clear_noise()

    with pytest.raises(AnotherPolicyError, match="was given another policy"):
        train(agent)


def test_an_agent_without_a_server_or_without_a_call_is_an_error(train, running, make_trainer):
    async def agent(client, prompt):
        return None

    with pytest.raises(ValueError, match="has no token that the policy has sampled"):
        train(agent)
    trainer = make_trainer(running.model, turns={"rollout_func": rollout_of(agent)}, max_steps=1)
    with pytest.raises(ValueError, match="an agent samples from a server; use vllm_mode: server"):
        trainer.train()
