"""Where problems come from: local files, the Hugging Face hub, and the data sets that recipes know by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset, load_from_disk

from qerl_recipes import reasoning_gym_task, running_sum
from qerl_recipes.config_file import ConfigError
from qerl_recipes.configs import ScriptArguments
from qerl_recipes.hooks import DatasetLoader

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
RUNNING_SUM_SIZE = 4096
FILE_OPTIONS = {"path", "columns"}


def from_files(script: ScriptArguments, name: str, config: str | None) -> tuple[Dataset, Dataset | None]:
    """The splits ``dataset_train_split`` and ``dataset_test_split`` of a local file, a local folder or a hub id.

    A single file is all training data. Raises ConfigError where there is nothing to read, or no such split.
    """
    splits = _read(name, config)
    if script.dataset_train_split not in splits:
        raise ConfigError(
            f"dataset_name {name} has no split {script.dataset_train_split!r} but {', '.join(sorted(splits))}; "
            "set dataset_train_split"
        )
    return splits[script.dataset_train_split], splits.get(script.dataset_test_split)


def _read(name: str, config: str | None) -> DatasetDict:
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.suffix not in READERS:
                raise ConfigError(f"dataset_name {name}: cannot read {path.suffix} files, only {', '.join(READERS)}")
            return load_dataset(READERS[path.suffix], data_files={"train": str(path)})
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            saved = load_from_disk(str(path))
            return saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
        if path.suffix in READERS and not path.exists():
            raise ConfigError(f"dataset_name {name}: there is no such file")
        return load_dataset(str(path) if path.is_dir() else name, name=config)
    except ConfigError:
        raise
    except Exception as error:  # datasets raises a dozen kinds of error for a place where nothing can be read
        raise ConfigError(
            f"dataset_name {name} is neither a readable file or folder here nor one that the hub gives out "
            f"({type(error).__name__}: {error}); offline, use reasoning_gym, running_sum or a local JSONL file"
        ) from error


def rename(data: Dataset, names: dict[str, str], source: str, way_out: str = "") -> Dataset:
    """``data`` with columns renamed; one that has the new name already gives way. ConfigError for a missing column."""
    missing = sorted(set(names) - set(data.column_names))
    if missing:
        has = f"{source} has no column {', '.join(missing)}; it has {', '.join(data.column_names)}"
        raise ConfigError(f"{has}; {way_out}" if way_out else has)
    moved = {old: new for old, new in names.items() if old != new}
    shadowed = [new for new in moved.values() if new in data.column_names and new not in moved]
    return data.remove_columns(shadowed).rename_columns(moved)


def options(script: ScriptArguments, allowed: set[str]) -> dict[str, Any]:
    """``dataset_kwargs`` without anything that the data set does not know; raises ConfigError for the rest."""
    given = dict(script.dataset_kwargs or {})  # type: ignore[arg-type]
    if unknown := sorted(set(given) - allowed):
        raise ConfigError(
            f"dataset_kwargs: {script.dataset_name} knows no {', '.join(unknown)}; it knows "
            f"{', '.join(sorted(allowed)) or 'no options'}"
        )
    return given


def from_name(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """Any local file or folder, or a hub id, with ``dataset_kwargs.columns`` {old: new} renamed."""
    given = options(script, {"columns"})
    train, held_out = from_files(script, str(script.dataset_name), script.dataset_config)
    names = given.get("columns", {})
    return rename(train, names, str(script.dataset_name)), (
        None if held_out is None else rename(held_out, names, str(script.dataset_name))
    )


def mixture(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """Open-R1's ``dataset_mixture``: parts of several data sets, cut to the same columns, shuffled by its seed.

    ``{datasets: [{id, config, split, columns, weight}], seed, test_split_size}``; ``weight`` is the share to take.
    """
    given = dict(script.dataset_mixture or {})  # type: ignore[arg-type]
    seed, parts = given.get("seed", 0), given.get("datasets")
    if unknown := sorted(set(given) - {"datasets", "seed", "test_split_size"}):
        raise ConfigError(f"dataset_mixture: unknown {', '.join(unknown)}; it has datasets, seed and test_split_size")
    if not isinstance(parts, list) or not parts:
        raise ConfigError("dataset_mixture: datasets must list at least one data set with an id")
    taken = []
    for part in parts:
        if not isinstance(part, dict) or "id" not in part or set(part) - {"id", "config", "split", "columns", "weight"}:
            raise ConfigError(f"dataset_mixture: a part has id, config, split, columns and weight, not {part!r}")
        splits = _read(part["id"], part.get("config"))
        split = part.get("split", "train")
        if split not in splits:
            raise ConfigError(f"dataset_mixture: {part['id']} has no split {split!r} but {', '.join(sorted(splits))}")
        data = splits[split]
        if columns := part.get("columns"):
            rename(data, {column: column for column in columns}, part["id"])  # each must be there
            data = data.select_columns(columns)
        weight = part.get("weight", 1.0)
        if not 0 < weight <= 1:
            raise ConfigError(f"dataset_mixture: weight is the share of {part['id']} to take, not {weight}")
        taken.append(data.shuffle(seed=seed).select(range(int(len(data) * weight))) if weight < 1 else data)
    if any(set(data.column_names) != set(taken[0].column_names) for data in taken):
        raise ConfigError("dataset_mixture: the parts have different columns; cut them with columns: [...]")
    together = concatenate_datasets(taken).shuffle(seed=seed)
    if (size := given.get("test_split_size")) is None:
        return together, None
    halves = together.train_test_split(test_size=size, seed=seed)
    return halves["train"], halves["test"]


def _known(
    hub_id: str, config: str | None, questions: tuple[str, ...], to_row: Callable[[dict[str, Any]], dict[str, str]]
) -> DatasetLoader:
    """A loader of a data set with a known schema: the hub's, or a file like it at ``dataset_kwargs.path``."""

    def load(script: ScriptArguments) -> tuple[Dataset, Dataset | None]:
        place = options(script, {"path"}).get("path")
        configuration = script.dataset_config or (None if place else config)
        train, held_out = from_files(script, place or hub_id, configuration)
        return convert(train, place or hub_id), None if held_out is None else convert(held_out, place or hub_id)

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
    """GSM8K: the answer after ####, without thousands separators."""
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {"answer": answer, "solution": f"${answer}$"}


