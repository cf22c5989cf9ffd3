"""Test what a run reports about itself.

That is metrics.jsonl, and warnings where a run learns nothing or its noise stops short of sigma_end.
frac_reward_zero_std and completion_clipped must mean what their names say under every key that changes how TRL measures
them.
"""

import json
import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qerl_recipes.rollout import sampling
from qerl_recipes.train import loss, metrics
from qerl_recipes.train import trainer as training

NAN = float("nan")
ROLLOUTS = 5  # without anything to learn, until the run warns


def test_a_step_weighs_micro_batches_by_what_they_hold():
    sums, device = metrics.StepSums(), torch.device("cpu")
    sums.add(loss.Measured({loss.MISMATCH: (torch.tensor(6.0), torch.tensor(2)), "share": (3, 4)}))
    sums.add(loss.Measured({loss.MISMATCH: (torch.tensor(0.0), torch.tensor(0)), "empty": (0.0, 0)}))  # all masked
    for values in ([2.0, 0.5], [1.0, 3.0], [-torch.inf, torch.inf]):
        largest, smallest = map(torch.tensor, values)
        sums.add(loss.Measured(largest={"max": largest, "none": -smallest * torch.inf}, smallest={"min": smallest}))
    others = {  # the other process's empty, mismatch and share, and its largest of max, -min and none
        3: torch.tensor([[[0.0, 0.0], [2.0, 6.0], [5.0, 4.0]]], dtype=torch.float64),
        2: torch.tensor([[1.5, -0.75, -torch.inf]], dtype=torch.float64),
    }
    found = sums.take(lambda own: torch.cat([own, others[own.dim()]]), device)
    assert found == {loss.MISMATCH: 1.0, "share": 1.0, "max": 2.0, "min": 0.5}
    sums.add(loss.Measured({loss.MISMATCH: (2.0, 1)}, largest={loss.LARGEST_MISMATCH: torch.tensor(torch.inf)}))
    assert sums.take(lambda own: own, device) == {loss.MISMATCH: 2.0, loss.LARGEST_MISMATCH: torch.inf}
    assert sums.take(lambda own: own, device) == {}


@pytest.mark.parametrize(
    ("rewards", "weights", "summed", "apart"),
    [
        ([[1, 0], [1, 0], [3, 0], [3, 0]], [1, 1], 1.0, 1.0),  # two groups of two
        ([[1, 0], [1, 0], [3, 0], [4, 0]], [1, 1], 0.5, 0.5),
        ([[1, 0], [0, 1], [3, 0], [3, 0]], [1, 1], 1.0, 0.5),  # the sums are equal, the rewards are not
        ([[1, 0], [1, 5], [3, 0], [3, 9]], [1, 0], 1.0, 1.0),  # a reward of weight 0 teaches nothing
        ([[1, NAN], [1, NAN], [NAN, NAN], [NAN, NAN]], [1, 1], 1.0, 1.0),
        ([[1, NAN], [2, NAN], [NAN, NAN], [7, 1]], [1, 1], 0.5, 0.5),
    ],
)
def test_groups_are_equal_by_the_sum_or_by_each_reward(rewards, weights, summed, apart):
    values, factors = torch.tensor(rewards, dtype=torch.float32), torch.tensor(weights, dtype=torch.float32)
    assert metrics.frac_reward_zero_std(values, factors, 2, is_summed=True) == summed
    assert metrics.frac_reward_zero_std(values, factors, 2, is_summed=False) == apart


