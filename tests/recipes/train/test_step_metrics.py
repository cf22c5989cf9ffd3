"""What a run says of itself: metrics.jsonl, and a word where it learns nothing or its noise ends elsewhere."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from qerl_recipes.rollout import answers, engine
from qerl_recipes.train import step_metrics
from qerl_recipes.train import trainer as training


def half(completions, **columns):
    """The same for every completion, so that there is nothing to learn."""
    return [0.5] * len(completions)


@pytest.fixture(scope="module")
def silent_run(make_module_trainer, make_nvfp4):
    """Five rollouts of two steps each whose rewards are all equal, with noise and evaluations -> (trainer, words)."""
    trainer = make_module_trainer(
        make_nvfp4("qwen2"),
        half,
        max_steps=10,
        steps_per_generation=2,
        per_device_train_batch_size=4,
        noise_mode="shared",
        sigma_start=0.02,
        sigma_end=0.01,
        num_stages=6,
        eval_strategy="steps",
        eval_steps=5,
        eval_on_start=True,
        save_strategy="steps",
        save_steps=0.1,
        disable_tqdm=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return trainer, [str(warning.message) for warning in caught]


def records(trainer):
    lines = (Path(trainer.args.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_an_evaluation_has_a_line_of_its_own_after_the_steps_it_follows(silent_run):
    trainer, _ = silent_run
    lines = records(trainer)
    kinds = [(line["step"], any(key.startswith("eval/") for key in line)) for line in lines]
    steps = [(step, False) for step in range(1, 11)]
    assert kinds == [(0, True), *steps[:5], (5, True), *steps[5:], (10, True)]
    for line in (line for line in lines if "eval/reward" in line):
        assert all(key == "step" or key.startswith("eval/") for key in line)
        assert (line["eval/reward"], line["eval/rewards/half/mean"], line["eval/problems"]) == (0.5, 0.5, 8)
        assert 0 < line["eval/completion_length"] <= 12
    assert {"loss", "reward", "grad_norm"} <= lines[1].keys()


def test_the_console_shows_each_evaluation(make_trainer, make_nvfp4, capsys):
    trainer = make_trainer(make_nvfp4("qwen2"), half, max_steps=1, eval_strategy="epoch", disable_tqdm=False)
    trainer.evaluate()
    assert "held-out problems after step 0: reward 0.5 (half 0.5)\n" in capsys.readouterr().out


def test_a_run_that_learns_nothing_says_so_once_naming_its_rewards(silent_run):
    _, words = silent_run
    (word,) = [word for word in words if "nothing is learnt" in word]
    assert "in 5 rollouts no group had rewards that differ (means of the last rollout: half 0.5)" in word


def test_noise_that_does_not_reach_its_end_is_said_with_the_rollouts_it_takes(silent_run):
    """Stages 0, 1, 2, 4, 5 of 6: the last sigma is 0.02 * (1 / 2) ** (4 / 5) = 0.01149."""
    _, words = silent_run
    (word,) = [word for word in words if "sigma_end" in word]
    assert "the noise ends at sigma 0.011487, and sigma_end: 0.01 is never reached" in word
    assert "num_stages: 6 that takes 7 rollouts" in word and "this run has 5 rollouts" in word


def test_a_share_of_all_steps_as_save_steps_is_rounded_up_to_whole_rollouts(silent_run):
    trainer, _ = silent_run  # 0.1 of 10 is every step, and a rollout serves 2
    saved = sorted(int(folder.name.partition("-")[2]) for folder in Path(trainer.args.output_dir).glob("checkpoint-*"))
    assert saved == [2, 4, 6, 8, 10]


def test_seconds_and_speeds_are_of_their_own_part_of_a_step(make_trainer, make_nvfp4, monkeypatch):
    """Two rollouts of two steps each, of a clock that goes on where the engine, the rewards and the loss are at work:
    for 4, 2 and 3 seconds."""
    clock, generate = SimpleNamespace(now=100.0), answers.generate
    clock.perf_counter = lambda: clock.now
    sampled, learnt = [], []

    def rewards(completion_ids, **columns):
        clock.now += 2
        sampled.append(sum(map(len, completion_ids)))
        return [float(i) if i < 4 else 0.5 for i in range(8)]  # there is nothing to learn from the second group

    def ask(*given):
        clock.now += 4
        return generate(*given)

    for module in (engine, training, step_metrics):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(answers, "generate", ask)
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
    assert 0 < sum(step["silent_rows"] for step in found) < 4 and sum(learnt) > 0
    assert [step["learning_rate"] for step in found] == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
