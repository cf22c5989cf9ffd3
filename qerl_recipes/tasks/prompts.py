"""Read a recipe's problems, check their prompts, and put them into the form that the trainer expects."""

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_recipes.recipe.configs import GRPOConfig, ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.generation import blindness, problem_turn
from qerl_recipes.tasks.environments import Interaction
from qerl_recipes.tasks.interface import DatasetLoader
from qerl_recipes.tasks.sources import GENERATED, SPLIT_KEYS, Splits, from_name, map_splits, refuse_unread, rename

logger = logging.getLogger(__name__)

NOTHING = [{"role": "user", "content": ""}]  # TRL's prompt for an environment that has data of its own
WITHOUT_CALLS = Interaction()


def read(script: ScriptArguments, loaders: Mapping[str, DatasetLoader], *, may_lack_prompts: bool = False) -> Splits:
    """Return (train, held-out or None) with the column ``prompt``; no tokenizer is needed yet.

    ``loaders`` load the data sets that recipes know by name; any other is a file, a folder or a hub id. With
    ``may_lack_prompts`` an environment adds their text. Raises ConfigError for data without what is named, or with a
    malformed prompt. Warns if held-out problems are among the training problems.
    """
    if (source := script.dataset_name) is None:
        raise ConfigError("dataset_name is missing; reasoning_gym, running_sum and pick_number need no download")
    train, held_out = loaders.get(source, from_name)(script)
    column = script.dataset_prompt_column or "prompt"
    if may_lack_prompts and "prompt" == column not in train.column_names:
        train, held_out = map_splits((train, held_out), lambda data: data.add_column("prompt", [NOTHING] * len(data)))
    train = rename(train, {column: "prompt"}, source, "set dataset_prompt_column")
    held_out = None if held_out is None else rename(held_out, {column: "prompt"}, source)
    if script.dataset_size is not None and source not in GENERATED:
        if script.dataset_size > len(train):
            raise ConfigError(f"dataset_size is {script.dataset_size}, {source} has {len(train)} problems; lower it")
        order = Dataset.from_dict({"row": range(len(train))}).shuffle(seed=script.dataset_seed)
        rows = order["row"][: script.dataset_size]
        train = train.select(rows)
    else:
        rows = range(len(train))
    if len(train) == 0:
        raise ConfigError(f"{source} has no problems to train on")
    splits = (script.dataset_train_split, script.dataset_test_split)
    parts = [source if split == ScriptArguments.dataset_train_split else f"{source}, {split}" for split in splits]
    keys = set(_keys(train, script, parts[0], may_lack_prompts, rows))
    if held_out is not None and (
        common := sum(key in keys for key in _keys(held_out, script, parts[1], may_lack_prompts))
    ):
        logger.warning(
            "%d of %d held-out problems of %s are among the training problems, word for word: what is measured on them "
            "is not of unseen problems",
            common,
            len(held_out),
            source,
        )
    return train, held_out


def of_environment(script: ScriptArguments, count: int) -> Dataset:
    """Return ``count`` empty prompts, for an environment's text; raise ConfigError for keys of a data set."""
    keys = ("dataset_kwargs", "dataset_config", "dataset_size", "dataset_prompt_column", *SPLIT_KEYS)
    refuse_unread(script, "an environment without dataset_name", *keys)
    return Dataset.from_dict({"prompt": [NOTHING] * count})


def _keys(
    data: Dataset, script: ScriptArguments, part: str, may_be_empty: bool, rows: Sequence[int] | None = None
) -> list[str]:
    """Return a text for each prompt that has any; raise ConfigError for a malformed or wrongly empty one."""
    prompts = data["prompt"][:]
    for row, prompt in zip(rows or range(len(prompts)), prompts, strict=True):
        if (flaw := _flaw(prompt, script.system_prompt, may_be_empty)) is not None:
            raise ConfigError(f"{part}: the prompt of row {row + 1} {flaw}")
    return [
        prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
        for prompt in prompts
        if prompt != NOTHING
    ]


def _flaw(prompt: Any, system_prompt: str | None, may_be_empty: bool) -> str | None:
    """Say what is wrong with a prompt, and the way out; return None if nothing is."""
    if isinstance(prompt, str):
        return None if prompt.strip() else "is empty; leave this problem out"
    if not isinstance(prompt, list):
        return f"is {prompt!r}, which is neither a text nor a list of messages"
    if not prompt:
        return "is a list without a message; leave this problem out"
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return f'has the message {message!r}; write each as {{"role": "user", "content": TEXT}}'
        if system_prompt is not None and message["role"] == "system":
            return (
                f"has a system turn ({str(message['content'])[:40]!r}), and system_prompt would be a second one; "
                "remove system_prompt, or the turn from the data"
            )
        if system_prompt is not None and isinstance(message["content"], list):
            return (
                "has a message whose content is a list of parts, beside which system_prompt, a text, cannot stand; "
                "write each content as one text, or the system turn into the data and remove system_prompt"
            )
    problem = prompt[problem_turn(prompt)]["content"]
    if not (may_be_empty or (problem.strip() if isinstance(problem, str) else problem)):
        return "is empty in the message that asks the problem; leave this problem out"
    return None


