"""Load problems from local files, from the hub, or by a name that recipes know."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, ReadInstruction, concatenate_datasets, load_dataset, load_from_disk

from qerl_recipes.files.json_files import numbered
from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import reasoning_gym, running_sum
from qerl_recipes.tasks.generators import PICK_NUMBER, SIZE, Generator
from qerl_recipes.tasks.interface import DatasetLoader

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
EXAMPLE = '{"prompt": "1+2=", "answer": "3"}'  # a problem of a JSON-lines file, for messages
SPLIT_KEYS = ("dataset_train_split", "dataset_test_split")

Splits = tuple[Dataset, Dataset | None]  # the training problems, and the held-out ones


def read_splits(name: str, config: str | None) -> DatasetDict:
    """Return the splits of a file (``train`` alone), folder or hub id; raise ConfigError for none, and for CSV."""
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.suffix not in READERS:
                raise ConfigError(f"dataset_name {name}: cannot read {path.suffix} files, only {', '.join(READERS)}")
            if config is not None:
                warnings.warn(f"dataset_config: {config} has no effect on the file {name}", stacklevel=2)
            if READERS[path.suffix] == "json":
                next(numbered(path), None)  # otherwise a line that is not UTF-8 would be found only when it is used
            return load_dataset(READERS[path.suffix], data_files={"train": str(path)})
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            saved = load_from_disk(str(path))
            return saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
        if path.is_dir():
            splits = load_dataset(str(path), name=config)
            if any(split.info.builder_name == "csv" for split in splits.values()):
                raise ConfigError(
                    f"dataset_name {name} holds CSV, which does not tell texts such as 007 from numbers; write a JSON "
                    f"object for each problem, such as {EXAMPLE}"
                )
            return splits
        if path.suffix in READERS and not path.exists():
            raise ConfigError(f"dataset_name {name}: there is no such file")
        return load_dataset(name, name=config)
    except ConfigError:
        raise
    except Exception as error:  # datasets raises a dozen kinds of error if it cannot read
        if path.exists():
            raise ConfigError(f"dataset_name {_flaw(path) or _reason(path, error)}") from error
        raise ConfigError(
            f"dataset_name {name} is neither a readable file or folder here nor one that the hub gives out "
            f"({type(error).__name__}: {error}); offline, use reasoning_gym, pick_number or a local JSONL file"
        ) from error


def _flaw(path: Path) -> str | None:
    """Name the first flaw in a file or folder of JSON that no reader accepts, with line and way out, or None."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in (file for file in files if file.is_file() and READERS.get(file.suffix) == "json"):
        try:
            lines = list(numbered(file))
        except ValueError as error:
            return str(error)
        if not lines:
            return f"{file} is empty; write a JSON object for each problem, or remove the file"
        if lines[0][1].lstrip().startswith("[") and file.suffix == ".json":
            lines = [(1, file.read_text(encoding="utf-8-sig"))]  # one list holds all problems
        for number, line in lines:
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                position = f"line {number + error.lineno - 1}"
                return f"{file}, {position} is no JSON ({error.msg}, column {error.colno}); mend the line or remove it"
            if not all(isinstance(row, dict) for row in (value if isinstance(value, list) else [value])):
                return f"{file}, line {number} is no JSON object; each problem is one, such as {EXAMPLE}"
    return None


def _reason(path: Path, error: BaseException) -> str:
    """Say why ``datasets`` cannot read an existing path, by the first cause, which names row or column."""
    while error.__cause__ is not None:
        error = error.__cause__
    nothing = isinstance(error, StopIteration) or "corresponds to no data" in str(error)
    if nothing or (path.is_file() and not path.stat().st_size):
        return f"{path}, or one of its splits, holds no problems; write some, or remove the file"
    return f"{path} cannot be read ({type(error).__name__}: {str(error).strip()}); mend the file, or name another"


def from_files(script: ScriptArguments, name: str, config: str | None) -> Splits:
    """Return the training and held-out splits of a file, a folder or a hub id; each may be a slice (``train[:90%]``).

    The second is None without such a split, or if the default one shares rows with the training split. Raises
    ConfigError if nothing can be read, for no training split, and for a chosen test split that overlaps with it.
    """
    splits = read_splits(name, config)
    train = _rows(splits, "dataset_train_split", script.dataset_train_split)
    if train is None:
        known = f"has no split {script.dataset_train_split!r} but {', '.join(sorted(splits))}"
        raise ConfigError(f"dataset_name {name} {known}; set dataset_train_split")
    held_out = _rows(splits, "dataset_test_split", script.dataset_test_split)
    common = sum(len(set(rows) & set((held_out or {}).get(split, ()))) for split, rows in train.items())
    if common and script.dataset_test_split == ScriptArguments.dataset_test_split:  # the default: nobody asked for it
        held_out = None
    elif common:
        raise ConfigError(
            f"dataset_test_split {script.dataset_test_split} and dataset_train_split {script.dataset_train_split} have "
            f"{common} problems in common; name parts that do not overlap, such as train[:90%] and train[90%:]"
        )
    return _select(splits, train), None if held_out is None else _select(splits, held_out)


