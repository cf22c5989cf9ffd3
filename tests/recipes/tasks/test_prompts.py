import json
import re
from pathlib import Path

import pytest
from datasets import Dataset

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import answer_columns, running_sum
from qerl_recipes.tasks.prompts import ids, load, read

FIXTURES = Path(__file__).parents[2] / "fixtures" / "data"
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokenizer(chat=False):
    made = running_sum.tokenizer()
    made.chat_template = CHATML if chat else None
    return made


def test_gsm8k_keeps_the_number_after_the_marks_without_separators():
    train, held_out = read(ScriptArguments(dataset_name="gsm8k", dataset_kwargs={"path": str(FIXTURES / "gsm8k")}))
    assert train["answer"] == ["1205", "5"] and train["solution"] == ["$1205$", "$5$"]
    assert train["prompt"][1] == "A tram takes 7 people and 2 get off. How many stay?"
    assert held_out["answer"] == ["9"]


@pytest.mark.parametrize(
    ("name", "file", "first"),
    [
        ("bigmath", "big_math_processed.jsonl", ("Simplify 2/6.", r"$\frac{1}{3}$")),
        ("bigmath", "big_math_original.jsonl", ("Simplify 2/6.", r"$\frac{1}{3}$")),
        ("dapo_math_17k", "dapo_processed.jsonl", ("Find the remainder of 2^10 divided by 7.", "$2$")),
        (
            "dapo_math_17k",
            "dapo_original.jsonl",
            ([{"role": "user", "content": "Find the remainder of 2^10 divided by 7."}], "$2$"),
        ),
    ],
    ids=["bigmath processed", "bigmath original", "dapo processed", "dapo original"],
)
def test_known_data_sets_map_to_prompt_and_solution(name, file, first):
    train, held_out = read(ScriptArguments(dataset_name=name, dataset_kwargs={"path": str(FIXTURES / file)}))
    assert (train[0]["prompt"], train[0]["solution"]) == first
    assert held_out is None


def test_the_mapped_solution_is_one_that_the_accuracy_reward_can_read():
    from qerl_recipes.tasks.rewards import resolve

    script = ScriptArguments(
        dataset_name="bigmath", dataset_kwargs={"path": str(FIXTURES / "big_math_processed.jsonl")}
    )
    train, _ = read(script)
    (accuracy,) = resolve(["accuracy"], script)
    assert accuracy(completions=[r"\boxed{1/3}", r"\boxed{3}"], solution=train["solution"]) == [1.0, 0.0]


@pytest.mark.parametrize("suffix", ["jsonl", "windows.jsonl", "json", "parquet", "csv"])
def test_a_local_file_of_any_kind_is_training_data(suffix, tmp_path):
    rows = [{"prompt": f"p{i}", "solution": str(i)} for i in range(3)]
    path = tmp_path / f"mine.{suffix}"
    if suffix == "jsonl":
        jsonl(path, rows)
    elif suffix == "windows.jsonl":
        jsonl(path, rows)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    elif suffix == "parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    else:
        Dataset.from_list(rows).to_csv(str(path))
    train, held_out = read(ScriptArguments(dataset_name=str(path)))
    assert train["prompt"] == ["p0", "p1", "p2"] and held_out is None


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    Dataset.from_list([{"prompt": "p", "solution": "1"}]).save_to_disk(str(tmp_path / "saved"))
    train, _ = read(ScriptArguments(dataset_name=str(tmp_path / "saved")))
    assert train["prompt"] == ["p"]


