"""QeRL's own plugin: rewards, data sets, noise schedule and rollout engine that recipes can name as they are.

Each function imports its modules on use, so that registering the plugin stays cheap.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qerl_recipes.hooks import DatasetLoader, NoiseSchedule, RewardFactory, RolloutEngine, StartEngine, implementation

if TYPE_CHECKING:
    from qerl_recipes.recipe.configs import GRPOConfig


@implementation
def qerl_rewards() -> Mapping[str, RewardFactory]:
    from qerl_recipes.tasks.rewards import FACTORIES

    return FACTORIES


@implementation
def qerl_datasets() -> Mapping[str, DatasetLoader]:
    from qerl_recipes.tasks.prompts import LOADERS

    return LOADERS


@implementation
def qerl_noise_schedules() -> Mapping[str, NoiseSchedule]:
    from qerl_vllm_plugin.noise import exponential_sigma

    return {"exponential": exponential_sigma}


@implementation
def qerl_rollout_engines() -> Mapping[str, StartEngine]:
    def vllm(base: str, training: "GRPOConfig", **options: Any) -> RolloutEngine:
        from qerl_recipes.recipe.configs import SERVER

        if training.vllm_mode == SERVER:
            from qerl_recipes.rollout.server import ServerRollouts

            return ServerRollouts(base, training, **options)
        from qerl_recipes.rollout.engine import VLLMRollouts

        return VLLMRollouts(base, training, **options)

    return {"vllm": vllm}