def _rows(splits: DatasetDict, key: str, spec: str) -> dict[str, range] | None:
    """Return the rows that a split such as ``train[:80%]`` names, by the split they are in; None if there is none."""
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
    return concatenate_datasets([splits[name].select(part) for name, part in rows.items()])


def map_splits(splits: Splits, convert: Callable[[Dataset], Dataset]) -> Splits:
    train, held_out = splits
    return convert(train), None if held_out is None else convert(held_out)


def refuse_unread(script: ScriptArguments, source: str, *keys: str) -> None:
    """Raise ConfigError if one of ``keys`` is set, because ``source`` does not read it."""
    defaults = ScriptArguments()
    if unread := [key for key in keys if getattr(script, key) != getattr(defaults, key)]:
        raise ConfigError(f"{source} does not read {', '.join(unread)}; remove the key")


def rename(data: Dataset, names: dict[str, str], source: str, way_out: str = "") -> Dataset:
    """Return ``data`` with renamed columns, which replace others of that name; raise ConfigError for a missing one."""
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
        known = ", ".join(sorted(allowed)) or "no options"
        raise ConfigError(f"dataset_kwargs: {script.dataset_name} knows no {', '.join(unknown)}; it knows {known}")
    return kwargs


def from_name(script: ScriptArguments) -> Splits:
    """Load a local file, a local folder or a hub id; ``dataset_kwargs.columns`` renames columns, {old: new}."""
    names, source = options(script, {"columns"}).get("columns", {}), str(script.dataset_name)
    if not isinstance(names, dict) or not all(isinstance(new, str) for new in names.values()):
        raise ConfigError(f"dataset_kwargs: columns is {names!r}; it maps columns to new names, {{OLD: NEW}}")
    splits = from_files(script, source, script.dataset_config)
    return map_splits(splits, lambda data: rename(data, names, source))


def _known(
    hub_id: str, config: str | None, questions: tuple[str, ...], to_row: Callable[[dict[str, Any]], dict[str, str]]
) -> DatasetLoader:
    """Return a loader for a data set of the hub, or a file with the same columns at ``dataset_kwargs.path``."""

    def load(script: ScriptArguments) -> Splits:
        path = options(script, {"path"}).get("path")
        splits = from_files(script, path or hub_id, script.dataset_config or (None if path else config))
        return map_splits(splits, lambda data: convert(data, path or hub_id))

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
    """Convert a row with a closed-form answer, between dollars unless it is marked: math-verify reads LaTeX so."""
    candidates = row.get("answer"), row.get("solution"), (row.get("reward_model") or {}).get("ground_truth")
    answer = next((text for candidate in candidates if candidate is not None and (text := str(candidate).strip())), "")
    marked = "$" in answer or "\\boxed" in answer or "\\(" in answer
    return {"answer": answer, "solution": answer if marked else f"${answer}$"}


def _generated(generator: Generator) -> DatasetLoader:
    """Return a loader of ``dataset_size`` (4096) problems from ``dataset_seed``, and of those held out."""

    def load(script: ScriptArguments) -> Splits:
        options(script, set())
        refuse_unread(script, generator.name, "dataset_config", *SPLIT_KEYS)
        train = generator.training_set(script.dataset_size or SIZE, script.dataset_seed)
        return train, Dataset.from_list(generator.held_out())

    return load


def _reasoning_gym(script: ScriptArguments) -> Splits:
    refuse_unread(script, "reasoning_gym", *SPLIT_KEYS)
    return reasoning_gym.load(script)


# short name -> what ``_known`` takes, first the hub id, which recipes may give as well
ON_HUB = {
    "gsm8k": ("openai/gsm8k", "main", ("question",), _final_number),
    "bigmath": ("open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5", ("prompt", "problem"), _closed_form),
    "dapo_math_17k": ("open-r1/DAPO-Math-17k-Processed", "en", ("prompt",), _closed_form),
}
LOADERS: dict[str, DatasetLoader] = {
    "reasoning_gym": _reasoning_gym,
    "running_sum": _generated(running_sum.GENERATOR),
    "pick_number": _generated(PICK_NUMBER),
    **{name: _known(*known) for short, known in ON_HUB.items() for name in (short, known[0])},
}
GENERATED = ("reasoning_gym", "running_sum", "pick_number")  # generate dataset_size problems; others are cut to it


def hub_ids(recipe: Mapping[str, Any]) -> list[str]:
    """Return the hub's data sets among those that a recorded recipe trains on; local ones are left out."""
    if (recipe.get("dataset_kwargs") or {}).get("path"):  # a local copy of a known one
        return []
    name = str(recipe.get("dataset_name"))
    name = ON_HUB[name][0] if name in ON_HUB else name
    return [name] if name.count("/") == 1 and not Path(name).suffix and not Path(name).exists() else []
