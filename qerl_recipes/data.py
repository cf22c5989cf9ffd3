"""The training problems of a recipe: found, renamed, cut, and put into the form that the trainer wants."""

import logging
from typing import Any

from datasets import Dataset

from qerl_recipes.config_file import ConfigError
from qerl_recipes.configs import ScriptArguments
from qerl_recipes.data_sources import GENERATED, LOADERS, from_name, mixture, rename
from qerl_recipes.hooks import collect

__all__ = ["LOADERS", "load", "read"]

logger = logging.getLogger(__name__)


def read(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """(train, held-out or None) with the column ``prompt``, before any tokenizer is needed.

    Raises ConfigError (a ValueError) for a data set, split or column that is not there, and for an empty data set.
    """
    if script.dataset_mixture is not None:
        if script.dataset_name is not None:
            raise ConfigError("dataset_name and dataset_mixture are both given; keep one of them")
        source, (train, held_out) = "dataset_mixture", mixture(script)
    elif script.dataset_name is None:
        raise ConfigError("dataset_name is missing; offline, reasoning_gym and running_sum need no download")
    else:
        source = script.dataset_name
        train, held_out = collect("qerl_datasets").get(source, from_name)(script)
    column = script.dataset_prompt_column or "prompt"
    train = rename(train, {column: "prompt"}, source, "set dataset_prompt_column")
    held_out = None if held_out is None else rename(held_out, {column: "prompt"}, source)
    if script.dataset_size is not None and source not in GENERATED:
        if script.dataset_size > len(train):
            raise ConfigError(
                f"dataset_size is {script.dataset_size}, but {source} has {len(train)} problems; lower it"
            )
        train = train.shuffle(seed=script.dataset_seed).select(range(script.dataset_size))
    if len(train) == 0:
        raise ConfigError(f"{source} has no problems to train on")
    return train, held_out


def load(script: ScriptArguments, tokenizer: Any) -> tuple[Dataset, Dataset | None]:
    """(train, held-out or None) for the trainer: ``prompt`` is a list of messages where the tokenizer has a template.

    A text prompt becomes the user's message after ``system_prompt``; without a chat template it stays a text, to which
    a ``system_prompt`` cannot be added (ConfigError). Prompts with more than ``max_prompt_length`` tokens are left out.
    """
    train, held_out = read(script)
    train = _fitting(_conversational(train, script, tokenizer), script, tokenizer)
    if held_out is not None:
        held_out = _fitting(_conversational(held_out, script, tokenizer), script, tokenizer)
    return train, held_out


def _conversational(data: Dataset, script: ScriptArguments, tokenizer: Any) -> Dataset:
    if tokenizer.chat_template is None:
        if script.system_prompt is not None:
            raise ConfigError("system_prompt needs a chat template, and the model has none; give it as chat_template")
        return data
    system = [] if script.system_prompt is None else [{"role": "system", "content": script.system_prompt}]

    def messages(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"]
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"prompt": [*system, *turns]}

    dropped = [name for name in ("prompt", "messages") if name in data.column_names]
    return data.map(messages, remove_columns=dropped, desc="prompts")


def _tokens(prompt: str | list[dict[str, str]], tokenizer: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _fitting(data: Dataset, script: ScriptArguments, tokenizer: Any) -> Dataset:
    limit = script.max_prompt_length
    if limit is None:
        return data
    kept = [i for i, prompt in enumerate(data["prompt"]) if _tokens(prompt, tokenizer) <= limit]
    if not kept:
        raise ConfigError(f"no prompt has at most max_prompt_length = {limit} tokens; raise it")
    if len(kept) < len(data):
        logger.warning(
            "%d of %d prompts have more than %d tokens and are left out", len(data) - len(kept), len(data), limit
        )
    return data.select(kept)
