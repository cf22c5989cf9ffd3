"""Define what rewards and data sets are to a recipe: plugins offer them by name, and the trainer calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a plugin that adds only rewards need not load TRL
    from datasets import Dataset

    from qerl_recipes.recipe.configs import ScriptArguments

# Score the completions of a batch; None leaves a completion out.
Reward = Callable[..., Sequence["float | None"]]
# Make a reward with a recipe's settings.
RewardFactory = Callable[["ScriptArguments"], Reward]
# Load the training problems, and the held-out ones or None.
DatasetLoader = Callable[["ScriptArguments"], "tuple[Dataset, Dataset | None]"]
