"""Data as they lie somewhere: a local file, a local folder or a data set of the Hugging Face hub, in all its splits."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas
from datasets import DatasetDict, Features, Value, load_dataset, load_dataset_builder, load_from_disk
from datasets.packaged_modules.csv.csv import Csv

from qerl_recipes.recipe.file import ConfigError

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def read(name: str, config: str | None) -> DatasetDict:
    """The splits of a file (its split is ``train``), a folder or a hub id, ``config`` being that of the latter two.

    Local CSV files are read as texts, letter for letter. Raises ConfigError where there is nothing to read.
    """
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.suffix not in READERS:
                raise ConfigError(f"dataset_name {name}: cannot read {path.suffix} files, only {', '.join(READERS)}")
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
    except Exception as error:  # datasets raises a dozen kinds of error for a place where nothing can be read
        raise ConfigError(
            f"dataset_name {name} is neither a readable file or folder here nor one that the hub gives out "
            f"({type(error).__name__}: {error}); offline, use reasoning_gym, pick_number or a local JSONL file"
        ) from error


def _as_texts(place: str, **named: Any) -> dict[str, Any]:
    """What ``load_dataset`` needs beside ``named`` to read CSV files as they stand, where 007 is no 7 and NA no missing
    answer; nothing for other files, and for columns of which the folder's README says what they are.

    Raises ConfigError for files of different columns: those that the first lacks would be lost.
    """
    with TemporaryDirectory() as nothing:  # in its cache are the columns as somebody has read them before
        builder = load_dataset_builder(place, cache_dir=nothing, **named)
    if not isinstance(builder, Csv) or builder.info.features is not None:
        return {}
    header = {**builder.config.pd_read_csv_kwargs, "nrows": 0, "chunksize": None}
    files = [file for of_split in builder.config.data_files.values() for file in of_split]
    columns = [list(pandas.read_csv(file, **header).columns) for file in files]
    for file, found in zip(files, columns, strict=True):
        if set(found) != set(columns[0]):
            raise ConfigError(
                f"{file} has the columns {', '.join(found)}, and {files[0]} has {', '.join(columns[0])}; give all CSV "
                "files of a folder the same"
            )
    texts = Features({name: Value("string") for name in columns[0]})
    return {"features": texts, "keep_default_na": False, "na_values": [""]}
