"""Test the demo's task: its answers against Python's own arithmetic, and what its rewards must not pay for."""

import random
import re

import pytest

from qerl_recipes.tasks import running_sum
from qerl_recipes.tasks.running_sum import LONGEST_COMPLETION, running_sum_correct, running_sum_format


def step_by_step(problem):
    """Return the longer way to answer a problem, and check that no partial sum is negative."""
    value, *terms = re.findall(r"[+-]?\d", problem["prompt"])
    steps = []
    for term in terms:
        steps.append(f"{value}{term}={eval(value + term)}")
        value = str(eval(value + term))
        assert int(value) >= 0
    return f"<think>{';'.join(steps)}</think><answer>{value}</answer>"


def test_every_answer_is_right():
    for problem in running_sum.problems(2000, seed=3):
        assert eval(problem["prompt"].removesuffix("=")) == int(problem["answer"])
        assert running_sum.answer_of(step_by_step(problem)) == problem["answer"]


def test_the_tokenizer_gives_back_every_text_and_each_tag_is_one_token():
    tokenizer = running_sum.tokenizer()
    for problem in running_sum.problems(50, seed=1):
        text = problem["prompt"] + step_by_step(problem)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
    assert len(tokenizer("<think></think><answer></answer>")["input_ids"]) == 4
    assert tokenizer("abc")["input_ids"] == [tokenizer.unk_token_id] * 3


def test_the_longest_answer_fits_into_a_completion():
    tokenizer = running_sum.tokenizer()
    rng = random.Random(0)
    longest = max(len(tokenizer(step_by_step(running_sum.draw(rng)))["input_ids"]) for _ in range(3000))
    assert longest + 1 <= LONGEST_COMPLETION  # plus the end of sequence


@pytest.mark.parametrize(
    ("completion", "correct", "well_formed"),
    [
        ("<answer>9</answer>", 1, 1),
        ("<think>7+5=12;12-3=9</think><answer>9</answer>", 1, 1),
        ("<answer>8</answer>", 0, 1),
        ("<answer>09</answer>", 0, 1),
        ("<answer>1</answer><answer>9</answer>", 0, 0),
        ("<answer>9</answer>9", 0, 0),
        (" <answer>9</answer>", 0, 0),
        ("<answer>9</answer>\n", 0, 0),
        ("<think></think><answer>9</answer>", 0, 0),
        ("<think><answer>9</answer></think><answer>9</answer>", 0, 0),
        ("<answer>-9</answer>", 0, 0),
        ("<answer>٩</answer>", 0, 0),
        ("<answer>9", 0, 0),
        ("9", 0, 0),
        ("", 0, 0),
    ],
)
def test_only_one_whole_well_formed_answer_is_paid(completion, correct, well_formed):
    assert running_sum_correct([completion], ["9"]) == [correct]
    assert running_sum_format([completion], prompts=["7+5-3="]) == [well_formed]


def test_a_batch_without_its_answers_is_an_error():
    with pytest.raises(ValueError):
        running_sum_correct(["<answer>9</answer>"] * 2, ["9"])
