"""Load the training problems of a recipe, and put them into the form that the trainer expects.

They come from local files, the Hugging Face hub, a mixture of both, or the data sets that recipes know by name.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, ReadInstruction, concatenate_datasets
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_recipes.hooks import DatasetLoader, collect
from qerl_recipes.recipe.configs import GRPOConfig, ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.generation import blindness, problem_turn
from qerl_recipes.tasks import pick_number, reasoning_gym_task, running_sum, source_files

logger = logging.getLogger(__name__)

RUNNING_SUM_SIZE = 4096


def read(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """Return (train, held-out or None) with the column ``prompt``; no tokenizer is needed yet.

    Raises ConfigError (a ValueError) for a data set, split or column that does not exist, an empty data set, and a
    malformed prompt. Warns if held-out problems are among the training problems.
    """
    if script.dataset_mixture is not None:
        if script.dataset_name is not None:
            raise ConfigError("dataset_name and dataset_mixture are both given; keep one of them")
        source, (train, held_out) = "dataset_mixture", mixture(script)
    elif script.dataset_name is None:
        raise ConfigError(
            "dataset_name is missing; offline, reasoning_gym, running_sum and pick_number need no download"
        )
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
        train, numbers = (
            data.shuffle(seed=script.dataset_seed).select(range(script.dataset_size))
            for data in (train, Dataset.from_dict({"row": range(1, len(train) + 1)}))
        )
        rows = numbers["row"][:]
    else:
        rows = range(1, len(train) + 1)
    if len(train) == 0:
        raise ConfigError(f"{source} has no problems to train on")
    keys = set(_keys(train, script, _part(source, script.dataset_train_split), rows))
    if held_out is not None and (
        common := sum(key in keys for key in _keys(held_out, script, _part(source, script.dataset_test_split)))
    ):
        logger.warning(
            "%d of %d held-out problems of %s are among the training problems, word for word: what is measured on them "
            "is not of unseen problems",
            common,
            len(held_out),
            source,
        )
    return train, held_out


def _part(source: str, split: str) -> str:
    """Name the part of a data set in which rows are counted."""
    return source if split == ScriptArguments.dataset_train_split else f"{source}, {split}"


def _keys(data: Dataset, script: ScriptArguments, part: str, rows: Sequence[int] | None = None) -> list[str]:
    """Return a text for each prompt; two texts are equal where the prompts are.

    ``part`` names the data, ``rows`` their row numbers in it. Raises ConfigError, with the row, for a prompt that is
    neither text nor messages, or is empty. The same holds for a system message beside the recipe's ``system_prompt``.
    """
    prompts = data["prompt"][:]
    for number, prompt in zip(rows or range(1, len(prompts) + 1), prompts, strict=True):
        if (flaw := _flaw(prompt, script.system_prompt)) is not None:
            raise ConfigError(f"{part}: the prompt of row {number} {flaw}")
    return [
        prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str) for prompt in prompts
    ]


def _flaw(prompt: Any, system_prompt: str | None) -> str | None:
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
    if not (problem.strip() if isinstance(problem, str) else problem):
        return "is empty in the message that asks the problem; leave this problem out"
    return None


def tokenizer(folder: Path, training: GRPOConfig, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model in ``folder``, with the recipe's chat template if it sets one."""
    loaded = AutoTokenizer.from_pretrained(folder, **options)
    if training.chat_template is not None:
        loaded.chat_template = training.chat_template
    return loaded


def load(
    script: ScriptArguments,
    tokenizer: PreTrainedTokenizerBase,
    template_options: Mapping[str, Any] | None = None,
    rows: tuple[Dataset, Dataset | None] | None = None,
) -> tuple[Dataset, Dataset | None]:
    """Return (train, held-out or None) for the trainer, with ``prompt`` as a list of messages.

    ``rows`` are what ``read`` returned; by default the data are read here.

    A text prompt becomes the user's message after ``system_prompt``. It stays a text if the tokenizer has no chat
    template. Prompts with more than ``max_prompt_length`` tokens are left out. Tokens are counted as the rollout will
    see them, with ``template_options``, the recipe's ``chat_template_kwargs``.

    Raises ConfigError for messages or a ``system_prompt`` without a chat template, and for a template that leaves out
    the problem.
    """
    options = template_options or {}
    train, held_out = rows or read(script)
    train = _fitting(_conversational(train, script, tokenizer, options), script, tokenizer, options)
    if held_out is not None:
        held_out = _fitting(_conversational(held_out, script, tokenizer, options), script, tokenizer, options)
    return train, held_out


