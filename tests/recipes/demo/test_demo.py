"""Test the demo's own checks and the shipped starting model; ``make demo`` runs the whole demo."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from qerl_recipes.demo import run as demo
from qerl_recipes.tasks import running_sum

SHIPPED = demo.RECIPES / "starting_model"


@pytest.mark.parametrize(
    ("base", "adapter", "width", "code"),
    [(0.2, 0.9, 0.02, 0), (0.2, 0.29, 0.02, 1), (0.2, 0.9, 0.4, 1), (0.5, 0.2, 0.02, 1)],
    ids=["learned", "too_little", "intervals_meet", "worse"],
)
def test_the_exit_code_says_whether_the_adapter_learned(base: float, adapter: float, width: float, code: int) -> None:
    console = Console(record=True, file=io.StringIO(), width=200)
    shares = {"base": base, "adapter": adapter}
    result = {policy: {"accuracy": share, "ci95": [share - width, share + width]} for policy, share in shares.items()}
    assert demo._conclude(console, result) == code
    assert ("was expected" in console.export_text()) == code


def test_only_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("x")
    with pytest.raises(FileExistsError, match="holds no demo"):
        demo.run(tmp_path)
    assert precious.exists()
    precious.unlink()
    demo._empty(tmp_path, {"seed": 0})
    (tmp_path / "old").write_text("x")
    demo._empty(tmp_path, {"seed": 1})
    assert [file.name for file in tmp_path.iterdir()] == [demo.MARK]
    assert json.loads((tmp_path / demo.MARK).read_text()) == {"seed": 1}


@pytest.mark.parametrize(("name", "value"), [("problems", 299), ("problems", 513), ("steps", 0)])
def test_numbers_without_sense_are_refused_before_anything_is_written(name: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--{name} is {value}"):
        demo.run(tmp_path / "new", **{name: value})
    assert not (tmp_path / "new").exists()


def accuracy(model: PreTrainedModel, begin: str) -> float:
    """Return the share of held-out problems that are right if each answer begins with this text."""
    tokenizer, asked = running_sum.tokenizer(), running_sum.held_out(128)
    batch = tokenizer([problem["prompt"] + begin for problem in asked], padding=True, return_tensors="pt")
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    ids = model.generate(**given, max_new_tokens=running_sum.LONGEST_COMPLETION, do_sample=False)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [running_sum.answer_of(begin + text) for text in texts]
    return sum(a == problem["answer"] for a, problem in zip(answers, asked, strict=True)) / len(asked)


def test_the_shipped_starting_model_is_small_and_worth_learning_from() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 1_000_000
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    assert 0.05 < accuracy(model, "") < 0.35 and accuracy(model, "<think>") > 0.9
