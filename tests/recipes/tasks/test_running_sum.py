"""The demo's task: its answers against Python's own arithmetic, and what its rewards must not pay for."""

import random

import pytest

from qerl_recipes.tasks import running_sum
from qerl_recipes.tasks.running_sum import LONGEST_COMPLETION, Problem, running_sum_correct, running_sum_format

HELD_OUT_START = ["2+9+3+6+2-4=", "1+5+4-7+1+9=", "6+3+2+8-6-8="]


def test_every_answer_and_every_step_is_right():
    for problem in running_sum.problems(2000, seed=3):
        assert eval(problem.prompt.removesuffix("=")) == int(problem.answer)
        for step in problem.steps:
            sum_, result = step.split("=")
            assert eval(sum_) == int(result) >= 0
        assert running_sum.answer_of(problem.terse) == running_sum.answer_of(problem.step_by_step) == problem.answer


def test_the_same_seed_gives_the_same_problems_and_they_never_repeat():
    first = running_sum.problems(500, seed=5)
    assert first == running_sum.problems(500, seed=5) != running_sum.problems(500, seed=6)
    assert len({p.prompt for p in first}) == 500


def test_held_out_problems_are_fixed_and_never_trained_on():
    held_out = {p.prompt for p in running_sum.held_out()}
    assert len(held_out) == 512
    # golden: a change here would make every published accuracy incomparable
    assert [p.prompt for p in running_sum.held_out(3)] == HELD_OUT_START
    for seed in range(3):
        training = running_sum.training_set(3000, seed)
        assert held_out.isdisjoint(training["prompt"])


def test_the_training_set_keeps_its_start_when_it_grows():
    assert running_sum.training_set(50, 0)["prompt"] == running_sum.training_set(80, 0)["prompt"][:50]


@pytest.mark.parametrize("count", [0, -1, 513])
def test_more_held_out_problems_than_there_are_is_refused(count):
    with pytest.raises(ValueError, match="holds out 512"):
        running_sum.held_out(count)


def test_the_tokenizer_gives_back_every_text_and_each_tag_is_one_token():
    tokenizer = running_sum.tokenizer()
    for problem in running_sum.problems(50, seed=1):
        text = problem.prompt + problem.step_by_step
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
    assert len(tokenizer("<think></think><answer></answer>")["input_ids"]) == 4
    assert tokenizer("abc")["input_ids"] == [tokenizer.unk_token_id] * 3


def test_the_longest_answer_fits_into_a_completion():
    tokenizer = running_sum.tokenizer()
    rng = random.Random(0)
    longest = max(len(tokenizer(running_sum.draw(rng).step_by_step)["input_ids"]) for _ in range(3000))
    assert longest + 1 <= LONGEST_COMPLETION  # one for the end of sequence


RIGHT = Problem("7+5-3=", ("7+5=12", "12-3=9"), "9")


@pytest.mark.parametrize(
    ("completion", "correct", "well_formed"),
    [
        (RIGHT.terse, 1, 1),
        (RIGHT.step_by_step, 1, 1),
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