@pytest.mark.parametrize(
    ("ids", "stops", "is_cut"),
    [
        ([5, 9], {}, True),
        ([5, 2], {}, False),
        ([2, 9], {}, True),  # only the last token ends a completion
        ([5, 9], {"stop": "=4"}, False),
        ([5, 9], {"stop": ["x", "=4"]}, False),
        ([5, 9], {"stop": ["4="]}, True),
        ([5, 9], {"stop_token_ids": [7, 9]}, False),
        ([5, 9], {"stop_token_ids": [5]}, True),
    ],
)
def test_a_completion_is_cut_off_that_nothing_has_ended(ids, stops, is_cut):
    padded, mask = torch.tensor([[*ids, 0], [4, 5, 2]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    decode = {tuple(ids): "2+2=4", (4, 5, 2): "4"}
    assert metrics.cut_off(padded, mask, {2, 3}, lambda row: decode[tuple(row)], stops).tolist() == [is_cut, False]
    assert metrics.has_stops(stops) == bool(stops)


def half(completions, **columns):
    """Give every completion the same reward, so that there is nothing to learn."""
    return [0.5] * len(completions)


@pytest.fixture(scope="module")
def silent_run(make_module_trainer, make_nvfp4):
    """Train five rollouts of two steps each, with equal rewards, noise and evaluations.

    Return the trainer and the words of its warnings.
    """
    trainer = make_module_trainer(
        make_nvfp4("qwen2"),
        half,
        max_steps=10,
        steps_per_generation=2,
        per_device_train_batch_size=4,
        noise_mode="both",
        sigma_start=0.02,
        sigma_end=0.01,
        num_stages=6,
        eval_strategy="steps",
        eval_steps=5,
        eval_on_start=True,
        num_generations_eval=2,
        save_strategy="steps",
        save_steps=0.1,
        warmup_steps=10,
        disable_tqdm=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return trainer, [str(warning.message) for warning in caught]


def records(trainer):
    lines = (Path(trainer.args.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_an_evaluation_has_a_line_after_its_step(silent_run):
    trainer, _ = silent_run
    lines = records(trainer)
    kinds = [(line["step"], any(key.startswith("eval/") for key in line)) for line in lines]
    steps = [(step, False) for step in range(1, 11)]
    assert kinds == [(0, True), *steps[:5], (5, True), *steps[5:], (10, True)]
    for line in (line for line in lines if "eval/reward" in line):
        assert all(key == "step" or key.startswith("eval/") for key in line)
        assert (line["eval/reward"], line["eval/rewards/half/mean"], line["eval/problems"]) == (0.5, 0.5, 4)
        assert 0 < line["eval/completion_length"] <= 12
    assert {"loss", "reward", "grad_norm"} <= lines[1].keys()


def test_a_run_that_learns_nothing_says_so_once(silent_run):
    (word,) = [word for word in silent_run[1] if "no learning signal" in word]
    assert "in 5 rollouts: rewards are identical within every group (means of the last rollout: half 0.5)" in word


def test_noise_that_does_not_reach_its_end_is_said(silent_run):
    """Check a run with stages 0, 1, 2, 4 and 5 of 6: its last sigma is 0.02 * (1 / 2) ** (4 / 5) = 0.01149."""
    (word,) = [word for word in silent_run[1] if "sigma_end" in word]
    assert "the noise ends at sigma 0.011487, and sigma_end: 0.01 is never reached" in word
    assert "num_stages: 6 that takes 7 rollouts" in word and "this run has 5 rollouts" in word


def test_a_warm_up_that_does_not_reach_its_end_is_said(silent_run):
    (word,) = [word for word in silent_run[1] if "warmup_steps" in word]
    assert "warmup_steps: 10, and this run has 10 steps: it never reaches learning_rate: " in word
    trainer, _ = silent_run
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.warn_if_warmup_ends_late(11, trainer.args)


def test_a_share_as_save_steps_is_rounded_to_rollouts(silent_run):
    trainer, _ = silent_run  # 0.1 of 10 steps is every step, but a rollout serves 2
    saved = sorted(int(folder.name.partition("-")[2]) for folder in Path(trainer.args.output_dir).glob("checkpoint-*"))
    assert saved == [2, 4, 6, 8, 10]


def test_seconds_and_speeds_are_of_their_part_of_a_step(make_trainer, make_nvfp4, monkeypatch):
    """Check two rollouts of two steps each on a fake clock.

    The clock advances 4 seconds for the engine, 2 for the rewards and 3 for the loss.
    """
    clock, generate = SimpleNamespace(now=100.0), sampling.generate
    clock.perf_counter = clock.monotonic = lambda: clock.now
    sampled, learnt = [], []

    def rewards(completion_ids, **columns):
        clock.now += 2
        sampled.append(sum(map(len, completion_ids)))
        return [float(i) if i < 4 else 0.5 for i in range(8)]  # there is nothing to learn from the second group

    def ask(*given):
        clock.now += 4
        return generate(*given)

    for module in (sampling, training):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(sampling, "generate", ask)
    settings = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 4}
    trainer = make_trainer(make_nvfp4("qwen2"), rewards, **settings)
    compute = trainer.compute_loss

    def learn(model, inputs, *args, **options):
        clock.now += 3
        rows = inputs["prompt_mask"].sum(dim=1) + inputs["completion_mask"].sum(dim=1)
        learnt.append(int(rows[inputs["advantages"] != 0].sum()))
        return compute(model, inputs, *args, **options)

    trainer.compute_loss = learn
    trainer.train()
    found = records(trainer)
    assert [step["step_seconds"] for step in found] == [9, 3, 9, 3]
    assert [step.get("rollout_tokens_per_s") for step in found] == [sampled[0] / 4, None, sampled[1] / 4, None]
    assert [step["train_tokens_per_s"] for step in found] == pytest.approx([tokens / 3 for tokens in learnt])
    assert 0 < sum(step["frac_zero_advantage"] for step in found) < 4 and sum(learnt) > 0
    assert [step["learning_rate"] for step in found] == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])


def by_prompt(completions, prompts, **columns):
    """Give all answers to a prompt the same reward: the rewards of a batch differ, those of a group do not."""
    return [float(sum(map(ord, prompt))) for prompt in prompts]


def up(completions, **columns):
    """Give each answer another reward; together with ``down`` the sum is zero."""
    return [float(i) for i in range(len(completions))]


def down(completions, **columns):
    return [-value for value in up(completions)]


def test_groups_of_equal_rewards_are_said_however_rewards_are_scaled(make_trainer, make_nvfp4, read_metrics):
    settings = {"scale_rewards": "batch", "max_steps": ROLLOUTS, "eval_strategy": "steps", "eval_steps": ROLLOUTS}
    trainer = make_trainer(make_nvfp4("qwen2"), [by_prompt, up, down], **settings)
    with pytest.warns(UserWarning, match=r"no learning signal in 5 rollouts: rewards are identical"):
        trainer.train()
    *steps, evaluation = read_metrics(trainer)
    assert [step["grad_norm"] for step in steps] == [0.0] * ROLLOUTS
    assert all(step["reward_std"] > 0 for step in steps), "the batch differs"
    assert [step["frac_reward_zero_std"] for step in steps] == [1.0] * ROLLOUTS
    assert evaluation["eval/frac_reward_zero_std"] == 1.0


def test_the_groups_of_an_evaluation_have_a_size_of_their_own(make_trainer, make_nvfp4, read_metrics):
    def in_pairs(completions, **columns):
        return [float(i // 2 % 2) for i in range(len(completions))]

    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "max_steps": 1}
    trainer = make_trainer(make_nvfp4("qwen2"), in_pairs, **evaluation)
    trainer.train()
    step, evaluated = read_metrics(trainer)
    assert (step["frac_reward_zero_std"], evaluated["eval/frac_reward_zero_std"]) == (0.0, 1.0)


def test_a_stop_string_cuts_nothing_off(make_trainer, make_nvfp4, read_metrics):
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


@pytest.mark.parametrize("value", [math.inf, 1e17])
def test_an_infinite_reward_ends_the_run_before_the_step(value, make_trainer, make_nvfp4):
    """Check rewards from which no advantage can be computed.

    None and NaN say that a reward does not apply, and the run goes on.
    """

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


def test_kl_is_the_mean_over_the_tokens_of_a_step(make_trainer, make_nvfp4, read_metrics):
    """Check micro-batches of one completion of 1 to 12 tokens, with two steps a rollout, and ratios of sequences.

    Most of the completions are masked.
    """
    settings = {"beta": 0.1, "use_bias_correction_kl": True, "importance_sampling_level": "sequence"}
    settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "steps_per_generation": 16}
    trainer = make_trainer(make_nvfp4("qwen2"), cycle, max_steps=4, mask_truncated_completions=True, **settings)
    seen, compute, logps = [], trainer._compute_loss, trainer._get_per_token_logps_and_entropies
    last = []
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: last.append(logps(*a, **k)) or last[-1]

    def watch(model, inputs):
        value = compute(model, inputs)
        mask, now, old = inputs["completion_mask"].bool(), last[-1][0].detach(), inputs["old_per_token_logps"]
        ratio = (now - old)[mask].mean().exp() if mask.any() else 1.0
        x = inputs["ref_per_token_logps"] - now
        seen.append(((ratio * (x.exp() - 1 - x))[mask].sum().item(), int(mask.sum())))
        return value

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


def test_completions_all_cut_off_and_masked_are_said(make_trainer, make_nvfp4, read_metrics):
    endless = {"allowed_token_ids": [5, 6, 7, 8]}  # excludes end of sequence and padding
    settings = {"mask_truncated_completions": True, "generation_kwargs": endless}
    trainer = make_trainer(make_nvfp4("qwen2"), cycle, max_steps=5, **settings)
    with pytest.warns(UserWarning, match=r"5 rollouts: all completions were cut off, .* max_completion_length \(12\)"):
        trainer.train()
    for step in read_metrics(trainer):
        assert (step["completion_clipped"], step["frac_reward_zero_std"], step["grad_norm"]) == (1.0, 0.0, 0.0)
        assert not {"entropy", "kl", "logp_diff_mean"} & step.keys()


def test_a_file_begins_with_the_lines_that_are_kept(tmp_path):
    file = metrics.MetricsFile(tmp_path)
    file.restart()
    for step in (1, 2, 3):
        file.append({"step": step, "reward": NAN})
    with open(file.path, "a") as torn:
        torn.write('{"step": 4, "rew')
    file.restart([{"step": 1, "reward": None}])
    assert file.path.read_text() == '{"step": 1, "reward": null}\n'
