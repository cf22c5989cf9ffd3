"""Read all splits of a local file, a local folder or a data set of the Hugging Face hub."""

import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas
from datasets import DatasetDict, Features, Value, load_dataset, load_dataset_builder, load_from_disk
from datasets.packaged_modules.csv.csv import Csv
from pandas.errors import EmptyDataError

from qerl_recipes.files.json_files import numbered
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks.answer_columns import LINE

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def read(name: str, config: str | None) -> DatasetDict:
    """Return the splits of a file, a folder or a hub id.

    A file has the split ``train``. ``config`` is the configuration of a folder or hub id. Local CSV files are read as
    texts, letter for letter. Raises ConfigError if nothing can be read.
    """
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.suffix not in READERS:
                raise ConfigError(f"dataset_name {name}: cannot read {path.suffix} files, only {', '.join(READERS)}")
            if config is not None:
                warnings.warn(f"dataset_config: {config} has no effect on the file {name}", stacklevel=2)
            if READERS[path.suffix] == "json" and (flaw := _encoding_flaw(path)) is not None:
                raise ConfigError(f"dataset_name {flaw}")  # otherwise it would be found only when the row is used
            files = {"data_files": {"train": str(path)}}
            return load_dataset(READERS[path.suffix], **files, **_as_texts(READERS[path.suffix], **files))
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            saved = load_from_disk(str(path))
            return saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
        if path.is_dir():
            return load_dataset(str(path), name=config, **_as_texts(str(path), name=config))
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


def _encoding_flaw(file: Path) -> str | None:
    """Name the first line of a file that is not UTF-8, and the way out; return None if all lines are."""
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        return f"{file}, line {line} is not UTF-8; save the file as UTF-8"
    return None


def _flaw(path: Path) -> str | None:
    """Name the first flaw in a JSON file, or in those of a folder, that no reader accepts; None if there is none.

    The text names the file, the line and the way out.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in (file for file in files if file.is_file() and READERS.get(file.suffix) == "json"):
        if (flaw := _encoding_flaw(file)) is not None:
            return flaw
        lines = list(numbered(file))
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
                return f"{file}, line {number} is no JSON object; each problem is one, such as {LINE}"
    return None


def _reason(path: Path, error: BaseException) -> str:
    """Say why ``datasets`` cannot read an existing path.

    The text is that of the first cause, which names row or column.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    nothing = isinstance(error, StopIteration | EmptyDataError) or "corresponds to no data" in str(error)
    if nothing or (path.is_file() and not path.stat().st_size):
        return f"{path}, or one of its splits, holds no problems; write some, or remove the file"
    return f"{path} cannot be read ({type(error).__name__}: {str(error).strip()}); mend the file, or name another"


def _as_texts(place: str, **options: Any) -> dict[str, Any]:
    """Return the options with which ``load_dataset`` reads CSV files as text.

    007 is then not read as 7, nor NA as a missing answer. ``options`` are the other options. The result is empty for
    other files, and for a folder whose README defines the columns.

    Raises ConfigError if the files have different columns: those that the first file lacks would be lost.
    """
    with TemporaryDirectory() as cache:  # the usual cache may hold columns from an earlier reading
        builder = load_dataset_builder(place, cache_dir=cache, **options)
    if not isinstance(builder, Csv) or builder.info.features is not None:
        return {}
    header = {**builder.config.pd_read_csv_kwargs, "nrows": 0, "chunksize": None}
    files = [file for split_files in builder.config.data_files.values() for file in split_files]
    columns = [list(pandas.read_csv(file, **header).columns) for file in files]
    for file, names in zip(files, columns, strict=True):
        if set(names) != set(columns[0]):
            raise ConfigError(
                f"{file} has the columns {', '.join(names)}, and {files[0]} has {', '.join(columns[0])}; give all CSV "
                "files of a folder the same"
            )
    texts = Features({name: Value("string") for name in columns[0]})
    return {"features": texts, "keep_default_na": False, "na_values": [""]}