@pytest.mark.parametrize(
    ("train_split", "test_split", "train", "held_out"),
    [
        ("train", "test", range(10), None),
        ("train[:80%]", "train[80%:]", range(8), range(8, 10)),
        ("train[2:5]", "test", range(2, 5), None),
        ("train[-3:]", "train[:2]", range(7, 10), range(2)),
    ],
)
def test_a_split_may_be_a_slice(train_split, test_split, train, held_out, tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": f"p{i}"} for i in range(10)])
    script = ScriptArguments(dataset_name=path, dataset_train_split=train_split, dataset_test_split=test_split)
    found = [data and data["prompt"] for data in read(script)]
    assert found == [rows and [f"p{i}" for i in rows] for rows in (train, held_out)]


def test_a_folder_with_a_train_and_a_test_file_holds_problems_out(tmp_path):
    jsonl(tmp_path / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    jsonl(tmp_path / "test.jsonl", [{"prompt": "c"}])
    train, held_out = read(ScriptArguments(dataset_name=str(tmp_path)))
    assert (train["prompt"], held_out["prompt"]) == (["a", "b"], ["c"])
    both, held_out = read(ScriptArguments(dataset_name=str(tmp_path), dataset_train_split="train+test"))
    assert both["prompt"] == ["a", "b", "c"] and held_out is None


def test_an_answer_of_zero_is_zero(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", [{"problem": "1-1?", "answer": 0, "solution": "not this"}])
    train, _ = read(ScriptArguments(dataset_name="bigmath", dataset_kwargs={"path": path}))
    assert train["solution"] == ["$0$"] and str(train[0]["answer"]) == "0"


def test_problems_that_are_trained_on_and_held_out_are_counted(tmp_path, caplog):
    """Whether the prompt is a text or messages; the rows of one file are kept apart by their numbers elsewhere."""
    turns = [{"role": "user", "content": "x"}]
    for i, of in enumerate([("a", "b", "a"), (turns, turns)]):
        folder = tmp_path / str(i)
        folder.mkdir()
        jsonl(folder / "train.jsonl", [{"prompt": prompt} for prompt in of])
        other = [{"role": "user", "content": "y"}] if i else "c"
        jsonl(folder / "test.jsonl", [{"prompt": prompt} for prompt in (of[0], other)])
        read(ScriptArguments(dataset_name=str(folder)))
        assert "1 of 2 held-out problems" in caplog.text
        caplog.clear()
    jsonl(folder / "test.jsonl", [{"prompt": other}])
    read(ScriptArguments(dataset_name=str(folder)))
    assert not caplog.text


SYSTEM, USER = {"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1="}
PARTS = {"role": "user", "content": [{"type": "text", "text": "1+1="}]}


@pytest.mark.parametrize(
    ("prompt", "system_prompt", "message"),
    [
        (None, None, "is None, which is neither a text nor a list of messages"),
        (5, None, "is 5, which is neither a text nor a list of messages"),
        ("", None, "is empty; leave this problem out"),
        (" \n", None, "is empty; leave this problem out"),
        ([], None, "is a list without a message; leave this problem out"),
        (["1+1="], None, "has the message '1+1='; write each as"),
        ([{"role": "user"}], None, "has the message {'role': 'user'"),
        ([SYSTEM, {**USER, "content": ""}], None, "is empty in the message that asks the problem"),
        ([{**USER, "content": ""}, {**SYSTEM, "role": "assistant"}], None, "is empty in the message that asks the p"),
        ([SYSTEM, USER], "Think.", "has a system turn ('Be short.'), and system_prompt would be a second one; remove"),
        ([PARTS], "Think.", "has a message whose content is a list of parts, beside which system_prompt, a text,"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_prompt_that_is_no_problem_is_refused_with_its_row(prompt, system_prompt, message, tmp_path):
    good = [USER] if isinstance(prompt, list) else "1+1="
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": good}, {"prompt": prompt}])
    script = ScriptArguments(dataset_name=path, system_prompt=system_prompt)
    with pytest.raises(ConfigError) as error:
        read(script)
    assert f"mine.jsonl: the prompt of row 2 {message}" in str(error.value)


def test_a_text_that_looks_like_a_date_is_refused_as_a_prompt(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": "2024-01-01"}])
    with pytest.raises(ConfigError, match=r"row 1 is datetime.* neither a text nor a list of messages"):
        read(ScriptArguments(dataset_name=path))


def test_the_row_of_a_refused_prompt_is_that_of_the_file_and_names_its_split(tmp_path):
    rows = [{"prompt": "" if i == 4 else f"{i}+1="} for i in range(9)]
    path = jsonl(tmp_path / "test.jsonl", rows)
    for seed in range(3):  # dataset_size takes the rows in another order each time
        with pytest.raises(ConfigError, match="the prompt of row 5 is empty"):
            read(ScriptArguments(dataset_name=path, dataset_size=9, dataset_seed=seed))
    jsonl(tmp_path / "train.jsonl", [{"prompt": "1+1="}])
    with pytest.raises(ConfigError, match=rf"{tmp_path}, test: the prompt of row 5 is empty"):
        read(ScriptArguments(dataset_name=str(tmp_path)))


def test_messages_with_a_system_turn_and_with_parts_are_taken_without_a_system_prompt(tmp_path):
    for turns in ([SYSTEM, USER], [PARTS]):
        path = jsonl(tmp_path / "mine.jsonl", [{"prompt": turns}])
        made = tokenizer()
        made.chat_template = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
        assert load(ScriptArguments(dataset_name=path), made)[0]["prompt"] == [turns]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("7+1={# {{ #}", "what it makes of messages of user does not contain the problem's text; correct it"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", "does not contain"),
        ("{% for m in messages %}{{ m.content.text }}{% endfor %}", "does not contain the problem's text"),
        ("{{ raise_exception('no users') }}", "it cannot render messages of user (TemplateError: no users)"),
        ("{% if short %}{{ messages[0].content }}{% endif %}", "does not contain the problem's text"),
        (None, "mine.jsonl: prompts that are lists of messages need a chat template, and the model has none"),
    ],
    ids=["constant", "parts", "attribute", "raises", "options", "none"],
)
def test_a_template_that_leaves_the_problem_out_is_refused(template, message, tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": [USER]}])
    made = tokenizer()
    made.chat_template = template
    with pytest.raises(ConfigError) as error:
        load(ScriptArguments(dataset_name=path), made)
    assert message in str(error.value)
    if template and "short" in template:
        assert len(load(ScriptArguments(dataset_name=path), made, {"short": True})[0]) == 1


@pytest.mark.parametrize(
    ("reward", "column", "values", "message"),
    [
        ("exact_answer", "answer", '"3" 4', None),
        ("exact_answer", "answer", "3 4", None),
        ("exact_answer", "answer", "3 3.5", "holds float"),  # 3 would be compared as 3.0
        ("last_number", "answer", "3 3.5", None),
        ("accuracy", "solution", "3 3.5", None),
        ("exact_answer", "answer", "true false", "holds bool"),
        ("exact_answer", "answer", '"2024-01-01" "2024-02-01"', "holds datetime"),
        ("accuracy", "solution", '["1"] ["2"]', "holds list"),
        ("cosine", "solution", '"1" null', "is empty in 1 of the 2 rows of the training data, the first of them row 2"),
        ("last_number", "answer", '" " "1"', "empty in 1 of the 2 rows of the training data, the first of them row 1"),
        ("format", "answer", "true null", None),  # reads no column
    ],
)  # fmt: skip
def test_answers_that_a_built_in_reward_cannot_compare_with_are_named(reward, column, values, message, tmp_path):
    rows = [f'{{"prompt": "p", "{column}": {value}}}\n' for value in re.findall(r'"[^"]*"|\[.*?\]|\S+', values)]
    (tmp_path / "mine.jsonl").write_text("".join(rows))
    train, _ = read(ScriptArguments(dataset_name=str(tmp_path / "mine.jsonl")))
    found = list(answer_columns.misfits(reward, train, "training"))
    assert len(found) == (message is not None) and (message or "") in "".join(found)


def test_columns_can_be_renamed_and_the_prompt_column_chosen(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", [{"problem": "p", "prompt": "old", "final": "4"}])
    script = ScriptArguments(
        dataset_name=path, dataset_prompt_column="problem", dataset_kwargs={"columns": {"final": "solution"}}
    )
    train, _ = read(script)
    assert train[0] == {"prompt": "p", "solution": "4"}


def test_dataset_size_takes_a_seeded_part(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": f"p{i}"} for i in range(50)])

    def part(seed):
        return read(ScriptArguments(dataset_name=path, dataset_size=10, dataset_seed=seed))[0]["prompt"]

    assert part(1) == part(1) != part(2)
    assert len(set(part(1))) == 10


def test_mixture_takes_shares_of_several_sets_and_splits_off_a_test(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", [{"prompt": f"a{i}", "solution": "1", "extra": "x"} for i in range(20)])
    b = jsonl(tmp_path / "b.jsonl", [{"prompt": f"b{i}", "solution": "1"} for i in range(10)])
    mixture = {
        "datasets": [{"id": a, "columns": ["prompt", "solution"], "weight": 0.5}, {"id": b}],
        "seed": 3,
        "test_split_size": 5,
    }
    train, held_out = read(ScriptArguments(dataset_mixture=mixture))
    prompts = [*train["prompt"], *held_out["prompt"]]
    assert len(train) == 15 and len(held_out) == 5 and len(set(prompts)) == 20
    assert sum(prompt.startswith("a") for prompt in prompts) == 10


def test_reasoning_gym_is_the_same_for_the_same_seed_and_holds_problems_out():
    def problems(seed):
        return read(ScriptArguments(dataset_name="reasoning_gym", dataset_size=8, dataset_seed=seed))

    train, held_out = problems(1)
    assert train["prompt"] == problems(1)[0]["prompt"] != problems(2)[0]["prompt"]
    assert not set(train["prompt"]) & set(held_out["prompt"]) and len(held_out) == len(set(held_out["prompt"])) == 1000


def test_reasoning_gym_takes_the_options_of_its_task():
    script = ScriptArguments(
        dataset_name="reasoning_gym", dataset_size=4, dataset_kwargs={"min_terms": 2, "max_terms": 2, "max_digits": 1}
    )
    train, held_out = read(script)
    for prompt in train["prompt"]:
        assert len(prompt.rpartition(": ")[2].split()) == 4  # a, sign, b and =
    assert 0 < len(train) <= 4 and len(held_out) == 50  # of 200 that there are


def test_running_sum_never_trains_on_a_held_out_problem():
    train, held_out = read(ScriptArguments(dataset_name="running_sum", dataset_size=300, dataset_seed=4))
    assert len(train) == 300 and len(held_out) == 512
    assert not set(train["prompt"]) & set(held_out["prompt"])


def test_prompts_become_messages_where_the_tokenizer_has_a_chat_template(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": "1+1=", "answer": "2", "messages": "unused"}])
    train, _ = load(ScriptArguments(dataset_name=path, system_prompt="Think."), tokenizer(chat=True))
    assert train[0] == {
        "answer": "2",
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1="}],
    }
    train, _ = load(ScriptArguments(dataset_name=path), tokenizer())
    assert train["prompt"] == ["1+1="]


def test_prompts_are_counted_as_the_template_s_options_make_them(tmp_path):
    """Qwen3's enable_thinking: false adds tokens to the prompt; here as many as there are in 0000."""
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": "1+1="}, {"prompt": "1+1+1+1="}])
    padded = tokenizer()
    padded.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if pad %}0000{% endif %}"
    script = ScriptArguments(dataset_name=path, max_prompt_length=8)
    assert len(load(script, padded)[0]) == len(load(script, padded, {"pad": False})[0]) == 2
    assert len(load(script, padded, {"pad": True})[0]) == 1


def test_a_conversation_is_asked_as_the_recipe_has_it_templated():
    tokenizer = running_sum.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ mark }}{% endif %}"
    )
    asked = ids([{"role": "user", "content": "12"}], tokenizer, {"mark": "7"})
    assert tokenizer.decode(asked, skip_special_tokens=True).replace(" ", "") == "127"
    assert ids("12", tokenizer, {"mark": "7"}) == tokenizer("12")["input_ids"]


def test_a_prompt_of_messages_keeps_its_turns(tmp_path):
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": turns}])
    train, _ = load(ScriptArguments(dataset_name=path, system_prompt="S"), tokenizer(chat=True))
    assert train[0]["prompt"] == [{"role": "system", "content": "S"}, *turns]


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, caplog):
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": "1+1="}, {"prompt": "1+1+1="}])
    train, _ = load(ScriptArguments(dataset_name=path, max_prompt_length=4), tokenizer())
    assert train["prompt"] == ["1+1="]
    assert "1 of 2 prompts have more than 4 tokens" in caplog.text
    with pytest.raises(ConfigError, match="no prompt has at most max_prompt_length = 3 tokens"):
        load(ScriptArguments(dataset_name=path, max_prompt_length=3), tokenizer())


MIXTURE = {"datasets": [{"id": "FOLDER/mine.jsonl"}]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "dataset_name is missing"),
        ({"dataset_name": "/no/such/folder"}, "neither a readable file or folder"),
        ({"dataset_name": "/no/such/file.jsonl"}, "there is no such file"),
        ({"dataset_name": "FOLDER/empty.jsonl"}, "empty.jsonl is empty; write a JSON object for each problem, or"),
        ({"dataset_name": "FOLDER/empty.csv"}, "empty.csv, or one of its splits, holds no problems; write some, or"),
        ({"dataset_name": "FOLDER/broken.jsonl"}, "broken.jsonl, line 3 is no JSON (Expecting value, column 12); m"),
        ({"dataset_name": "FOLDER/broken.json"}, "broken.json, line 2 is no JSON (Expecting value, column 12); mend"),
        ({"dataset_name": "FOLDER/folder"}, "folder/train.jsonl, line 2 is no JSON object; each problem is one, su"),
        ({"dataset_name": "FOLDER/latin.jsonl"}, "latin.jsonl, line 2 is not UTF-8; save the file as UTF-8"),
        ({"dataset_name": "FOLDER/twice.jsonl"}, "cannot be read (ArrowInvalid: JSON parse error: Column(/prompt) w"),
        ({"dataset_name": "FOLDER/notes.txt"}, "cannot read .txt files"),
        ({"dataset_name": "FOLDER/mine.jsonl", "dataset_prompt_column": "problm"}, "has no column problm; it has"),
        ({"dataset_name": "FOLDER/mine.jsonl", "dataset_train_split": "tran"}, "has no split 'tran' but train"),
        ({"dataset_name": "FOLDER/mine.jsonl", "dataset_train_split": "train[:x]"}, "write it as train[:90%]"),
        (
            {"dataset_name": "FOLDER/four.jsonl", "dataset_test_split": "train[3:]"},
            "dataset_test_split train[3:] and dataset_train_split train have 1 problems in common",
        ),
        ({"dataset_name": "FOLDER/mine.jsonl", "dataset_size": 9}, "dataset_size is 9"),
        ({"dataset_name": "FOLDER/mine.jsonl", "dataset_kwargs": {"colums": {}}}, "knows no colums"),
        ({"dataset_name": "FOLDER/mine.jsonl", "dataset_mixture": {"datasets": []}}, "both given"),
        ({"dataset_mixture": {"datasets": []}}, "must list at least one"),
        ({"dataset_mixture": {"datasets": [{"name": "x"}]}}, "a part has id"),
        (
            {"dataset_mixture": MIXTURE, "dataset_kwargs": {"columns": {"a": "b"}}},
            "does not read dataset_kwargs; remove",
        ),
        ({"dataset_mixture": MIXTURE, "dataset_config": "main"}, "does not read dataset_config; remove"),
        ({"dataset_mixture": MIXTURE, "dataset_train_split": "t"}, "does not read dataset_train_split; remove"),
        ({"dataset_mixture": MIXTURE, "dataset_test_split": "t"}, "does not read dataset_test_split; remove"),
        (
            {"dataset_name": "reasoning_gym", "dataset_test_split": "t"},
            "reasoning_gym does not read dataset_test_split",
        ),
        ({"dataset_name": "running_sum", "dataset_train_split": "t"}, "running_sum does not read dataset_train_split"),
        ({"dataset_name": "bigmath", "dataset_kwargs": {"path": "FOLDER/mine.jsonl"}}, "has the columns"),
        ({"dataset_name": "reasoning_gym", "dataset_config": "chain_sums"}, "task 'chain_sums'"),
        ({"dataset_name": "reasoning_gym", "dataset_kwargs": {"terms": 3}}, "cannot be generated"),
        ({"dataset_name": "running_sum", "dataset_kwargs": {"terms": 3}}, "knows no terms"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else "",
)
def test_data_that_cannot_be_had_are_refused_by_name(settings, message, tmp_path):
    jsonl(tmp_path / "mine.jsonl", [{"prompt": "p", "text": "t"}])
    jsonl(tmp_path / "four.jsonl", [{"prompt": "p"}] * 4)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.csv").touch()
    (tmp_path / "broken.jsonl").write_text('{"prompt": "p"}\n\n{"prompt": \n')
    (tmp_path / "broken.json").write_text('[{"prompt": "p"},\n{"prompt": }]')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text('{"prompt": "p"}\n5\n')
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "p"}\n{"prompt": "é"}\n'.encode("latin-1"))
    (tmp_path / "twice.jsonl").write_text('{"prompt": "p", "prompt": "q"}\n')
    (tmp_path / "notes.txt").write_text("x")
    settings = json.loads(json.dumps(settings).replace("FOLDER", str(tmp_path)))
    with pytest.raises(ConfigError) as error:
        read(ScriptArguments(**settings))
    assert message in str(error.value)


def test_a_system_prompt_without_a_chat_template_is_refused(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", [{"prompt": "p"}])
    with pytest.raises(ConfigError, match="system_prompt needs a chat template"):
        load(ScriptArguments(dataset_name=path, system_prompt="S"), tokenizer())
