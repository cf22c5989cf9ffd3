"""equal_groups and completion_clipped are what their names say, under every key that TRL measures them otherwise by.

Rewards of which no advantage can be computed are refused.
"""

import math
import re
from pathlib import Path

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


def up(completions, **columns):
    """Another for each answer; with ``down`` it comes to nothing."""
    return [float(i) for i in range(len(completions))]


def down(completions, **columns):
    return [-value for value in up(completions)]


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({"scale_rewards": "batch"}, [by_prompt, up, down]),  # a group has equal sums
        ({"multi_objective_aggregation": "normalize_then_sum"}, [by_prompt]),
    ],
    ids=["sums", "each"],
)
def test_a_run_whose_groups_are_all_equal_says_so_however_rewards_are_scaled(
    settings, rewards, make_trainer, make_nvfp4, read_metrics
):
    settings = {**settings, "max_steps": ROLLOUTS, "eval_strategy": "steps", "eval_steps": ROLLOUTS}
    trainer = make_trainer(make_nvfp4("qwen2"), rewards, **settings)
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


def cycle(completions, **columns):
    return [float(i % 3) for i in range(len(completions))]


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e17])
def test_a_reward_that_is_infinite_ends_the_run_before_the_step_and_is_named(value, make_trainer, make_nvfp4):
    """What an advantage cannot be computed of; None and NaN say that a reward does not apply, and go on."""

    def broken(completions, prompts, trainer_state, **columns):
        asked.append(prompts)
        of_one = [value, 0.5] if trainer_state.global_step == 1 else [None, math.nan]
        return [*of_one, *cycle(completions[2:])]

    asked, settings = [], {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(make_nvfp4("qwen2"), [cycle, broken], **settings)
    message = rf"the reward broken gave {value:g} to 1 of 8 completions, the first of them of the prompt "
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        trainer.train()
    assert repr(asked[-1][0]) in str(error.value) and "None where the reward does not apply" in str(error.value)
    assert trainer.state.global_step == 1
    assert [path.name for path in Path(trainer.args.output_dir).glob("checkpoint*")] == ["checkpoint-1"]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kl_is_the_mean_over_the_tokens_of_a_step_and_not_over_its_micro_batches(
    level, make_trainer, make_nvfp4, read_metrics
):
    """One completion a micro-batch, of 1 to 12 tokens, most of them masked; two steps a rollout."""
    settings = {"beta": 0.1, "use_bias_correction_kl": True, "importance_sampling_level": level}
    settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "steps_per_generation": 16}
    trainer = make_trainer(make_nvfp4("qwen2"), cycle, max_steps=4, mask_truncated_completions=True, **settings)
    seen, compute, logps = [], trainer._compute_loss, trainer._get_per_token_logps_and_entropies
    last = []
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: last.append(logps(*a, **k)) or last[-1]

    def watch(model, inputs):
        loss = compute(model, inputs)
        mask, now, old = inputs["completion_mask"].bool(), last[-1][0].detach(), inputs["old_per_token_logps"]
        ratio = (now - old).exp()
        if level == "sequence":
            ratio = (now - old)[mask].mean().exp() if mask.any() else 1.0
        x = inputs["ref_per_token_logps"] - now
        seen.append(((ratio * (x.exp() - 1 - x))[mask].sum().item(), int(mask.sum())))
        return loss

    trainer._compute_loss = watch
    trainer.train()
    steps = [seen[first : first + 8] for first in range(0, 32, 8)]
    assert any(0 in [tokens for _, tokens in step] for step in steps), "some micro-batch has no token"
    for record, step in zip(read_metrics(trainer), steps, strict=True):
        tokens = sum(number for _, number in step)
        assert ("kl" in record) == ("entropy" in record) == (tokens > 0)
        if tokens:
            assert record["kl"] == pytest.approx(sum(total for total, _ in step) / tokens, rel=1e-4, abs=1e-7)
    assert record["kl"] > 1e-4


def test_a_run_whose_completions_are_all_cut_off_and_masked_has_no_entropy_and_says_so(
    make_trainer, make_nvfp4, read_metrics
):
    endless = {"allowed_token_ids": [5, 6, 7, 8]}  # neither the end of a sequence nor padding
    settings = {"mask_truncated_completions": True, "generation_kwargs": endless}
    trainer = make_trainer(make_nvfp4("qwen2"), cycle, max_steps=5, **settings)
    with pytest.warns(UserWarning, match=r"5 rollouts all completions were cut off, .* max_completion_length \(12\)"):
        trainer.train()
    for step in read_metrics(trainer):
        assert (step["completion_clipped"], step["equal_groups"], step["grad_norm"]) == (1.0, 0.0, 0.0)
        assert not {"entropy", "kl", "logp_mismatch_mean"} & step.keys()
