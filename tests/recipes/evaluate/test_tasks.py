"""Test the tasks of an evaluation: what they ask, how an answer is judged, and which of several answers wins
the vote.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_recipes.tasks import rewards, running_sum


@pytest.mark.parametrize(
    ("task", "texts", "elected"),
    [
        ("jsonl", ["$\\boxed{3}$", "$\\boxed{1/2}$", "so $\\boxed{0.5}$", "nothing"], 1),
        ("jsonl", ["<answer>2</answer>", "<answer>4</answer>", "<think>$\\boxed{2}$</think><answer>4</answer>"], 1),
        ("jsonl", ["nothing", "at all"], None),
        ("jsonl-accuracy", ["\\boxed{3}", "$1/2$", "1/2", "\\boxed{1/2}", "so \\boxed{0.5}"], 3),
        ("jsonl-exact", ["a", " b", "<answer>b</answer>", "a "], 0),
        ("jsonl-exact", ["", " ", "<answer></answer>", "b"], 3),  # an empty answer does not vote
    ],
)
def test_the_vote_goes_to_the_answer_that_most_samples_give(
    task: str, texts: list[str], elected: int | None, tmp_path: Path, evaluation_tasks: Any
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "?", "answer": "1/2"}))
    assert evaluation_tasks.load([f"{task}:{tmp_path}/x.jsonl"])[0].majority(texts) == elected


def test_running_sum_is_judged_on_the_whole_completion(evaluation_tasks: Any) -> None:
    benchmark = evaluation_tasks.load(["running_sum"])[0]
    assert len(benchmark.problems) == running_sum.HELD_OUT
    assert {doc.query for doc in benchmark.problems} == {p["prompt"] for p in running_sum.held_out()}
    doc = benchmark.problems[0]
    gold = doc.get_golds()[0]
    right = [f"<answer>{gold}</answer>", f"<think>1+1=2</think><answer>{gold}</answer>"]
    wrong = [f"<answer>{gold}</answer> ", f"x<answer>{gold}</answer>", gold, f"<answer>{int(gold) + 1}</answer>"]
    assert [judged(benchmark, doc, text) for text in right + wrong] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("1/2", "so the answer is $\\boxed{0.5}$", 1.0),
        ("1/2", "so the answer is $\\boxed{0.6}$", 0.0),
        ("9", "<think>\n3+6=9\n</think>\n<answer>9</answer>", 1.0),
        ("\\sqrt{2}", "<answer>\\sqrt{2}</answer>", 1.0),
        ("9", "<answer>\nThe answer is $9$.\n</answer>", 1.0),
        ("9", "<think>so $\\boxed{9}$</think><answer>8</answer>", 0.0),
        ("9", "<answer>9</answer> no, <answer>8</answer>", 0.0),
    ],
)
def test_a_local_file_is_judged_as_mathematics(
    answer: str, text: str, right: float, tmp_path: Path, evaluation_tasks: Any
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "?", "answer": answer}))
    benchmark = evaluation_tasks.load([f"jsonl:{tmp_path}/x.jsonl"])[0]
    assert judged(benchmark, benchmark.problems[0], text) == right


# Each row has a text, the reward accuracy's score, and jsonl:'s score, for a problem whose answer is 9.
GIVEN = [
    ("\\boxed{9}", 1, 1), ("\\boxed{8} no \\boxed{9}", 1, 1), ("\\boxed{9} no \\boxed{8}", 0, 0),
    ("\\boxed{18/2}", 1, 1),
    ("The final answer is $9$. I hope it is correct.", 1, 1), ("<answer>$9$</answer>", 1, 1), ("\\boxed{9", 0, 0),
    ("9", 0, 1), ("$9$", 0, 1), ("first 8, then 9", 0, 1), ("first 9, then 8", 0, 0), ("$8$ so $9$", 0, 1),
    ("<answer>9</answer>", 0, 1), ("<answer>8</answer><answer>9</answer>", 0, 1), ("#### 9", 0, 1),
    ("\\boxed{9} <answer>8</answer>", 1, 0), ("\\boxed{8} <answer>9</answer>", 0, 1), ("", 0, 0),
    ("<think>\\boxed{9}</think>\\boxed{8}", 0, 0), ("<think>\\boxed{8}</think>\\boxed{9}", 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("solution", ["9", "$9$", "\\boxed{9}"])
def test_a_file_is_judged_as_the_reward_accuracy_judges(solution: str, tmp_path: Path, evaluation_tasks: Any) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "?", "answer": solution}))
    texts = [text for text, _, _ in GIVEN]
    found = {}
    for task in ("jsonl-accuracy", "jsonl"):
        benchmark = evaluation_tasks.load([f"{task}:{tmp_path}/x.jsonl"])[0]
        found[task] = [int(benchmark.is_right(benchmark.problems[0], text)) for text in texts]
    assert found["jsonl-accuracy"] == rewards.accuracy(list(texts), [solution] * len(texts))
    assert found == {"jsonl-accuracy": [right for _, right, _ in GIVEN], "jsonl": [right for _, _, right in GIVEN]}


@pytest.mark.parametrize(
    ("task", "answer"), [("jsonl", "\\$5"), ("jsonl-accuracy", "\\text"), ("jsonl-number", "four")]
)
def test_answers_that_no_completion_could_give_are_refused(
    task: str, answer: str, tmp_path: Path, evaluation_tasks: Any
) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"prompt": "?", "answer": a}) + "\n" for a in ("1", answer)))
    with pytest.raises(ValueError, match=r"the answers to 1 of 2 problems \(.*, for one\) cannot be read"):
        evaluation_tasks.load([f"{task}:{tmp_path}/x.jsonl"])
    assert len(evaluation_tasks.load([f"jsonl-exact:{tmp_path}/x.jsonl"])[0].problems) == 2


def judged(benchmark: Any, doc: Any, *texts: str) -> float:
    return sum(benchmark.is_right(doc, text) for text in texts) / len(texts)


def hub_rows(monkeypatch: pytest.MonkeyPatch, *rows: dict) -> None:
    """Replace the hub's data by these rows, which have its schema, in every split."""
    from lighteval.tasks.lighteval_task import LightevalTask

    def load(tasks: dict) -> None:
        for task in tasks.values():
            task.dataset = {split: [dict(row) for row in rows] for split in task.config.hf_avail_splits}

    monkeypatch.setattr(LightevalTask, "load_datasets", staticmethod(load))


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("gsm8k", {"question": "2+3?", "answer": "2+3=5\n#### 5"}, "The answer is 5", "The answer is 6"),
        ("math_500", {"problem": "2+3?", "solution": "it is $\\boxed{5}$"}, "ANSWER: 5", "ANSWER: 6"),
        ("aime24", {"problem": "2+3?", "answer": "5"}, "is: $\\boxed{5}$. I hope", "is: $\\boxed{6}$. I hope"),
        ("aime25", {"problem": "2+3?", "answer": "5"}, "is: $\\boxed{5}$. I hope", "is: $\\boxed{6}$. I hope"),
        ("amc23", {"question": "2+3?", "answer": "5.0"}, "is: $\\boxed{5}$. I hope", "is: $\\boxed{6}$. I hope"),
    ],
)
def test_hub_tasks_ask_and_judge_as_lighteval_does(
    name: str, row: dict, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, evaluation_tasks: Any
) -> None:
    hub_rows(monkeypatch, row)
    benchmark = evaluation_tasks.load([name], num_samples=4)[0]
    doc = benchmark.problems[0]
    assert "2+3?" in doc.query and doc.num_samples == 4
    assert judged(benchmark, doc, right, wrong, wrong, wrong) == 0.25
    assert benchmark.majority([wrong, right, "no answer", right]) == 1
    least = {"gsm8k": 1024, "math_500": 32768}.get(name)  # lighteval's 256 would cut many answers to GSM8K
    assert doc.generation_size == least


