"""Test rewards against numbers worked out by hand from the definitions."""

import asyncio
import re
from decimal import Decimal

import pytest

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import answers
from qerl_recipes.tasks.answers import answer_in
from qerl_recipes.tasks.prompts import read
from qerl_recipes.tasks.reasoning_gym import load
from qerl_recipes.tasks.rewards import FACTORIES, answer_problems, required_columns, resolve, without_effect

WELL_FORMED = "<think>\nwork\n</think>\n<answer>\n4\n</answer>"


def reward(name, **settings):
    return resolve(name, ScriptArguments(**settings), FACTORIES)


def chat(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def padded(answer, characters):
    text = rf"\boxed{{{answer}}}"
    return text + " " * (characters - len(text))


TEXT_CASES = [
    ("format", [WELL_FORMED, "<think>work</think><answer>4</answer>", "4"], [1.0, 0.0, 0.0]),
    ("soft_format", [WELL_FORMED, "so <think>work</think> <answer>4</answer>", "<answer>4</answer>"], [1.0, 1.0, 0.0]),
    ("tag_count", [WELL_FORMED, "<think>\nwork\n</think>\n", "<think>\n" + WELL_FORMED, "4"], [1.0, 0.5, 0.75, 0.0]),
    (
        "reasoning_steps",
        ["Step 1: a\nStep 2: b", "First, a. Second, b. Next, c. Finally, d.", "1. a\n- b", "a"],
        [2 / 3, 1.0, 2 / 3, 0.0],
    ),
    ("running_sum_format", ["<answer>17</answer>", "<answer>17</answer>!"], [1.0, 0.0]),
]


@pytest.mark.parametrize("conversational", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize(("name", "texts", "expected"), TEXT_CASES, ids=[case[0] for case in TEXT_CASES])
def test_rewards_of_the_text_alone(name, texts, expected, conversational):
    completions = chat(texts) if conversational else texts
    assert reward(name)(completions=completions, prompts=["p"] * len(texts)) == pytest.approx(expected)


def test_what_a_tool_has_written_earns_nothing():
    """Check an episode whose tokens ran out after the tool's answer, one that goes on, and one of a tool alone."""
    said, tool = {"role": "assistant", "content": ""}, {"role": "tool", "name": "sum", "content": "7"}
    completions = [[said, tool], [said, tool, {"role": "assistant", "content": "7"}], [tool]]
    assert reward("exact_answer")(completions=completions, answer=["7"] * 3) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("conversational", [False, True], ids=["text", "chat"])
def test_accuracy_reads_latex_and_leaves_out_an_unreadable_solution(conversational):
    texts = [r"\boxed{42}", r"\boxed{41}", "42", r"\boxed{\frac{2}{4}}", r"\boxed{1,000}", r"\boxed{1}"]
    solution = ["42", "42", "42", r"$\frac{1}{2}$", "$1000$", "???"]
    completions = chat(texts) if conversational else texts
    assert reward("accuracy")(completions=completions, solution=solution) == [1.0, 0.0, 0.0, 1.0, 1.0, None]
    assert reward("dapo_score")(completions=completions, solution=solution) == [1.0, -1.0, -1.0, 1.0, 1.0, None]
    columns = {}  # the table of completions shows what was read
    reward("accuracy")(completions=completions, solution=solution, log_extra=columns.__setitem__)
    assert any("1/2" in str(column) for column in columns.values())


def test_a_solution_that_is_a_number_is_compared_as_its_text():
    texts = [r"\boxed{3}", r"\boxed{4}", r"\boxed{0.5}", r"\boxed{10000000000000000000000}", r"\boxed{3}"]
    assert reward("accuracy")(completions=texts, solution=[3, 3, 0.5, 1e22, None]) == [1.0, 0.0, 1.0, 1.0, None]


def test_cosine_bends_accuracy_by_length_and_stays_flat_beyond_the_longest():
    cosine = reward("cosine", cosine_max_len=100)  # right 1.0 to 0.5, wrong 0.0 to -0.5, half way at 50 characters
    texts = [padded(2, 50), padded(2, 100), padded(2, 300), padded(3, 50), padded(3, 100), padded(3, 170), padded(2, 9)]
    solution = ["2"] * 6 + ["???"]
    expected = [0.75, 0.5, 0.5, -0.25, -0.5, -0.5, None]
    assert cosine(completions=texts, solution=solution) == [e if e is None else pytest.approx(e) for e in expected]


def test_cosine_bends_between_the_recipes_bounds():
    bounds = {"min_value_wrong": -0.25, "max_value_wrong": -2.0, "min_value_correct": 0.25, "max_value_correct": 3.0}
    cosine = reward("cosine", cosine_max_len=40, **{f"cosine_{name}": bound for name, bound in bounds.items()})
    texts = [text + " " * padding for text in (r"\boxed{1}", r"\boxed{2}") for padding in (0, 99)]
    short_right, right, short_wrong, wrong = cosine(completions=texts, solution=["1"] * 4)
    assert (right, wrong) == pytest.approx((0.25, -2.0))
    assert 2 < short_right < 3.0 and -0.75 < short_wrong < -0.25


def test_length_compares_answers_to_the_same_prompt_only():
    texts = [padded(2, 10), padded(2, 20), padded(3, 15), padded(3, 10), padded(2, 12), padded(2, 12)]
    prompts = ["a", "a", "a", "a", "b", "b"]
    # right: 1/2 - (n - 10) / 10; wrong: the same but at most 0; equally long: 0
    expected = [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    assert reward("length")(completions=texts, solution=["2"] * 6, prompts=prompts) == pytest.approx(expected)
    # An answer that cannot be judged has no value, but its length counts.
    unread = reward("length")(completions=texts[:3], solution=["2", "???", "2"], prompts=["a"] * 3)
    assert unread == [0.5, None, 0.0]
    # Without prompts, all answers belong to one prompt.
    assert reward("length")(completions=texts[:2], solution=["2"] * 2) == [0.5, -0.5]


def test_repetition_penalty_counts_repeated_word_n_grams():
    penalty = reward("repetition_penalty", repetition_n_grams=2, repetition_max_penalty=-1.0)
    # "a b a b a": ab ba ab ba, half of them repeats; one word has no bigram
    assert penalty(completions=["a b a b a", "a b c", "a", ""]) == pytest.approx([-0.5, 0.0, 0.0, 0.0])
    assert penalty(completions=chat(["A b a B a"])) == pytest.approx([-0.5])
    words = reward("repetition_penalty", repetition_n_grams=1, repetition_max_penalty=-1.0)
    assert words(completions=["a a b", "a b", ""]) == pytest.approx([-1 / 3, 0.0, 0.0])


def test_soft_overlong_punishment_falls_over_the_last_tokens():
    punishment = reward("soft_overlong_punishment", max_completion_len=100, soft_punish_cache=20)
    ids = [[0] * n for n in (10, 80, 90, 100, 101)]
    assert punishment(completions=[""] * 5, completion_ids=ids) == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])


def test_code_format_wants_a_block_of_the_language():
    text = "<think>\na\n</think>\n<answer>\n```cpp\nint x;\n```\n</answer>"
    assert reward("code_format", code_language="cpp")(completions=[text]) == [1.0]
    assert reward("code_format", code_language="python")(completions=[text]) == [0.0]
    languages = reward("code_format", code_language="python")(completions=[text] * 2, language=["cpp", "python"])
    assert languages == [1.0, 0.0]  # a data column overrides the key, as in Open-R1
    plus = reward("code_format")(completions=[text, text.replace("cpp", "c++")], language=["c++", "c++"])
    assert plus == [0.0, 1.0]  # the language is no regex
    assert reward("code_format", code_language="cpp")(completions=[text], language=[None]) == [1.0]  # the row has none


EXACT = {
    "<answer> 4 </answer>": 1.0,
    "<answer>5</answer><answer>4</answer>": 1.0,
    "<answer>4</answer><answer>5</answer>": 0.0,
    r"\boxed{4}": 1.0,
    r"\boxed{4} <answer>5</answer>": 0.0,
    r"<think>\boxed{5}</think><answer>\boxed{4}</answer>": 1.0,  # the form that the recipes' system prompt asks for
    r"<answer>\boxed{5}</answer>": 0.0,
    " 4\n": 1.0,
    "4 or 5": 0.0,
    "4.0": 0.0,
    "the <answer> block says: <answer>4</answer>": 1.0,  # the tag is mentioned before a block opens
    "": 0.0,
}


def test_a_box_holds_all_between_its_braces():
    boxes = {
        r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
        r"\boxed{3}, no, \boxed{\frac{1}{2}}": r"\frac{1}{2}",
        r"\boxed{\{1\}}": r"\{1\}",
        r"\boxed{\boxed{7}}": "7",
        r"\boxed{7} or \boxed{\frac{1": "7",  # cut off: takes the last closed one
        r"{ \boxed{7} }": "7",
    }
    assert {text: answer_in(text) for text in boxes} == boxes
    assert reward("exact_answer")(completions=[r"\boxed{3}, no, \boxed{\frac{1}{2}}"], answer=["3"]) == [0.0]


def test_an_answer_that_is_not_there_is_never_given():
    assert reward("exact_answer")(completions=["None", ""], answer=[None, None]) == [0.0, 0.0]


def test_an_exact_answer_may_be_a_box_that_stands_in_the_block():
    texts = [r"<answer>\boxed{4}</answer>", r"<answer>\boxed{5}</answer>"]
    assert reward("exact_answer")(completions=texts, answer=[r"\boxed{4}"] * 2) == [1.0, 0.0]


def test_exact_answer_takes_the_last_block_else_the_last_box_else_the_whole_text(tmp_path):
    from qerl_recipes.evaluate import tasks

    assert reward("exact_answer")(completions=list(EXACT), answer=["4"] * len(EXACT)) == list(EXACT.values())
    (tmp_path / "x.jsonl").write_text('{"prompt": "2+2=", "answer": " 4"}')
    benchmark = tasks.load([f"jsonl-exact:{tmp_path}/x.jsonl"])[0]
    assert [benchmark.is_right(benchmark.problems[0], text) for text in EXACT] == list(EXACT.values())


LAST = {
    "4": 1.0,
    "2 + 2 is 4.": 1.0,
    "Answer: 4.00 apples": 1.0,
    "first 5, then 4": 1.0,
    "8-4": 1.0,  # a minus between two numbers is not a sign
    "-4": 0.0,
    "4 or 5": 0.0,
    "four": 0.0,
    "\u22124": 0.0,  # the typographic minus
    "8\u22124": 1.0,
    "3,4": 1.0,  # two numbers, not 34
    "4e0": 1.0,
    "4e1": 0.0,
    "12/3": 1.0,
    r"\frac{8}{2}": 1.0,
    "3/4": 0.0,
    "1/3/4": 1.0,  # not a fraction
    r"\frac{3}{4}": 0.0,
    "2.4": 0.0,
    " .4": 0.0,
    "v1.4": 0.0,
    "...4": 1.0,
    "": 0.0,
}


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,234", "1234"), ("1,234.5", "1234.5"), ("12,27,55,5", "5"), ("1,5", "5"), ("-.5", "-0.5"), ("1E-2", "0.01"),
     (r"-\frac{1}{2}", "-0.5"), (r"\dfrac{-1}{2}", "-0.5"), ("-3/4", "-0.75"), ("1/0", "0"), ("2e9999", "9999"),
     ("11/23/2026", "2026"), ("007", "7"), ("1.2.3", "1.2"), ("-", None)],
)  # fmt: skip
def test_what_a_number_is(text, number):
    assert answers.last_number(text) == (None if number is None else Decimal(number))


