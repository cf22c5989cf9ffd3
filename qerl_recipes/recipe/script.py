"""Define the keys of a recipe for data, rewards, tools and the adapter to start from."""

import json
import operator
from dataclasses import dataclass, field
from typing import Any

import trl

from qerl_recipes.recipe.file import ConfigError, key
from qerl_recipes.recipe.keys import RANGES

IS_WITHIN = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


@dataclass
class ScriptArguments(trl.ScriptArguments):
    """Hold the keys for data, rewards and the adapter to start from, under Open-R1's names where it has them."""

    dataset_kwargs: dict | str | None = key(
        None, "Options of a generated data set, such as {min_terms: 3} of reasoning_gym."
    )
    dataset_size: int | None = key(None, "Number of training problems; None is all.")
    dataset_seed: int = key(0, "Seed of a generated data set and of dataset_size.")
    dataset_prompt_column: str | None = key(None, "Column with the prompt; None is the data set's own, or prompt.")
    max_prompt_length: int | None = key(None, "Prompts with more tokens are left out (TRL no longer truncates them).")
    system_prompt: str | None = key(None, 'System message before every prompt; "" is none.')
    adapter_name_or_path: str | None = key(None, "Folder of an existing adapter to continue from.")
    reward_funcs: list[str] = key(
        ["accuracy", "format", "tag_count"],
        "Rewards by name (built in or from a plugin) or by dotted path, such as my_package.reward. With "
        "environments the default is none.",
    )
    cosine_min_value_wrong: float = key(0.0, "cosine: wrong, shortest.")
    cosine_max_value_wrong: float = key(-0.5, "cosine: wrong, longest.")
    cosine_min_value_correct: float = key(0.5, "cosine: correct, longest.")
    cosine_max_value_correct: float = key(1.0, "cosine: correct, shortest.")
    cosine_max_len: int = key(1000, "cosine: length, in characters, of the longest.")
    repetition_n_grams: int = key(3, "repetition_penalty: words in an n-gram.")
    repetition_max_penalty: float = key(-1.0, "repetition_penalty: lowest reward, <= 0.")
    max_completion_len: int = key(16384, "soft_overlong_punishment: tokens allowed.")
    soft_punish_cache: int = key(4096, "soft_overlong_punishment: tokens of the slope.")
    code_language: str = key("python", "code_format: language of the code block.")
    code_provider: str = key(
        "e2b",
        "code, binary_code: where programs run. local is this machine, with limits that are no isolation.",
        choices=("e2b", "morph", "piston", "local"),
    )
    parallel_code_exec_per_proc: int = key(2, "code, binary_code: programs that run at a time, for each process.")
    tools: list[str] = key([], "Functions that completions may call, by name or by dotted path (my_package.multiply).")
    environments: dict | str | None = key(
        None,
        "An environment by name or by dotted path, such as my_package.Wordle or my_package:Wordle; or a "
        "mapping {NAME: one of these}, whose NAMEs a column environment of the data names. Its methods are tools.",
    )
    environment_kwargs: dict | str | None = key(
        None, "Arguments of the environment's class; with a mapping, {NAME: arguments}."
    )
    environment_python: str | None = key(
        None, "Interpreter in which environments run, such as VENV/bin/python; None is the trainer's own."
    )
    rollout_func: str | None = key(None, "TRL's rollout_func(prompts, trainer) in place of the engine, by dotted path.")
    refused: list[str] = field(default_factory=list, init=False)  # set by parse: refusals of keys that are no fields
    is_without_gpu: bool = field(default=False, init=False)  # set by parse: did the machine decide use_cpu?

    def __post_init__(self) -> None:
        self.dataset_kwargs = mapping("dataset_kwargs", self.dataset_kwargs)
        if not isinstance(self.environments, str) or self.environments.startswith("{"):
            self.environments = mapping("environments", self.environments)
        self.environment_kwargs = mapping("environment_kwargs", self.environment_kwargs)
        self.system_prompt = self.system_prompt or None  # so that the flag --system_prompt "" removes a recipe's
        refuse_out_of_range(self)


def refuse_out_of_range(arguments: Any) -> None:
    """Raise ConfigError if a number that ``arguments`` have is outside the range of its key; NaN always is."""
    for words, keys in RANGES.items():
        limits = [limit.rpartition(" ") for limit in words.split(" and ")]
        for name in keys.split():
            value = getattr(arguments, name, None)
            if isinstance(value, int | float) and not all(IS_WITHIN[w](value, int(limit)) for w, _, limit in limits):
                default = type(arguments).__dataclass_fields__[name].default
                raise ConfigError(f"{name} must be {words}, not {value}; the default is {default}")


def mapping(name: str, value: Any) -> dict[str, Any] | None:
    """Return a mapping of YAML, or of a flag's JSON text; None stays None. Raises ConfigError for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name} must be a JSON mapping, not {value!r}") from error
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{name} must be a mapping, not {value!r}")
    return value
