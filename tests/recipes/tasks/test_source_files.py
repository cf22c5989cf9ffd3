"""CSV files are read as they stand, alone and in a folder, whatever pandas would make of them."""

from pathlib import Path

import pytest
from datasets import Dataset, load_dataset

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks.prompts import read

WRITTEN = ["007", "1e3", "None", "1,234", "True", "", "NA", "3.0", "null", "nan", "12345678901234567890123", " 5"]
MEANT = [text or None for text in WRITTEN]


def csv(path: Path, answers: list[str], column: str = "answer", prompt: str = "p") -> Path:
    """A file with a prompt for each of ``answers``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"prompt,{column}\n" + "".join(f'{prompt}{i},"{text}"\n' for i, text in enumerate(answers)))
    return path


def answers_in(place: Path, **others: str) -> list[list[str | None]]:
    """Of the training and the held-out problems."""
    found = read(ScriptArguments(dataset_name=str(place), **others))
    return [data["answer"][:] for data in found if data is not None]


def test_a_csv_file_has_texts_as_they_stand_there(tmp_path: Path) -> None:
    assert answers_in(csv(tmp_path / "mine.csv", WRITTEN)) == [MEANT]


def test_a_configuration_without_effect_on_a_file_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="dataset_config: level_3 has no effect on the file"):
        answers_in(csv(tmp_path / "mine.csv", WRITTEN), dataset_config="level_3")


def test_in_a_folder_too(tmp_path: Path) -> None:
    csv(tmp_path / "train.csv", WRITTEN)
    csv(tmp_path / "test.csv", ["010", "020"], prompt="q")
    assert answers_in(tmp_path) == [MEANT, ["010", "020"]]


def test_a_column_of_nothing_but_numbers_stays_one_of_texts(tmp_path: Path) -> None:
    """Of such a column pandas makes numbers, and floats where one is missing."""
    expected = ["007", None, "8"]
    assert answers_in(csv(tmp_path / "mine.csv", ["007", "", "8"])) == [expected]
    csv(tmp_path / "folder" / "train.csv", ["007", "", "8"])
    assert answers_in(tmp_path / "folder") == [expected]


def test_what_somebody_has_read_before_is_not_taken_out_of_the_cache(tmp_path: Path) -> None:
    csv(tmp_path / "train.csv", ["007", "8"])
    assert load_dataset(str(tmp_path))["train"]["answer"][:] == [7, 8]
    assert answers_in(tmp_path) == [["007", "8"]]


def test_what_the_readme_of_a_folder_says_of_its_columns_stands(tmp_path: Path) -> None:
    csv(tmp_path / "train.csv", ["007", "8"])
    types = "[{name: prompt, dtype: string}, {name: answer, dtype: int64}]"
    (tmp_path / "README.md").write_text(f"---\ndataset_info: {{features: {types}}}\n---\n")
    assert answers_in(tmp_path) == [[7, 8]]


def test_a_separator_that_the_readme_names_is_used(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("prompt;answer\np;007\n")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: data/a.csv\n  sep: ';'\n---\n"
    )
    assert answers_in(tmp_path) == [["007"]]


def test_files_of_different_columns_are_refused_and_no_column_is_lost(tmp_path: Path) -> None:
    csv(tmp_path / "train.csv", ["1"])
    (tmp_path / "test.csv").write_text("answer,level,prompt\n2,hard,q\n")
    with pytest.raises(
        ConfigError, match=r"test\.csv has the columns answer, level, prompt, and .*train\.csv has prompt"
    ):
        answers_in(tmp_path)
    (tmp_path / "test.csv").write_text("answer,prompt\n02,q\n")  # their order says nothing
    assert answers_in(tmp_path) == [["1"], ["02"]]


def test_numbers_of_other_files_stay_numbers(tmp_path: Path) -> None:
    """A JSONL or Parquet file says itself what is a number."""
    rows = Dataset.from_list([{"prompt": "p", "answer": 7}])
    rows.to_parquet(str(tmp_path / "a" / "train.parquet"))
    rows.to_json(str(tmp_path / "b" / "train.jsonl"))
    assert answers_in(tmp_path / "a") == answers_in(tmp_path / "b") == [[7]]
