"""Rewards by name: Open-R1's, the demo's, reasoning-gym's, and whatever plugins add.

A factory takes the script arguments and returns ``reward(completions, *, <columns>, **rest) -> list[float | None]``.
Completions are texts or, for conversational prompts, lists of messages. A parameter without a default that TRL does not
pass itself is a column which the data set must have.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from qerl_recipes import rewards_math, rewards_text, running_sum
from qerl_recipes.config_file import ConfigError
from qerl_recipes.configs import ScriptArguments
from qerl_recipes.hooks import Reward, RewardFactory, find
from qerl_recipes.reasoning_gym_task import reasoning_gym_score
from qerl_recipes.rewards_text import text_of

# what GRPOTrainer passes to every reward besides the columns of the data set
PASSED_BY_TRL = {
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"
}  # fmt: skip


def _plain(reward: Callable[..., list[float]]) -> RewardFactory:
    """A factory for a reward of plain texts that has no settings."""

    def accept_messages(completions: list[Any], **columns: Any) -> list[float]:
        return reward([text_of(completion) for completion in completions], **columns)

    accept_messages.__name__ = reward.__name__
    accept_messages.__signature__ = inspect.signature(reward)  # type: ignore[attr-defined]
    return lambda script: accept_messages


def _soft_overlong_punishment(script: ScriptArguments) -> Reward:
    from trl.rewards import get_soft_overlong_punishment

    if not 0 < script.soft_punish_cache < script.max_completion_len:
        raise ConfigError(
            "soft_overlong_punishment needs 0 < soft_punish_cache < max_completion_len, "
            f"not {script.soft_punish_cache} and {script.max_completion_len}"
        )
    punishment = get_soft_overlong_punishment(script.max_completion_len, script.soft_punish_cache)

    def soft_overlong_punishment(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return punishment(completion_ids=completion_ids)

    return soft_overlong_punishment


FACTORIES: dict[str, RewardFactory] = {
    "accuracy": lambda script: rewards_math.accuracy,
    "length": lambda script: rewards_math.length,
    "cosine": rewards_math.cosine,
    "dapo_score": lambda script: rewards_math.dapo_score,
    "format": _plain(rewards_text.format),
    "soft_format": _plain(rewards_text.soft_format),
    "tag_count": _plain(rewards_text.tag_count),
    "reasoning_steps": _plain(rewards_text.reasoning_steps),
    "exact_answer": _plain(rewards_text.exact_answer),
    "repetition_penalty": rewards_text.repetition_penalty,
    "code_format": rewards_text.code_format,
    "soft_overlong_punishment": _soft_overlong_punishment,
    "reasoning_gym": _plain(reasoning_gym_score),
    **{name: _plain(reward) for name, reward in running_sum.REWARDS.items()},
}


def resolve(names: Iterable[str], script: ScriptArguments) -> list[Reward]:
    """The rewards of those names, in order: built in, from a plugin, or by dotted path (``my_package.my_reward``).

    Raises ConfigError (a ValueError) for a name that nothing defines, and for settings that a reward refuses.
    """
    return [_resolve(name, script) for name in names]


def _resolve(name: str, script: ScriptArguments) -> Reward:
    if "." not in name:
        try:
            factory = find("qerl_rewards", name)
        except ValueError as error:
            raise ConfigError(f"reward_funcs: {error}; a function of your own goes by its dotted path") from error
        reward = factory(script)
    else:
        module, _, function = name.rpartition(".")
        try:
            reward = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"reward_funcs: {name} cannot be imported ({error}); its module must be on PYTHONPATH"
            ) from error
    if not callable(reward):
        raise ConfigError(f"reward_funcs: {name} is not a function but {reward!r}")
    return reward


def required_columns(reward: Reward) -> set[str]:
    """Columns that a reward cannot do without: its parameters without a default that TRL does not pass itself."""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name
        for name, parameter in inspect.signature(reward).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variable
    } - PASSED_BY_TRL
