"""equal_groups and completion_clipped are what their names say, under every key that TRL measures them otherwise by."""

import pytest
import torch

from qerl_recipes.train.rollout_measures import equal_groups, is_stopped

NAN = float("nan")
ROLLOUTS = 5  # of nothing to learn, until that is said


@pytest.mark.parametrize(
    ("rewards", "weights", "summed", "apart"),
    [
        ([[1, 0], [1, 0], [3, 0], [3, 0]], [1, 1], 1.0, 1.0),  # two groups of two
        ([[1, 0], [1, 0], [3, 0], [4, 0]], [1, 1], 0.5, 0.5),
        ([[1, 0], [0, 1], [3, 0], [3, 0]], [1, 1], 1.0, 0.5),  # the sums are equal, the rewards are not
        ([[1, 0], [1, 5], [3, 0], [3, 9]], [1, 0], 1.0, 1.0),  # what has no weight teaches nothing
        ([[1, NAN], [1, NAN], [NAN, NAN], [NAN, NAN]], [1, 1], 1.0, 1.0),
        ([[1, NAN], [2, NAN], [NAN, NAN], [7, 1]], [1, 1], 0.5, 0.5),
    ],
)
def test_groups_are_equal_by_the_sum_or_by_each_reward(rewards, weights, summed, apart):
    values, factors = torch.tensor(rewards, dtype=torch.float32), torch.tensor(weights, dtype=torch.float32)
    assert equal_groups(values, factors, 2, is_summed=True) == summed
    assert equal_groups(values, factors, 2, is_summed=False) == apart


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"stop": "=4"}, True),
        ({"stop": ["x", "=4"]}, True),
        ({"stop": ["4="]}, False),
        ({"stop_token_ids": [7, 9]}, True),
        ({"stop_token_ids": [5]}, False),  # only the last token ends a completion
    ],
)
def test_a_completion_has_stopped_where_it_was_told_to(given, expected):
    assert is_stopped([5, 9], "2+2=4", given) == expected


def by_prompt(completions, prompts, **columns):
    """The same for all answers to a prompt, and another for the next: the rewards of a batch differ, no group's do."""
    return [float(sum(map(ord, prompt))) for prompt in prompts]


@pytest.mark.parametrize(
    "settings", [{"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}], ids=str
)
def test_a_run_whose_groups_are_all_equal_says_so_however_rewards_are_scaled(
    settings, make_trainer, make_nvfp4, read_metrics
):
    settings = {**settings, "max_steps": ROLLOUTS, "eval_strategy": "steps", "eval_steps": ROLLOUTS}
    trainer = make_trainer(make_nvfp4("qwen2"), by_prompt, **settings)
    with pytest.warns(UserWarning, match=r"nothing is learnt: in 5 rollouts .*rewards that differ"):
        trainer.train()
    *steps, evaluation = read_metrics(trainer)
    assert [step["grad_norm"] for step in steps] == [0.0] * ROLLOUTS
    assert all(step["reward_std"] > 0 for step in steps), "the batch differs"
    assert [step["equal_groups"] for step in steps] == [1.0] * ROLLOUTS
    assert evaluation["eval/equal_groups"] == 1.0


def test_a_completion_that_a_stop_string_has_ended_was_not_cut_off(make_trainer, make_nvfp4, read_metrics):
    seen = []

    def watch(completions, completion_ids, **columns):
        seen.append((completions, [len(ids) for ids in completion_ids]))
        return [float(i % 4) for i in range(len(completions))]

    trainer = make_trainer(make_nvfp4("qwen2"), watch, generation_kwargs={"stop": ["1", "+"]})
    trainer.train()
    ended = 0
    for step, (texts, lengths) in zip(read_metrics(trainer), seen, strict=True):
        stopped = ["1" in text or "+" in text for text in texts]
        cut = [not stop and length == 12 for stop, length in zip(stopped, lengths, strict=True)]
        assert step["completion_clipped"] == sum(cut) / len(cut)
        ended += sum(stopped)
    assert ended > 0