def test_last_number_is_that_of_the_text_and_the_evaluation_judges_likewise(tmp_path):
    from qerl_recipes.evaluate import tasks

    assert reward("last_number")(completions=chat(list(LAST)), answer=["4"] * len(LAST)) == list(LAST.values())
    texts, wanted = ["so 1,234.50", "it is -7", "4", "nothing"], ["1234.5", "-7", "none", "none"]
    assert reward("last_number")(completions=texts, answer=wanted) == [1.0, 1.0, 0.0, 0.0]
    (tmp_path / "x.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}')
    benchmark = tasks.load([f"jsonl-number:{tmp_path}/x.jsonl"])[0]
    assert [benchmark.is_right(benchmark.problems[0], text) for text in LAST] == list(LAST.values())
    assert benchmark.majority(["it is 5", "4", "4.0"]) == 1


def test_reasoning_gym_scores_with_the_verifier_of_the_task():
    train, _ = load(ScriptArguments(dataset_config="chain_sum", dataset_size=3, dataset_seed=5))
    right = [f"<answer>{answer}</answer>" for answer in train["answer"]]
    score = reward("reasoning_gym")
    assert score(completions=right, reasoning_gym=train["reasoning_gym"]) == [1.0, 1.0, 1.0]
    wrong = ["<answer>oops</answer>", train["answer"][1], rf"\boxed{{{train['answer'][2]}}}"]
    assert score(completions=chat(wrong), reasoning_gym=train["reasoning_gym"]) == [0.0, 0.0, 1.0]
    shifted = right[1:] + right[:1]
    assert max(score(completions=shifted, reasoning_gym=train["reasoning_gym"])) < 1.0


@pytest.fixture
def built_in():
    """Return all built-in rewards by name."""
    return {name: reward(name, code_provider="local") for name in FACTORIES}


def test_every_reward_takes_what_trl_passes_and_answers_once_a_completion(built_in):
    train, _ = load(ScriptArguments(dataset_size=2))
    passed = {
        "prompts": ["p", "q"],
        "completion_ids": [[1, 2], [3]],
        "solution": ["1", "2"],
        "answer": ["1", "2"],
        "reasoning_gym": train["reasoning_gym"],
        "verification_info": [{"test_cases": [{"input": "1", "output": "1"}]}] * 2,
        "language": ["python"] * 2,
        "trainer_state": None,
        "log_extra": lambda name, values: None,
        "log_metric": lambda name, value: None,
    }
    for name, score in built_in.items():
        for completions in (["a", ""], chat(["a", ""])):
            values = score(completions=completions, **passed)
            assert len(values) == 2 and all(value is None or isinstance(value, float) for value in values), name


@pytest.mark.parametrize(
    ("name", "columns"),
    [("accuracy", {"solution"}), ("format", set()), ("running_sum_correct", {"answer"}), ("cosine", {"solution"}),
     ("reasoning_gym", {"reasoning_gym"}), ("soft_overlong_punishment", set())],
)  # fmt: skip
def test_required_columns_are_read_from_the_signature(name, columns):
    assert required_columns(reward(name)) == columns


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("acuracy", {}, "'acuracy' is not one of the rewards"),
        ("no_such_package.reward", {}, "; its module must be in the working directory or on PYTHONPATH"),
        ("math.tau", {}, "is not a function"),
        ("soft_overlong_punishment", {"max_completion_len": 10, "soft_punish_cache": 10}, "soft_punish_cache"),
        ("soft_overlong_punishment", {"max_completion_len": 10, "soft_punish_cache": 0}, "soft_punish_cache"),
        ("repetition_penalty", {"repetition_max_penalty": 1.0}, "repetition_max_penalty must be <= 0"),
        ("repetition_penalty", {"repetition_n_grams": 0}, "repetition_n_grams >= 1"),
        ("cosine", {"cosine_max_len": 0}, "cosine_max_len must be at least 1"),
        ("code_format", {"code_language": "cobol"}, "code_language cannot be 'cobol'"),
    ],
)
def test_a_reward_that_cannot_be_had_is_refused_with_its_name(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        reward(name, **settings)


def test_the_least_settings_that_make_sense_are_taken():
    punishment = reward("soft_overlong_punishment", max_completion_len=10, soft_punish_cache=1)
    assert punishment(completions=[""] * 3, completion_ids=[[0] * n for n in (9, 10, 11)]) == [0.0, -1.0, -1.0]
    assert reward("cosine", cosine_max_len=1)(completions=[r"\boxed{2}"], solution=["2"]) == [pytest.approx(0.5)]


@pytest.mark.parametrize(
    ("names", "settings", "said"),
    [
        (["length"], {"cosine_max_len": 500}, ["cosine_max_len: 500 has no effect without the reward cosine; add it"]),
        (["cosine", "length"], {"cosine_max_len": 500}, []),
        (["cosine"], {"repetition_n_grams": 2, "code_language": "c"}, ["repetition_n_grams: 2", "code_language: c"]),
        (["my_package.reward"], {"cosine_max_len": 500}, []),  # what a reward of one's own reads is not known
        ([], {}, []),
    ],
)
def test_keys_without_their_reward_are_named(names, settings, said):
    lines = without_effect(ScriptArguments(reward_funcs=names, **settings))
    assert len(lines) == len(said) and all(line.startswith(start) for line, start in zip(lines, said, strict=True))


def test_a_dotted_path_names_a_function_of_one_s_own(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text("def half(completions, **columns):\n    return [0.5] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert reward("own_rewards.half")(completions=["a", "b"]) == [0.5, 0.5]


@pytest.mark.parametrize("values", ["None", "0.5", '["1", "0"]', "[0.5, float('nan')]", "[[1.0], [0.0]]"])
def test_a_reward_of_one_s_own_that_gives_no_numbers_is_named(values, tmp_path, monkeypatch):
    name = f"rewards_{abs(hash(values))}"
    wrong = f"class Own:\n    async def __call__(self, answer, **columns):\n        return {values}\nwrong = Own()\n"
    right = "def right(answer, **columns):\n    return [None, True]\n"
    (tmp_path / f"{name}.py").write_text(wrong + right)
    monkeypatch.syspath_prepend(tmp_path)
    own, other = reward(f"{name}.wrong"), reward(f"{name}.right")
    assert own.__name__ == "Own" and required_columns(own) == {"answer"}
    assert other.__name__ == "right" and other(answer=["a", "b"]) == [None, True]
    with pytest.raises(ValueError, match=rf"the reward {name}\.wrong gave .*; return a list with a finite number for"):
        asyncio.run(own(answer=["a", "b"]))


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
def test_answers_that_a_reward_cannot_compare_with_are_named(reward, column, values, message, tmp_path):
    rows = [f'{{"prompt": "p", "{column}": {value}}}\n' for value in re.findall(r'"[^"]*"|\[.*?\]|\S+', values)]
    (tmp_path / "mine.jsonl").write_text("".join(rows))
    train, _ = read(ScriptArguments(dataset_name=str(tmp_path / "mine.jsonl")), {})
    lines = list(answer_problems(reward, train, "training"))
    assert len(lines) == (message is not None) and (message or "") in "".join(lines)
