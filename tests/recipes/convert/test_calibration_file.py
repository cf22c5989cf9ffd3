"""The file that GPTQ is calibrated on: which tokens of it are used, and what of it is refused."""

import json

import pytest

from qerl_recipes.convert.calibrate import LENGTH, SAMPLES, read


class Words:
    """A tokenizer: a token is a number, and tokenizing makes one more of each than decoding does."""

    def __call__(self, text):
        return {"input_ids": [int(word) + 1 for word in text.split()]}

    def decode(self, ids, clean_up_tokenization_spaces):
        assert clean_up_tokenization_spaces is False
        return " ".join(map(str, ids))


@pytest.fixture
def file(tmp_path):
    """file(*lines) -> a file of them, JSON but for those that are text."""

    def write(*lines):
        path = tmp_path / "texts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def test_a_line_s_own_tokens_are_used_and_other_texts_are_tokenized(file):
    rows, used = read(file({"text": "1 2"}, "", {"text": "3 4 5", "input_ids": [3, 4, 5]}), None, Words())
    assert rows == [[2, 3], [3, 4, 5]]
    assert used == {"texts": 2, "of": 2, "tokens": 5, "longest": LENGTH, "cut": 0}


def test_a_line_ends_where_the_file_has_one_and_a_mark_of_the_editor_is_none(file):
    path = file("\ufeff" + json.dumps({"text": "1\u20282\x853"}, ensure_ascii=False), {"text": "4"})
    assert read(path, None, Words())[0] == [[2, 3, 4], [5]]


def test_what_is_too_long_is_cut_and_counted(file):
    long = " ".join(["1"] * (LENGTH + 1))
    rows, used = read(file({"text": long}, {"text": "1"}, {"text": long.removesuffix(" 1")}), None, Words())
    assert list(map(len, rows)) == [LENGTH, 1, LENGTH]
    assert used == {"texts": 3, "of": 3, "tokens": 2 * LENGTH + 1, "longest": LENGTH, "cut": 1}


def test_the_first_texts_are_used_and_no_more_than_asked_for(file):
    path = file(*({"text": str(i)} for i in range(SAMPLES + 4)))
    rows, used = read(path, None, Words())
    assert rows == [[i + 1] for i in range(SAMPLES)] and (used["texts"], used["of"]) == (SAMPLES, SAMPLES + 4)
    assert read(path, SAMPLES + 2, Words())[0][-1] == [SAMPLES + 2]
    assert read(path, 1, Words())[0] == [[1]]
    with pytest.raises(ValueError, match=rf"calibration_samples is {SAMPLES + 5}, and .* has {SAMPLES + 4} texts"):
        read(path, SAMPLES + 5, Words())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text: 1}", "is no JSON (Expecting property name"),
        ({"prompt": "1"}, 'must have a text under the key "text"; it has None'),
        ({"text": ["1"], "input_ids": [1]}, "must have a text"),
        (["1"], "must be a JSON object"),
        ({"text": "1", "input_ids": [2]}, "input_ids are not the tokens of the text in this model; make the file"),
        ({"text": "1", "input_ids": "1"}, "input_ids must be a list of whole numbers"),
        ({"text": "1", "input_ids": [1.0]}, "input_ids must be a list of whole numbers"),
        ({"text": "1", "input_ids": None}, "input_ids must be a list of whole numbers"),
    ],
)
def test_a_line_that_is_no_text_is_named(line, message, file):
    path = file({"text": "1"}, "", line)
    with pytest.raises(ValueError) as raised:
        read(path, None, Words())
    assert f"{path}, line 3" in str(raised.value) and message in str(raised.value)


@pytest.mark.parametrize("lines", [[], [{"text": ""}]])
def test_a_file_without_text_is_refused(lines, file):
    with pytest.raises(ValueError, match="holds no text"):
        read(file(*lines), None, Words())
