"""The texts that GPTQ is calibrated on: what the BF16 model answers to the recipe's problems, asked as in training."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl_recipes.convert import calibration
from qerl_recipes.convert.calibration import write_own_answers
from qerl_recipes.recipe.configs import parse
from qerl_recipes.tasks import prompts, running_sum

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ mark }}{% endif %}"


@pytest.fixture
def recipe(write_recipe, make_bf16):
    """recipe(**changes) -> the flags of a recipe on a BF16 model whose arm is NVFP4."""
    return lambda **changes: [
        "--config",
        write_recipe(**{"model_name_or_path": str(make_bf16("qwen2")), "quantization": "qerl_nvfp4", **changes}),
    ]


@pytest.fixture
def written(recipe, tmp_path, classes_looked_at_here):
    """written(samples, **changes) -> (the lines of the file, what was said)."""
    files = iter(tmp_path / f"{i}.jsonl" for i in range(9))

    def write(samples, **changes):
        file = next(files)
        said = write_own_answers(recipe(**changes), file, samples)
        return [json.loads(line) for line in file.read_text().splitlines()], said

    return write


def test_each_line_is_a_training_problem_as_the_rollouts_ask_it_and_what_bf16_answers(written, recipe, make_bf16):
    change = {"chat_template": TEMPLATE, "chat_template_kwargs": {"mark": "7"}, "temperature": 0.01}
    lines, said = written(6, dtype="float32", max_completion_length=5, **change)
    script, training, _ = parse(recipe(**change))
    tokenizer = running_sum.tokenizer()
    tokenizer.chat_template = TEMPLATE
    problems = prompts.load(script, tokenizer, training.chat_template_kwargs)[0][:6]["prompt"]
    model = AutoModelForCausalLM.from_pretrained(make_bf16("qwen2"), dtype=torch.float32)
    for line, problem in zip(lines, problems, strict=True):
        asked = prompts.ids(problem, tokenizer, {"mark": "7"})
        ids = line["input_ids"]
        assert ids[: len(asked)] == asked and tokenizer.decode(ids) == line["text"]
        # almost greedy: each token is the likeliest of the model that is not quantized
        with torch.no_grad():
            likeliest = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert ids[len(asked) :] == likeliest[len(asked) - 1 : -1]
        ends = ids[-1] == tokenizer.eos_token_id
        assert len(ids) - len(asked) == 5 or ends, "an answer ends where it ends, with the token that says so"
    cut = sum(line["input_ids"][-1] != tokenizer.eos_token_id for line in lines)
    assert f"6 problems with an answer each, {sum(len(line['input_ids']) for line in lines)} tokens; {cut} ans" in said


def test_answers_are_drawn_as_the_recipe_says_and_the_same_each_time(written):
    first, _ = written(4)
    assert written(4)[0] == first
    assert written(2)[0] == first[:2]
    assert written(4, seed=1)[0] != first
    assert written(4, temperature=0.01)[0] != first


@pytest.mark.parametrize(
    ("samples", "changes", "message"),
    [
        (0, {}, "--samples is 0; it must be at least 1"),
        (17, {}, "--samples is 17, and the recipe has 16 training problems; lower it"),
        (4, {"model_name_or_path": None}, "model_name_or_path is missing"),
    ],
)
def test_what_cannot_be_written_is_refused_before_an_engine_starts(
    samples, changes, message, recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(calibration, "_engine", None)
    with pytest.raises(ValueError, match=message):
        write_own_answers(recipe(**changes), tmp_path / "texts.jsonl", samples)


def test_a_model_in_nvfp4_and_a_file_that_exists_are_refused(recipe, make_nvfp4, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "_engine", None)
    with pytest.raises(ValueError, match="has NVFP4 weights already; name the BF16 model"):
        write_own_answers(recipe(model_name_or_path=str(make_nvfp4("qwen2"))), tmp_path / "texts.jsonl", 4)
    (tmp_path / "there.jsonl").write_text("mine\n")
    with pytest.raises(FileExistsError, match=r"there\.jsonl exists; name another file"):
        write_own_answers(recipe(), tmp_path / "there.jsonl", 4)
    assert (tmp_path / "there.jsonl").read_text() == "mine\n"
