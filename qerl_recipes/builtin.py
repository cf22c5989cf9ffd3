"""QeRL's own plugin: what recipes can name without installing anything else. Imports are made on use."""

from collections.abc import Mapping
from typing import Any

from qerl_recipes.hooks import DatasetLoader, NoiseSchedule, RewardFactory, RolloutEngine, implementation


@implementation
def qerl_rewards() -> Mapping[str, RewardFactory]:
    from qerl_recipes.rewards import FACTORIES

    return FACTORIES


@implementation
def qerl_datasets() -> Mapping[str, DatasetLoader]:
    from qerl_recipes.data import LOADERS

    return LOADERS


@implementation
def qerl_noise_schedules() -> Mapping[str, NoiseSchedule]:
    def exponential(rollout: int, rollouts: int, sigma_start: float, sigma_end: float, num_stages: int) -> float:
        from qerl_recipes.schedule import sigma

        return sigma(rollout, rollouts, sigma_start, sigma_end, num_stages)

    return {"exponential": exponential}


@implementation
def qerl_rollout_engines() -> Mapping[str, RolloutEngine]:
    def vllm(*arguments: Any, **options: Any) -> Any:
        from qerl_recipes.rollout import start

        return start(*arguments, **options)

    return {"vllm": vllm}
