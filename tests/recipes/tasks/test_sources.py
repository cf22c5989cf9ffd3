"""Test where problems come from: files, known data sets, slices and generators, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import prompts
from qerl_recipes.tasks.rewards import accuracy
from qerl_recipes.tasks.sources import LOADERS, hub_ids

FIXTURES = Path(__file__).parents[2] / "fixtures" / "data"


def read(name: Any = None, **settings: Any) -> tuple[Dataset, Dataset | None]:
    return prompts.read(ScriptArguments(dataset_name=None if name is None else str(name), **settings), LOADERS)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_gsm8k_keeps_the_number_after_the_marks() -> None:
    train, held_out = read("gsm8k", dataset_kwargs={"path": str(FIXTURES / "gsm8k")})
    assert train["answer"] == ["1205", "5"] and train["solution"] == ["$1205$", "$5$"]
    assert train["prompt"][1] == "A tram takes 7 people and 2 get off. How many stay?"
    assert held_out is not None and held_out["answer"] == ["9"]


REMAINDER = "Find the remainder of 2^10 divided by 7."


@pytest.mark.parametrize(
    ("name", "file", "prompt", "solution"),
    [
        ("bigmath", "big_math_processed.jsonl", "Simplify 2/6.", r"$\frac{1}{3}$"),
        ("bigmath", "big_math_original.jsonl", "Simplify 2/6.", r"$\frac{1}{3}$"),
        ("dapo_math_17k", "dapo_processed.jsonl", REMAINDER, "$2$"),
        ("dapo_math_17k", "dapo_original.jsonl", [{"role": "user", "content": REMAINDER}], "$2$"),
    ],
)
def test_known_data_sets_get_prompt_and_solution(name: str, file: str, prompt: Any, solution: str) -> None:
    train, held_out = read(name, dataset_kwargs={"path": str(FIXTURES / file)})
    assert (train[0]["prompt"], train[0]["solution"], held_out) == (prompt, solution, None)
    if file == "big_math_processed.jsonl":
        assert accuracy([r"\boxed{1/3}", r"\boxed{3}"], train["solution"]) == [1.0, 0.0]


def test_an_answer_of_zero_is_zero(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "mine.jsonl", [{"problem": "1-1?", "answer": 0, "solution": "not this"}])
    train, _ = read("bigmath", dataset_kwargs={"path": path})
    assert train["solution"] == ["$0$"] and str(train[0]["answer"]) == "0"


@pytest.mark.parametrize("kind", ["jsonl", "windows.jsonl", "json", "parquet", "saved"])
def test_a_file_of_any_kind_is_training_data(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "solution": str(i)} for i in range(3)]
    path, data = tmp_path / f"mine.{kind}", Dataset.from_list(rows)
    jsonl(path, rows)
    if kind == "windows.jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        data.to_parquet(str(path))
    elif kind == "saved":
        path.unlink()
        data.save_to_disk(str(path))
    train, held_out = read(path)
    assert train["prompt"] == ["p0", "p1", "p2"] and held_out is None


@pytest.mark.parametrize(
    ("train_split", "test_split", "train", "held_out"),
    [
        ("train", "test", range(10), None),
        ("train[:80%]", "train[80%:]", range(8), range(8, 10)),
        ("train[2:5]", "test", range(2, 5), None),
        ("train[-3:]", "train[:2]", range(7, 10), range(2)),
    ],
)
def test_a_split_may_be_a_slice(
    train_split: str, test_split: str, train: range, held_out: range | None, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": f"p{i}"} for i in range(10)])
    splits = read(path, dataset_train_split=train_split, dataset_test_split=test_split)
    expected = [rows and [f"p{i}" for i in rows] for rows in (train, held_out)]
    assert [data and data["prompt"] for data in splits] == expected


def test_a_folder_with_a_test_file_holds_problems_out(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    jsonl(tmp_path / "test.jsonl", [{"prompt": "c"}])
    assert [data and data["prompt"] for data in read(tmp_path)] == [["a", "b"], ["c"]]
    both, held_out = read(tmp_path, dataset_train_split="train+test")
    assert both["prompt"] == ["a", "b", "c"] and held_out is None


def test_reasoning_gym_repeats_and_holds_problems_out() -> None:
    (train, held_out), again, other = (read("reasoning_gym", dataset_size=8, dataset_seed=seed) for seed in (1, 1, 2))
    assert train["prompt"] == again[0]["prompt"] != other[0]["prompt"]
    assert held_out is not None and not set(train["prompt"]) & set(held_out["prompt"])
    assert len(held_out) == len(set(held_out["prompt"])) == 1000
    task = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    train, held_out = read("reasoning_gym", dataset_size=4, dataset_kwargs=task)
    assert all(len(prompt.rpartition(": ")[2].split()) == 4 for prompt in train["prompt"])  # tokens: a, sign, b, =
    assert held_out is not None and 0 < len(train) <= 4 and len(held_out) == 50  # there are 200 in all


@pytest.mark.parametrize(("name", "held_out"), [("running_sum", 512), ("pick_number", 1000)])
def test_a_generator_takes_size_and_seed(name: str, held_out: int) -> None:
    (train, others), (more, _) = (read(name, dataset_size=300, dataset_seed=seed) for seed in (4, 5))
    assert others is not None and (len(train), len(others)) == (300, held_out)
    assert train["prompt"] != more["prompt"] and not set(train["prompt"]) & set(others["prompt"])
    assert len(read(name)[0]) == 4096


NO_SPLITS = ("reasoning_gym", "running_sum", "pick_number")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (None, {}, "dataset_name is missing"),
        ("/no/such/folder", {}, "neither a readable file or folder"),
        ("/no/such/file.jsonl", {}, "there is no such file"),
        ("FOLDER/empty.jsonl", {}, "empty.jsonl is empty; write a JSON object for each problem, or"),
        ("FOLDER/empty.parquet", {}, "empty.parquet, or one of its splits, holds no problems; write some, or"),
        ("FOLDER/broken.jsonl", {}, "broken.jsonl, line 3 is no JSON (Expecting value, column 12); m"),
        ("FOLDER/broken.json", {}, "broken.json, line 2 is no JSON (Expecting value, column 12); mend"),
        ("FOLDER/folder", {}, "folder/train.jsonl, line 2 is no JSON object; each problem is one, su"),
        ("FOLDER/latin.jsonl", {}, "latin.jsonl, line 2 is not UTF-8; save the file as UTF-8"),
        ("FOLDER/twice.jsonl", {}, "cannot be read (ArrowInvalid: JSON parse error: Column(/prompt) w"),
        ("FOLDER/notes.txt", {}, "cannot read .txt files"),
        ("FOLDER/mine.jsonl", {"dataset_prompt_column": "problm"}, "has no column problm; it has"),
        ("FOLDER/mine.jsonl", {"dataset_train_split": "tran"}, "has no split 'tran' but train"),
        ("FOLDER/mine.jsonl", {"dataset_train_split": "train[:x]"}, "write it as train[:90%]"),
        ("FOLDER/four.jsonl", {"dataset_train_split": "train[:1]+train[2:]"}, "it takes two parts of one split"),
        (
            "FOLDER/four.jsonl",
            {"dataset_test_split": "train[3:]"},
            "dataset_test_split train[3:] and dataset_train_split train have 1 problems in common",
        ),
        ("FOLDER/mine.jsonl", {"dataset_size": 9}, "dataset_size is 9"),
        ("FOLDER/mine.jsonl", {"dataset_kwargs": {"colums": {}}}, "knows no colums"),
        ("FOLDER/mine.jsonl", {"dataset_kwargs": {"columns": ["a"]}}, "dataset_kwargs: columns is ['a']; it maps"),
        ("FOLDER/mine.jsonl", {"dataset_kwargs": {"columns": {"a": 3}}}, "dataset_kwargs: columns is {'a': 3}; it"),
        *((name, {"dataset_test_split": "t"}, f"{name} does not read dataset_test_split") for name in NO_SPLITS),
        ("pick_number", {"dataset_config": "main"}, "pick_number does not read dataset_config"),
        ("bigmath", {"dataset_kwargs": {"path": "FOLDER/mine.jsonl"}}, "has the columns"),
        ("reasoning_gym", {"dataset_config": "chain_sums"}, "task 'chain_sums'"),
        ("reasoning_gym", {"dataset_kwargs": {"terms": 3}}, "cannot be generated"),
        ("running_sum", {"dataset_kwargs": {"terms": 3}}, "knows no terms"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else "",
)
def test_data_that_cannot_be_had_are_refused(
    name: str | None, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    jsonl(tmp_path / "mine.jsonl", [{"prompt": "p", "text": "t"}])
    jsonl(tmp_path / "four.jsonl", [{"prompt": "p"}] * 4)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "broken.jsonl").write_text('{"prompt": "p"}\n\n{"prompt": \n')
    (tmp_path / "broken.json").write_text('[{"prompt": "p"},\n{"prompt": }]')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text('{"prompt": "p"}\n5\n')
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "p"}\n{"prompt": "é"}\n'.encode("latin-1"))
    (tmp_path / "twice.jsonl").write_text('{"prompt": "p", "prompt": "q"}\n')
    (tmp_path / "notes.txt").write_text("x")
    name, settings = json.loads(json.dumps([name, settings]).replace("FOLDER", str(tmp_path)))
    with pytest.raises(ConfigError) as error:
        read(name, **settings)
    assert message in str(error.value)


def test_a_configuration_without_effect_on_a_file_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="dataset_config: level_3 has no effect on the file"):
        read(jsonl(tmp_path / "mine.jsonl", [{"prompt": "p"}]), dataset_config="level_3")


def test_csv_is_refused(tmp_path: Path) -> None:
    """Check that no answer such as 007 becomes a number."""
    (tmp_path / "folder").mkdir()
    for file, message in ((tmp_path / "mine.csv", "cannot read .csv files"), (tmp_path / "folder", "holds CSV, which")):
        (file / "train.csv" if file.is_dir() else file).write_text("prompt,answer\np,007\n")
        with pytest.raises(ConfigError, match=message):
            read(file)


def test_a_card_names_the_data_sets_of_the_hub_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "rows").mkdir(parents=True)
    named = {"gsm8k": ["openai/gsm8k"], "me/rows": ["me/rows"]}
    named |= {name: [] for name in ("running_sum", "mine/rows", "gone/rows.jsonl", str(tmp_path))}
    for name, ids in named.items():
        assert hub_ids({"dataset_name": name}) == ids
    assert hub_ids({}) == hub_ids({"dataset_name": "gsm8k", "dataset_kwargs": {"path": "a_copy"}}) == []
