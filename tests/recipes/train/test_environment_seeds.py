"""Test that environments of a group start alike, and again so in a resumed run."""

import random
from pathlib import Path
from typing import ClassVar

import calling
import pytest
import torch
from accelerate import Accelerator
from digit_rewards import digits
from safetensors.torch import load_file
from trl import GRPOTrainer

from qerl_recipes.train.turns import TurnsTrainer


class Dice:
    """Throw dice: what the policy sees and what it scores follow from the seed, and from how often it throws."""

    seeds: ClassVar[list[int]] = []  # of all resets

    def reset(self, seed: int, **row) -> str:
        Dice.seeds.append(seed)
        self.dice = random.Random(seed)
        return "".join(str(self.dice.randrange(10)) for _ in range(3))

    def double(self, number: int) -> str:
        """Throw.

        Args:
            number: How often.
        """
        return "".join(str(self.dice.randrange(10)) for _ in range(number))

    def get_reward(self) -> float:
        return self.dice.random()


RUN = {"max_completion_length": 24, "vllm_max_model_length": 64, "dtype": torch.float32, "temperature": 2.0}


@pytest.fixture
def train(make_trainer, make_nvfp4, monkeypatch, resume):
    """Return train(folder, checkpoint, environment, **settings), which returns the folder and seeds of all resets."""

    def run(folder, checkpoint=None, **settings):
        monkeypatch.setattr(Dice, "seeds", [])
        settings = {**RUN, "output_dir": str(folder), **settings}
        trainer = make_trainer(make_nvfp4("qwen2"), digits, turns={"environment_factory": Dice}, **settings)
        trainer.eval_dataset = calling.prompts(2)
        resume(trainer, checkpoint)
        return Path(folder), Dice.seeds

    return run


def test_promise_08_a_resumed_run_meets_the_same_environments(train, read_metrics, tmp_path):
    steps = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    whole, seeds = train(tmp_path / "whole", **steps)
    groups = [seeds[i : i + 4] for i in range(0, len(seeds), 4)]
    assert len(groups) == 6 and all(len(set(group)) == 1 for group in groups), "one seed a group of 4"
    assert len(set(seeds)) == 6, "each group of each rollout has its own"
    resumed, rest = train(tmp_path / "resumed", str(whole / "checkpoint-1"), **steps)
    assert rest == seeds[8:]
    lines = read_metrics(whole)
    assert read_metrics(resumed)[-2:] == lines[-2:] and all(0 <= line["tool_failures"] < 1 for line in lines)
    ours, theirs = (load_file(run / "checkpoint-3/adapter_model.safetensors") for run in (whole, resumed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_fresh_prompts_and_evaluations_have_seeds_of_their_own(train, tmp_path):
    sampling = {
        "dynamic_sampling": True,
        "dynamic_sampling_max_rounds": 1,
        "max_steps": 2,
        "dynamic_sampling_metric": "Dice",
    }
    _, alone = train(tmp_path / "alone", max_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dice, "get_reward", lambda self: 1.0)  # no group teaches anything, and all are replaced
        _, refilled = train(tmp_path / "refilled", **sampling)
    assert len(refilled) > len(alone) and len(set(refilled)) == len(refilled) // 4
    assert refilled[:8] == alone[:8] and set(alone) < set(refilled)
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "num_generations_eval": 2}
    _, evaluated = train(tmp_path / "evaluated", **evaluation)
    kept = [seed for seed in evaluated if seed in alone]
    others = [seed for seed in evaluated if seed not in alone]
    assert kept == alone, "an evaluation changes nothing in the rollouts"
    assert others[: len(others) // 2] == others[len(others) // 2 :], "each evaluation meets the same environments"
    assert others[0] == others[1] != others[2] == others[3], "and one for each problem"


def test_each_process_has_the_seeds_of_its_own_rows(make_trainer, make_nvfp4, monkeypatch):
    trainer = make_trainer(make_nvfp4("qwen2"), digits, turns={"environment_factory": Dice}, **RUN)
    drawn = {}
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lambda self, rows: rows)
    trainer.model.train()
    for rank in (0, 1):
        monkeypatch.setattr(Accelerator, "process_index", property(lambda self, rank=rank: rank))
        trainer.starts.open(0)
        rows = TurnsTrainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * 8)
        drawn[rank] = [row["seed"] for row in rows]
    assert [len(set(seeds)) for seeds in drawn.values()] == [2, 2] and not set(drawn[0]) & set(drawn[1])
