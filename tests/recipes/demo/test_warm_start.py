"""Test the tasks of SmolLM2-135M-Instruct: worked answers are right, and no problem is both trained on and asked."""

import json
from pathlib import Path

import pytest

from qerl_recipes.demo.warm_start import examples, texts, worked
from qerl_recipes.recipe.configs import ScriptArguments, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks.answers import last_number
from qerl_recipes.tasks.held_out import lines
from qerl_recipes.tasks.prompts import read
from qerl_recipes.tasks.sources import LOADERS

FOLDER = Path(__file__).parents[3] / "recipes" / "SmolLM2-135M-Instruct"
TASKS = sorted(path.stem.split("_")[0] for path in FOLDER.glob("grpo/*.yaml"))


def recipe(task):
    return FOLDER / "grpo" / f"{task}_nvfp4_lora.yaml"


def test_a_chain_is_worked_out_from_left_to_right():
    assert worked("12 + 7 - 40") == "12 + 7 = 19\n19 - 40 = -21\nAnswer: -21"
    assert worked("5") == "Answer: 5"
    for other in ("2 * 3", "2 + 3 -", "2 + x"):
        with pytest.raises(ValueError):
            worked(other)


@pytest.mark.parametrize("task", TASKS)
def test_the_file_of_held_out_problems_is_the_recipes_and_none_is_trained_on(task):
    file = FOLDER / f"held_out_{task}.jsonl"
    assert file.read_text() == lines(recipe(task))
    script, _, _ = parse(["--config", str(recipe(task))])
    train, held_out = read(script, LOADERS)
    assert len(held_out) == len(set(held_out["prompt"])) == 1000 and len(train) > 3000
    assert not set(train["prompt"]) & set(held_out["prompt"])


class InOrder:
    """Stand in for a tokenizer; its template shows the messages in order."""

    def apply_chat_template(self, messages, tokenize):
        return "|".join(message["content"] for message in messages)


def test_worked_examples_are_right_and_of_no_problem_that_is_trained_on_or_asked():
    script, _, _ = parse(["--config", str(recipe("steps"))])
    data = examples(script, 64)
    asked = [messages[-1]["content"] for messages in data["prompt"]]
    used = {prompt for part in read(script, LOADERS) for prompt in part["prompt"]}
    assert len(asked) == 64 and not used & set(asked)
    assert all(messages[0] == {"role": "system", "content": script.system_prompt} for messages in data["prompt"])
    for question, (answer,) in zip(asked, data["completion"], strict=True):
        expression = question.rpartition(": ")[2].removesuffix(" =")
        assert last_number(answer["content"]) == eval(expression)  # reasoning-gym generated the expression
    shown = [json.loads(line)["text"] for line in texts(data, InOrder()).splitlines()]
    assert len(shown) == 64 and shown[0] == "|".join(
        [script.system_prompt, asked[0], data["completion"][0][0]["content"]]
    )
    with pytest.raises(ConfigError, match="only chain_sum of reasoning_gym"):
        examples(ScriptArguments(dataset_name="reasoning_gym", dataset_config="basic_arithmetic"), 4)
