"""Define what plugins offer to a recipe by name, and the trainer calls: rewards, data sets, tools and environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a plugin that adds only rewards need not load TRL
    from datasets import Dataset

    from qerl_recipes.recipe.configs import ScriptArguments

# Score the completions of a batch; None leaves a completion out.
Reward = Callable[..., Sequence["float | None"]]
# Make a reward with a recipe's settings.
RewardFactory = Callable[["ScriptArguments"], Reward]
# Load the training problems, and the held-out ones or None.
DatasetLoader = Callable[["ScriptArguments"], "tuple[Dataset, Dataset | None]"]
# Answer a call of the policy; a typed function whose docstring describes each argument under "Args:".
Tool = Callable[..., Any]
# Return a tool, or several, with a recipe's settings.
ToolFactory = Callable[["ScriptArguments"], "Tool | Sequence[Tool]"]


class Environment(Protocol):
    """Hold the state of one episode; the public methods beside these are tools."""

    def reset(self, **row: Any) -> str | None:
        """Begin an episode on a row of the data, and return what is added to the prompt's last message."""

    # def get_reward(self) -> float | None, if the environment scores its episodes


# Return the class of an environment, or a function that makes one, with a recipe's settings.
EnvironmentFactory = Callable[["ScriptArguments"], Callable[..., Environment]]