def _conversational(
    data: Dataset, script: ScriptArguments, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> Dataset:
    if tokenizer.chat_template is None:
        if script.system_prompt is not None:
            raise ConfigError("system_prompt needs a chat template, and the model has none; give it as chat_template")
        if not all(isinstance(prompt, str) for prompt in data["prompt"]):
            raise ConfigError(
                f"{script.dataset_name or 'dataset_mixture'}: prompts that are lists of messages need a chat template, "
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
    """Return the token ids of a prompt as the rollout will see it.

    ``options`` are the recipe's ``chat_template_kwargs``.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def tokens(prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> int:
    """Return the number of tokens of a prompt as the rollout will see it.

    ``options`` are the recipe's ``chat_template_kwargs``.
    """
    return len(ids(prompt, tokenizer, options))


def _fitting(
    data: Dataset, script: ScriptArguments, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> Dataset:
    limit = script.max_prompt_length
    if limit is None:
        return data
    fitting = [i for i, prompt in enumerate(data["prompt"]) if tokens(prompt, tokenizer, options) <= limit]
    if not fitting:
        raise ConfigError(f"no prompt has at most max_prompt_length = {limit} tokens; raise it")
    if len(fitting) < len(data):
        logger.warning(
            "%d of %d prompts have more than %d tokens and are left out", len(data) - len(fitting), len(data), limit
        )
    return data.select(fitting)


def refuse_long_prompts(
    data: Mapping[str, Dataset | None],
    tokenizer: PreTrainedTokenizerBase,
    script: ScriptArguments,
    training: GRPOConfig,
    positions: int | None,
) -> None:
    """Raise ConfigError if prompts leave less than ``max_completion_length`` tokens of a sequence.

    vLLM would cut their completions off earlier. A prompt that leaves no room at all it would refuse in mid-run.
    ``data`` maps "training" and "held-out" to their problems. With ``max_prompt_length`` nothing is checked, since
    longer prompts are left out. ``positions`` is the length of the model's longest sequence; None if the engine
    decides.
    """
    key, limit = "vllm_max_model_length", training.vllm_max_model_length
    if limit is None:
        key, limit = "max_position_embeddings of the model", positions
    if limit is None or script.max_prompt_length is not None:
        return
    room = limit - training.max_completion_length
    for name, problems in data.items():
        options = training.chat_template_kwargs or {}
        counts = [] if problems is None else [tokens(one, tokenizer, options) for one in problems["prompt"]]
        if too_long := [count for count in counts if count > room]:
            raise ConfigError(
                f"{len(too_long)} of {len(counts)} {name} prompts have more than {room} tokens, the longest "
                f"{max(too_long)}: beside them max_completion_length ({training.max_completion_length}) does not fit "
                f"into {key} ({limit}), and completions would be cut off earlier. max_prompt_length: {room} leaves "
                f"them out; or lower max_completion_length, or raise {key}"
            )


def from_files(script: ScriptArguments, name: str, config: str | None) -> tuple[Dataset, Dataset | None]:
    """Return the training and held-out splits of a local file, a local folder or a hub id.

    The splits are ``dataset_train_split`` and ``dataset_test_split``; each may be a slice, such as ``train[:90%]``. A
    single file is the split ``train``. The second result is None if there is no such test split. It is also None if the
    default test split shares rows with the training split.

    Raises ConfigError if nothing can be read, if the training split does not exist, and if a ``dataset_test_split``
    that was chosen overlaps with it.
    """
    splits = source_files.read(name, config)
    train = _rows(splits, "dataset_train_split", script.dataset_train_split)
    if train is None:
        raise ConfigError(
            f"dataset_name {name} has no split {script.dataset_train_split!r} but {', '.join(sorted(splits))}; "
            "set dataset_train_split"
        )
    held_out = _rows(splits, "dataset_test_split", script.dataset_test_split)
    if held_out is None:
        return _select(splits, train), None
    if common := sum(len(set(rows) & set(held_out.get(split, ()))) for split, rows in train.items()):
        if script.dataset_test_split == ScriptArguments.dataset_test_split:  # the default, which nobody asked for
            return _select(splits, train), None
        raise ConfigError(
            f"dataset_test_split {script.dataset_test_split} and dataset_train_split {script.dataset_train_split} have "
            f"{common} problems in common; name parts that do not overlap, such as train[:90%] and train[90%:]"
        )
    return _select(splits, train), _select(splits, held_out)


def _rows(splits: DatasetDict, key: str, spec: str) -> dict[str, range] | None:
    """Return the rows that a split such as ``train`` or ``train[:80%]`` names, by the split they are in.

    Returns None if there is no such split.
    """
    if spec in splits:
        return {spec: range(len(splits[spec]))}
    if {part.partition("[")[0].strip() for part in spec.split("+")} - set(splits):
        return None
    try:
        absolute = ReadInstruction.from_spec(spec).to_absolute({name: len(data) for name, data in splits.items()})
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{key} cannot be {spec!r}: {error}; write it as train[:90%] or train[100:200]") from error
    ranges = {part.splitname: range(part.from_ or 0, part.to) for part in absolute}
    if len(ranges) < len(absolute):
        raise ConfigError(f"{key} cannot be {spec!r}: it takes two parts of one split; name one part")
    return ranges


def _select(splits: DatasetDict, rows: dict[str, range]) -> Dataset:
    whole = all(len(part) == len(splits[name]) for name, part in rows.items())
    parts = [splits[name] if whole else splits[name].select(part) for name, part in rows.items()]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def refuse_unread(script: ScriptArguments, source: str, *keys: str) -> None:
    """Raise ConfigError if one of ``keys`` is set, because ``source`` does not read it."""
    defaults = ScriptArguments()
    if unread := [key for key in keys if getattr(script, key) != getattr(defaults, key)]:
        raise ConfigError(f"{source} does not read {', '.join(unread)}; remove the key")


def rename(data: Dataset, names: dict[str, str], source: str, way_out: str = "") -> Dataset:
    """Return ``data`` with renamed columns.

    An existing column that has a new name is dropped. Raises ConfigError for a missing column.
    """
    missing = sorted(set(names) - set(data.column_names))
    if missing:
        has = f"{source} has no column {', '.join(missing)}; it has {', '.join(data.column_names)}"
        raise ConfigError(f"{has}; {way_out}" if way_out else has)
    moved = {old: new for old, new in names.items() if old != new}
    shadowed = [new for new in moved.values() if new in data.column_names and new not in moved]
    return data.remove_columns(shadowed).rename_columns(moved)


def options(script: ScriptArguments, allowed: set[str]) -> dict[str, Any]:
    """Return ``dataset_kwargs``; raise ConfigError for an option that is not ``allowed``."""
    kwargs = dict(script.dataset_kwargs or {})  # type: ignore[arg-type]
    if unknown := sorted(set(kwargs) - allowed):
        raise ConfigError(
            f"dataset_kwargs: {script.dataset_name} knows no {', '.join(unknown)}; it knows "
            f"{', '.join(sorted(allowed)) or 'no options'}"
        )
    return kwargs


def from_name(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """Load a local file, a local folder or a hub id.

    ``dataset_kwargs.columns`` renames columns, {old: new}.
    """
    kwargs = options(script, {"columns"})
    train, held_out = from_files(script, str(script.dataset_name), script.dataset_config)
    names = kwargs.get("columns", {})
    return rename(train, names, str(script.dataset_name)), (
        None if held_out is None else rename(held_out, names, str(script.dataset_name))
    )


def mixture(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """Load Open-R1's ``dataset_mixture``: parts of several data sets with the same columns, shuffled by its seed.

    Its form is ``{datasets: [{id, config, split, columns, weight}], seed, test_split_size}``. ``weight`` is the share
    of a part to take.
    """
    settings = dict(script.dataset_mixture or {})  # type: ignore[arg-type]
    names = ("dataset_kwargs", "dataset_config", "dataset_train_split", "dataset_test_split")
    refuse_unread(script, "dataset_mixture (its parts have a config and a split each, and test_split_size)", *names)
    seed, parts = settings.get("seed", 0), settings.get("datasets")
    if unknown := sorted(set(settings) - {"datasets", "seed", "test_split_size"}):
        raise ConfigError(f"dataset_mixture: unknown {', '.join(unknown)}; it has datasets, seed and test_split_size")
    if not isinstance(parts, list) or not parts:
        raise ConfigError("dataset_mixture: datasets must list at least one data set with an id")
    samples = []
    for part in parts:
        if not isinstance(part, dict) or "id" not in part or set(part) - {"id", "config", "split", "columns", "weight"}:
            raise ConfigError(f"dataset_mixture: a part has id, config, split, columns and weight, not {part!r}")
        splits = source_files.read(part["id"], part.get("config"))
        split = part.get("split", "train")
        if split not in splits:
            raise ConfigError(f"dataset_mixture: {part['id']} has no split {split!r} but {', '.join(sorted(splits))}")
        data = splits[split]
        if columns := part.get("columns"):
            rename(data, {column: column for column in columns}, part["id"])  # raises for a missing one
            data = data.select_columns(columns)
        weight = part.get("weight", 1.0)
        if not 0 < weight <= 1:
            raise ConfigError(f"dataset_mixture: weight is the share of {part['id']} to take, not {weight}")
        samples.append(data.shuffle(seed=seed).select(range(int(len(data) * weight))) if weight < 1 else data)
    if any(set(data.column_names) != set(samples[0].column_names) for data in samples):
        raise ConfigError("dataset_mixture: the parts have different columns; cut them with columns: [...]")
    shuffled = concatenate_datasets(samples).shuffle(seed=seed)
    if (size := settings.get("test_split_size")) is None:
        return shuffled, None
    halves = shuffled.train_test_split(test_size=size, seed=seed)
    return halves["train"], halves["test"]


def _known(
    hub_id: str, config: str | None, questions: tuple[str, ...], to_row: Callable[[dict[str, Any]], dict[str, str]]
) -> DatasetLoader:
    """Return a loader for a data set with a known schema.

    It reads the data set of the hub, or a file with the same columns at ``dataset_kwargs.path``.
    """

    def load(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
        path = options(script, {"path"}).get("path")
        configuration = script.dataset_config or (None if path else config)
        train, held_out = from_files(script, path or hub_id, configuration)
        return convert(train, path or hub_id), None if held_out is None else convert(held_out, path or hub_id)

    def convert(data: Dataset, source: str) -> Dataset:
        question = next((name for name in questions if name in data.column_names), None)
        if question is None or not {"answer", "solution", "reward_model"} & set(data.column_names):
            raise ConfigError(
                f"{source} has the columns {', '.join(data.column_names)}; this data set has {' or '.join(questions)} "
                "and answer, solution or reward_model. For another schema give the file itself as dataset_name"
            )
        rows = data.map(to_row, remove_columns=[n for n in ("answer", "solution") if n in data.column_names])
        return rename(rows, {question: "prompt"}, source)

    return load


def _final_number(row: dict[str, Any]) -> dict[str, str]:
    """Convert a row of GSM8K: its answer follows ####, and loses its thousands separators."""
    answer = str(row["answer"]).rpartition("####")[2].strip().replace(",", "")
    return {"answer": answer, "solution": f"${answer}$"}


def _closed_form(row: dict[str, Any]) -> dict[str, str]:
    """Convert a row with a closed-form answer, from whichever column holds it.

    The solution gets dollars around it unless it is marked as LaTeX: math-verify reads LaTeX between dollars.
    """
    candidates = row.get("answer"), row.get("solution"), (row.get("reward_model") or {}).get("ground_truth")
    answer = next((text for candidate in candidates if candidate is not None and (text := str(candidate).strip())), "")
    marked = "$" in answer or "\\boxed" in answer or "\\(" in answer
    return {"answer": answer, "solution": answer if marked else f"${answer}$"}


def _running_sum(script: ScriptArguments) -> tuple[Dataset, Dataset]:
    """Generate ``dataset_size`` (4096) of the demo's sums from ``dataset_seed``, and the 512 held-out ones."""
    options(script, set())
    refuse_unread(script, "running_sum", "dataset_config", "dataset_train_split", "dataset_test_split")
    held_out = running_sum.held_out()
    columns = {"prompt": [p.prompt for p in held_out], "answer": [p.answer for p in held_out]}
    size = script.dataset_size or RUNNING_SUM_SIZE
    return running_sum.training_set(size, script.dataset_seed), Dataset.from_dict(columns)


def _pick_number(script: ScriptArguments) -> tuple[Dataset, Dataset]:
    """Generate ``dataset_size`` (4096) problems of ``pick_number`` from ``dataset_seed``.

    Also return the 1000 held-out ones.
    """
    options(script, set())
    refuse_unread(script, "pick_number", "dataset_config", "dataset_train_split", "dataset_test_split")
    size = script.dataset_size or pick_number.SIZE
    return pick_number.training_set(size, script.dataset_seed), pick_number.held_out()


def _reasoning_gym(script: ScriptArguments) -> tuple[Dataset, Dataset]:
    refuse_unread(script, "reasoning_gym", "dataset_train_split", "dataset_test_split")
    return reasoning_gym_task.load(script)


_GSM8K = _known("openai/gsm8k", "main", ("question",), _final_number)
_BIG_MATH = _known("open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5", ("prompt", "problem"), _closed_form)
_DAPO_MATH = _known("open-r1/DAPO-Math-17k-Processed", "en", ("prompt",), _closed_form)

LOADERS: dict[str, DatasetLoader] = {
    "reasoning_gym": _reasoning_gym,
    "running_sum": _running_sum,
    "pick_number": _pick_number,
    "gsm8k": _GSM8K,
    "openai/gsm8k": _GSM8K,
    "bigmath": _BIG_MATH,
    "open-r1/Big-Math-RL-Verified-Processed": _BIG_MATH,
    "dapo_math_17k": _DAPO_MATH,
    "open-r1/DAPO-Math-17k-Processed": _DAPO_MATH,
}
GENERATED = ("reasoning_gym", "running_sum", "pick_number")  # generate dataset_size problems; others are cut to it
