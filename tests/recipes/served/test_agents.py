"""Test agents that own their loop, which sample from a server."""

import os

import pytest
from digit_rewards import digits

from qerl_recipes.rollout.agents import rollout_of
from qerl_recipes.rollout.server_link import AnotherPolicyError
from qerl_recipes.train import loss
from qerl_vllm_plugin.client import PolicyClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
AGENTS = {"noise_mode": "both", "sigma_start": 0.1, "sigma_end": 0.1, "num_stages": 1}
AGENTS |= {"max_steps": 2, "max_completion_length": 40, "vllm_mode": "server", "vllm_server_timeout": 500}


@pytest.fixture
def train(running, make_trainer, read_metrics):
    """Return train(agent, reward, **settings), which trains with an agent and returns the trainer and the lines."""

    def run(agent, reward=digits, **settings):
        running.ready()
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