def test_a_hub_task_without_a_hub_says_so(monkeypatch: pytest.MonkeyPatch, evaluation_tasks: Any) -> None:
    def offline(tasks: dict) -> None:
        raise OSError("no network")

    monkeypatch.setattr(evaluation_tasks.LightevalTask, "load_datasets", staticmethod(offline))
    with pytest.raises(ConnectionError, match="task gsm8k: the data set openai/gsm8k could not be fetched"):
        evaluation_tasks.load(["gsm8k"])


def test_importing_lighteval_leaves_gradients_on(evaluation_tasks: Any) -> None:
    assert torch.is_grad_enabled()
    evaluation_tasks.task_module("gsm8k")
    assert torch.is_grad_enabled()
    assert (2 * torch.ones(1, requires_grad=True)).requires_grad


def test_the_digest_is_of_the_problems_in_their_order(tmp_path: Path, evaluation_tasks: Any) -> None:
    lines = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(3)]

    def digest(those: list[dict[str, str]]) -> str:
        file = tmp_path / "sums.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in those))
        return evaluation_tasks.load([f"jsonl:{file}"])[0].digest()

    whole = digest(lines)
    assert whole == digest(lines) and len(whole) == 64
    other = [{**lines[0], "answer": "7"}, *lines[1:]]
    assert len({whole, digest(other), digest([*lines[1:], lines[0]]), digest(lines[:2])}) == 4
