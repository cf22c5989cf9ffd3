"""Train with turns on the scripted engine, whose answers follow from the history."""

import calling
import pytest
import scripted_rollouts
import torch
from digit_rewards import digits

SCRIPTED = {"rollout_engine": scripted_rollouts.NAME, "dtype": torch.float32, "max_steps": 1}


@pytest.fixture
def train(scripted, make_trainer, make_nvfp4, read_metrics, resume):
    """Return train(say, turns, reward, **settings), which trains a step; it returns the trainer and the lines.

    Without ``say`` the engine draws. ``before`` is called with the trainer, and ``checkpoint`` is one to resume from.
    """

    def run(say, turns=calling.TOOLS, reward=digits, before=lambda trainer: None, checkpoint=None, **settings):
        settings = {**SCRIPTED, "max_completion_length": 32, "vllm_max_model_length": 64, **settings}
        trainer = make_trainer(make_nvfp4("qwen2"), reward, turns=turns, **settings)
        trainer.vllm_generation.say = say
        before(trainer)
        resume(trainer, checkpoint)
        return trainer, read_metrics(trainer)

    return run