def tokenizer(folder: Path, templates: Any, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model in ``folder``, with the templates of a GRPOConfig or Evaluation."""
    loaded = AutoTokenizer.from_pretrained(folder, **options)
    if templates.chat_template is not None:
        loaded.chat_template = templates.chat_template
    if templates.response_template is not None:
        loaded.response_template = templates.response_template
    return loaded


def load(
    script: ScriptArguments,
    tokenizer: PreTrainedTokenizerBase,
    rows: Splits,
    options: Mapping[str, Any],
    interaction: Interaction = WITHOUT_CALLS,
) -> Splits:
    """Return ``rows`` of ``read`` for the trainer, with ``prompt`` as a list of messages if there is a chat template.

    Prompts with more than ``max_prompt_length`` tokens are left out. Raises ConfigError for messages or a
    ``system_prompt`` without a chat template, and for a template that leaves out the problem.
    """
    if tokenizer.chat_template is None and options:
        warnings.warn(f"chat_template_kwargs: {options} has no effect without a chat template; remove it", stacklevel=2)

    def fitting(data: Dataset) -> Dataset:
        if (limit := script.max_prompt_length) is None:
            return data
        lengths = counts(data, tokenizer, options, interaction)
        found = [i for i, count in enumerate(lengths) if count <= limit]
        if not found:
            raise ConfigError(f"no prompt has at most max_prompt_length = {limit} tokens; raise it")
        if (left_out := len(data) - len(found)) > 0:
            logger.warning("%d of %d prompts have more than %d tokens and are left out", left_out, len(data), limit)
        return data.select(found)

    return map_splits(rows, lambda data: fitting(_conversational(data, script, tokenizer, options)))


def _conversational(
    data: Dataset, script: ScriptArguments, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> Dataset:
    if tokenizer.chat_template is None:
        if script.system_prompt is not None:
            raise ConfigError("system_prompt needs a chat template, and the model has none; give it as chat_template")
        if not all(isinstance(prompt, str) for prompt in data["prompt"]):
            raise ConfigError(
                f"{script.dataset_name}: prompts that are lists of messages need a chat template, "
                "and the model has none; give it as chat_template, or write each prompt as one text"
            )
        return data
    system = [] if script.system_prompt is None else [{"role": "system", "content": script.system_prompt}]

    def to_conversation(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"]
        conversation = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"prompt": [*system, *conversation]}

    dropped = [name for name in ("prompt", "messages") if name in data.column_names]
    conversational = data.map(to_conversation, remove_columns=dropped, desc="prompts")
    examples = {
        tuple((message["role"], type(message["content"])) for message in conversation): conversation
        for conversation in conversational["prompt"]
    }
    for conversation in examples.values():
        if (reason := blindness(tokenizer, conversation, options)) is not None:
            raise ConfigError(reason)
    return conversational


def ids(
    prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> list[int]:
    """Return the token ids of a prompt as the rollout will see it, with the recipe's ``chat_template_kwargs``."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def counts(
    data: Dataset, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], interaction: Interaction
) -> list[int]:
    """Return the number of tokens of each prompt; the text that an environment adds is not known yet."""
    if not interaction.has_calls():
        return [len(ids(prompt, tokenizer, options)) for prompt in data["prompt"]]
    names = interaction.names(data)
    schemas = {name: interaction.schemas(name) for name in set(names)}
    rows = zip(data["prompt"], names, strict=True)
    return [len(ids(prompt, tokenizer, {**options, "tools": schemas[name]})) for prompt, name in rows]


def refuse_long_prompts(
    data: Mapping[str, Dataset | None],
    tokenizer: PreTrainedTokenizerBase,
    script: ScriptArguments,
    training: GRPOConfig,
    positions: int | None,
    options: Mapping[str, Any],
    interaction: Interaction = WITHOUT_CALLS,
) -> None:
    """Raise ConfigError if prompts of ``data`` leave less than ``max_completion_length`` tokens of a sequence.

    vLLM would cut their completions off earlier, or refuse them in mid-run. With ``max_prompt_length`` longer ones are
    left out. ``positions`` is the model's longest sequence, None if the engine decides.
    """
    key, limit = "vllm_max_model_length", training.vllm_max_model_length
    if limit is None:
        key, limit = "max_position_embeddings of the model", positions
    if limit is None or script.max_prompt_length is not None:
        return
    room = limit - training.max_completion_length
    for name, problems in data.items():
        lengths = [] if problems is None else counts(problems, tokenizer, options, interaction)
        if too_long := [count for count in lengths if count > room]:
            raise ConfigError(
                f"{len(too_long)} of {len(lengths)} {name} prompts have more than {room} tokens, the longest "
                f"{max(too_long)}: beside them max_completion_length ({training.max_completion_length}) does not fit "
                f"into {key} ({limit}), and completions would be cut off earlier. max_prompt_length: {room} leaves "
                f"them out; or lower max_completion_length, or raise {key}"
            )
