"""Test a recipe's prompts.

Covered are refused rows, what the tokenizer makes of prompts, and prompts that are too long.
"""

import json

import pytest

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import prompts, running_sum
from qerl_recipes.tasks.sources import LOADERS

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
SYSTEM, USER = {"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1="}
PARTS = {"role": "user", "content": [{"type": "text", "text": "1+1="}]}


def read(**settings):
    return prompts.read(ScriptArguments(**settings), LOADERS)


def load(chat_template=None, options=None, **settings):
    """Return the training problems for a tokenizer with this chat template."""
    script, tokenizer = ScriptArguments(**settings), running_sum.tokenizer()
    tokenizer.chat_template = chat_template
    return prompts.load(script, tokenizer, prompts.read(script, LOADERS), options or {})[0]


@pytest.fixture
def jsonl(tmp_path):
    """Return jsonl(*prompts, name="mine.jsonl", **columns), which writes these prompts and returns the path."""

    def write(*prompts, name="mine.jsonl", **columns):
        rows = ({"prompt": prompt, **columns} for prompt in prompts)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


def test_problems_trained_on_and_held_out_are_counted(jsonl, tmp_path, caplog):
    turns, other = [USER], [{**USER, "content": "y"}]
    for train, held_out in ((("a", "b", "a"), ("a", "c")), ((turns, turns), (turns, other))):
        jsonl(*train, name="train.jsonl")
        jsonl(*held_out, name="test.jsonl")
        read(dataset_name=str(tmp_path))
        assert "1 of 2 held-out problems" in caplog.text
        caplog.clear()
    jsonl(other, name="test.jsonl")
    read(dataset_name=str(tmp_path))
    assert not caplog.text


def test_beside_an_environment_prompts_may_be_empty(jsonl, tmp_path, caplog):
    empty = [{**USER, "content": ""}]
    for name in ("train.jsonl", "test.jsonl"):
        jsonl(empty, [USER], name=name)
    train, held_out = prompts.read(ScriptArguments(dataset_name=str(tmp_path)), LOADERS, may_lack_prompts=True)
    assert train["prompt"][:] == held_out["prompt"][:] == [empty, [USER]]
    assert "1 of 2 held-out problems" in caplog.text, "an empty prompt is no problem that was trained on"


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
def test_a_malformed_prompt_is_refused_with_its_row(prompt, system_prompt, message, jsonl):
    good = [USER] if isinstance(prompt, list) else "1+1="
    with pytest.raises(ConfigError) as error:
        read(dataset_name=jsonl(good, prompt), system_prompt=system_prompt)
    assert f"mine.jsonl: the prompt of row 2 {message}" in str(error.value)


def test_a_text_that_looks_like_a_date_is_refused(jsonl):
    with pytest.raises(ConfigError, match=r"row 1 is datetime.* neither a text nor a list of messages"):
        read(dataset_name=jsonl("2024-01-01"))


def test_a_refused_row_is_that_of_the_file_and_its_split(jsonl, tmp_path):
    path = jsonl(*("" if i == 4 else f"{i}+1=" for i in range(9)), name="test.jsonl")
    for seed in range(3):  # dataset_size takes the rows in another order each time
        with pytest.raises(ConfigError, match="the prompt of row 5 is empty"):
            read(dataset_name=path, dataset_size=9, dataset_seed=seed)
    jsonl("1+1=", name="train.jsonl")
    with pytest.raises(ConfigError, match=rf"{tmp_path}, test: the prompt of row 5 is empty"):
        read(dataset_name=str(tmp_path))


def test_dataset_size_takes_a_seeded_part(jsonl):
    path = jsonl(*(f"p{i}" for i in range(50)))
    parts = [read(dataset_name=path, dataset_size=10, dataset_seed=seed)[0]["prompt"][:] for seed in (1, 1, 2)]
    assert parts[0] == parts[1] != parts[2] and len(set(parts[0])) == 10


def test_columns_can_be_renamed_and_the_prompt_column_chosen(jsonl):
    path = jsonl("old", problem="p", final="4")
    settings = {"dataset_prompt_column": "problem", "dataset_kwargs": {"columns": {"final": "solution"}}}
    assert read(dataset_name=path, **settings)[0][0] == {"prompt": "p", "solution": "4"}


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
def test_a_template_that_leaves_the_problem_out_is_refused(template, message, jsonl):
    path = jsonl([USER])
    with pytest.raises(ConfigError) as error:
        load(template, dataset_name=path)
    assert message in str(error.value)
    if template and "short" in template:
        assert len(load(template, {"short": True}, dataset_name=path)) == 1


def test_options_of_a_chat_template_that_is_not_there_are_named(jsonl, recwarn):
    path = jsonl("1+1=")
    load(CHATML, {"enable_thinking": False}, dataset_name=path)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"chat_template_kwargs: \{'enable_thinking': False\} has no effect without"):
        load(None, {"enable_thinking": False}, dataset_name=path)
    with pytest.raises(ConfigError, match=r"cannot render .* multiple values for keyword argument 'add_generation_pro"):
        load(CHATML, {"add_generation_prompt": False}, dataset_name=path)
    load(CHATML, {"chat_template": None}, dataset_name=path)  # as with tools


def test_a_system_prompt_without_a_chat_template_is_refused(jsonl):
    with pytest.raises(ConfigError, match="system_prompt needs a chat template"):
        load(dataset_name=jsonl("p"), system_prompt="S")


def test_prompts_become_messages_for_a_chat_template(jsonl):
    path = jsonl("1+1=", answer="2", messages="unused")
    think = {"role": "system", "content": "Think."}
    train = load(CHATML, dataset_name=path, system_prompt="Think.")
    assert train[0] == {"answer": "2", "prompt": [think, USER]}
    assert load(dataset_name=path)["prompt"] == ["1+1="]
    turns = [USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    assert load(CHATML, dataset_name=jsonl(turns), system_prompt="Think.")["prompt"] == [[think, *turns]]
    for turns in ([SYSTEM, USER], [PARTS]):  # unchanged without a system_prompt
        template = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
        assert load(template, dataset_name=jsonl(turns))["prompt"] == [turns]


def test_a_conversation_is_rendered_with_the_recipes_options():
    tokenizer = running_sum.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ mark }}{% endif %}"
    )
    rendered = prompts.ids([{"role": "user", "content": "12"}], tokenizer, {"mark": "7"})
    assert tokenizer.decode(rendered, skip_special_tokens=True).replace(" ", "") == "127"
    assert prompts.ids("12", tokenizer, {"mark": "7"}) == tokenizer("12")["input_ids"]


def test_prompts_are_counted_with_the_templates_options(jsonl):
    """Check a template option that lengthens the prompt, as Qwen3's enable_thinking: false does.

    Here it adds the tokens of 0000.
    """
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if pad %}0000{% endif %}"
    settings = {"dataset_name": jsonl("1+1=", "1+1+1+1="), "max_prompt_length": 8}
    assert len(load(template, **settings)) == len(load(template, {"pad": False}, **settings)) == 2
    assert len(load(template, {"pad": True}, **settings)) == 1


def test_prompts_that_are_too_long_are_left_out_and_counted(jsonl, caplog):
    path = jsonl("1+1=", "1+1+1=")
    assert load(dataset_name=path, max_prompt_length=4)["prompt"] == ["1+1="]
    assert "1 of 2 prompts have more than 4 tokens" in caplog.text
    with pytest.raises(ConfigError, match="no prompt has at most max_prompt_length = 3 tokens"):
        load(dataset_name=path, max_prompt_length=3)
