"""Define the recipe keys for data, rewards and the adapter to start from."""

import json
from dataclasses import dataclass, field
from typing import Any

import trl

from qerl_recipes.recipe.file import ConfigError


def _mapping(name: str, value: Any) -> dict[str, Any] | None:
    """Return a mapping given by YAML or as the JSON text of a flag; None stays None.

    Raises ConfigError for anything else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name} must be a JSON mapping, not {value!r}") from error
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{name} must be a mapping, not {value!r}")
    return value


@dataclass
class ScriptArguments(trl.ScriptArguments):
    """Hold the keys for data, rewards and the adapter to start from, with Open-R1's names and defaults where it has
    them.
    """

    dataset_mixture: dict | str | None = field(
        default=None, metadata={"help": "Open-R1's mixture: {datasets: [{id, config, split, columns, weight}], seed}."}
    )
    dataset_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Options of a generated data set, such as {min_terms: 3} of reasoning_gym."}
    )
    dataset_size: int | None = field(default=None, metadata={"help": "Number of training problems; None is all."})
    dataset_seed: int = field(default=0, metadata={"help": "Seed of a generated data set and of dataset_size."})
    dataset_prompt_column: str | None = field(
        default=None, metadata={"help": "Column with the prompt; None is the data set's own, or prompt."}
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Prompts with more tokens are left out (TRL no longer truncates them)."}
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": 'System message before every prompt; "" is none.'}
    )
    adapter_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder of an existing adapter to continue from."}
    )
    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy", "format", "tag_count"],
        metadata={"help": "Rewards by name (built in or from a plugin) or by dotted path, such as my_package.reward."},
    )
    cosine_min_value_wrong: float = field(default=0.0, metadata={"help": "cosine: wrong, shortest."})
    cosine_max_value_wrong: float = field(default=-0.5, metadata={"help": "cosine: wrong, longest."})
    cosine_min_value_correct: float = field(default=0.5, metadata={"help": "cosine: correct, longest."})
    cosine_max_value_correct: float = field(default=1.0, metadata={"help": "cosine: correct, shortest."})
    cosine_max_len: int = field(default=1000, metadata={"help": "cosine: length, in characters, of the longest."})
    repetition_n_grams: int = field(default=3, metadata={"help": "repetition_penalty: words in an n-gram."})
    repetition_max_penalty: float = field(default=-1.0, metadata={"help": "repetition_penalty: lowest reward, <= 0."})
    max_completion_len: int = field(default=16384, metadata={"help": "soft_overlong_punishment: tokens allowed."})
    soft_punish_cache: int = field(default=4096, metadata={"help": "soft_overlong_punishment: tokens of the slope."})
    code_language: str = field(default="python", metadata={"help": "code_format: language of the code block."})
    refused: list[str] = field(default_factory=list, init=False)  # set by parse: refusals of keys that are no fields
    is_without_gpu: bool = field(default=False, init=False)  # set by parse: did the machine decide use_cpu?

    def __post_init__(self) -> None:
        self.dataset_mixture = _mapping("dataset_mixture", self.dataset_mixture)
        self.dataset_kwargs = _mapping("dataset_kwargs", self.dataset_kwargs)
        self.system_prompt = self.system_prompt or None  # so that the flag --system_prompt "" removes a recipe's
        for name in ("dataset_size", "max_prompt_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}; leave it out for no limit")