def _closed_form(row: dict[str, Any]) -> dict[str, str]:
    r"""A closed-form answer, from whichever column holds it; math-verify reads LaTeX between dollars."""
    answer = row.get("answer") or row.get("solution") or (row.get("reward_model") or {}).get("ground_truth")
    answer = str(answer).strip()
    marked = "$" in answer or "\\boxed" in answer or "\\(" in answer
    return {"answer": answer, "solution": answer if marked else f"${answer}$"}


def _running_sum(script: ScriptArguments) -> tuple[Dataset, Dataset]:
    """The demo's sums: ``dataset_size`` (4096) problems from ``dataset_seed``, and the 512 held-out ones."""
    options(script, set())
    held_out = running_sum.held_out()
    columns = {"prompt": [p.prompt for p in held_out], "answer": [p.answer for p in held_out]}
    size = script.dataset_size or RUNNING_SUM_SIZE
    return running_sum.training_set(size, script.dataset_seed), Dataset.from_dict(columns)


_GSM8K = _known("openai/gsm8k", "main", ("question",), _final_number)
_BIG_MATH = _known("open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5", ("prompt", "problem"), _closed_form)
_DAPO_MATH = _known("open-r1/DAPO-Math-17k-Processed", "en", ("prompt",), _closed_form)

LOADERS: dict[str, DatasetLoader] = {
    "reasoning_gym": reasoning_gym_task.load,
    "running_sum": _running_sum,
    "gsm8k": _GSM8K,
    "openai/gsm8k": _GSM8K,
    "bigmath": _BIG_MATH,
    "open-r1/Big-Math-RL-Verified-Processed": _BIG_MATH,
    "dapo_math_17k": _DAPO_MATH,
    "open-r1/DAPO-Math-17k-Processed": _DAPO_MATH,
}
GENERATED = ("reasoning_gym", "running_sum")  # make dataset_size problems instead of being cut to it
