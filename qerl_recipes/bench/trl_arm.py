"""Time steps of stock TRL: arm ``trl_stock`` of ``qerl bench train``, in a process of its own.

The trainer is built as TRL's script for GRPO builds it, and nothing of this project takes part but prompts and reward.
The clock is read around TRL's methods.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from qerl_recipes.machine.environment import prepare

if __name__ == "__main__":
    prepare()  # before anything imports torch or vllm
    os.environ["VLLM_PLUGINS"] = ""  # vLLM as it is without this project

import torch
import trl
from trl.generation import vllm_generation

from qerl_recipes.bench.arms import Figures, answer
from qerl_recipes.bench.train_arm import FROM_METRICS, TimedSteps, measure, random_prompts, random_reward
from qerl_recipes.train.metrics import named
from qerl_recipes.train.stock_trl import help_on_a_cpu


class TimedTRLSteps(TimedSteps):
    """Time the steps of TRL's own trainer."""

    def sleeping(self, engine: Any) -> list[tuple[Any, str]]:
        return [(engine.llm, "sleep"), (engine.llm, "wake_up")]

    def metrics(self, output_dir: str) -> dict[str, float | None]:
        """Return a place for what TRL logs of this step afterwards."""
        return {"logp_diff_mean": None}

    def on_log(self, args: Any, state: Any, control: Any, logs: Figures, **kwargs: Any) -> None:
        if "train_runtime" not in logs:  # of the whole training, at its end
            figures = {**logs, **named({name: [value] for name, value in logs.items() if isinstance(value, float)})}
            self.answers[-1]["metrics"] = {name: figures[name] for name in FROM_METRICS if name in figures}


def begin(request: Figures) -> tuple[trl.GRPOTrainer, type[TimedSteps], AbstractContextManager[None]]:
    """Build TRL's trainer as its script ``trl grpo`` does."""
    if not torch.cuda.is_available():
        vllm_generation.LLM = partial(vllm_generation.LLM, **help_on_a_cpu())
    settings, model = trl.TrlParser((trl.GRPOConfig, trl.ModelConfig)).parse_args_and_config(request["flags"])
    settings.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    trainer = trl.GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=random_reward,
        args=settings,
        train_dataset=random_prompts(**request["data"]),
        peft_config=trl.get_peft_config(model),
    )
    return trainer, TimedTRLSteps, nullcontext()


if __name__ == "__main__":
    answer(lambda request, figures: measure(request, figures, begin))
