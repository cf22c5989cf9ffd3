"""Test the options of an evaluation: which are refused, which a run's training decides, and the command that it
prints.
"""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qerl_recipes.evaluate import as_trained
from qerl_recipes.evaluate.request import Evaluation, Sampling, check_tasks, command_signature, read_problems
from qerl_recipes.files.adapter import open_adapter

Make = Callable[..., Path]


def evaluation(**options: Any) -> Evaluation:
    return Evaluation.of(**{"base": "b", "tasks": "running_sum", "output_dir": Path("o"), **options})


def test_the_command_has_every_option_but_one() -> None:
    parameters = command_signature().parameters
    assert parameters.keys() == Evaluation.model_fields.keys() - {"quiet"}
    for name, parameter in parameters.items():
        field = Evaluation.model_fields[name]
        assert parameter.default == (inspect.Parameter.empty if field.is_required() else field.default)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.0}, "^temprature: Extra inputs"),
        ({"max_new_tokens": 4.5}, "^max_new_tokens is 4.5; it must be a valid integer"),
        ({"tasks": "gsm9k"}, "there is no task 'gsm9k'; choose from gsm8k"),
        ({"tasks": []}, "name at least one task"),
        ({"tasks": "running_sum, running_sum"}, "named twice"),
        ({"tasks": "jsonl:nowhere.jsonl"}, "there is no file nowhere.jsonl"),
        ({"chat_template": "nowhere.jinja"}, "neither Jinja text nor a file"),
        ({"chat_template_kwargs": "[1]"}, "^chat_template_kwargs is '\\[1\\]'; it is no JSON object such as"),
        ({"generation_kwargs": "{"}, "^generation_kwargs is '{'; it is no JSON object such as"),
        ({"generation_kwargs": {"max_tokens": 4}}, "generation_kwargs cannot set max_tokens: temp"),
        ({"num_samples": 2}, "num_samples is 2, but temperature 0 gives the same answer"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"max_samples": 0}, "max_samples is 0"),
        ({"max_model_length": 0}, "max_model_length is 0; it must be greater"),  # 0 would have meant the model's
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5; it must be less"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),  # 0 would have meant the task's own length
        ({"top_p": 0.95}, r"top_p is 0\.95, but temperature 0 \(greedy\) draws nothing; set temperature"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must"),
        ({"top_p": 1.01}, r"top_p is 1\.01; it must"),
        ({"generation_kwargs": {"min_p": 0.1}}, r"min_p is 0\.1, but temperature 0 \(greedy\) draws nothing"),
        ({"seed": 0}, r"seed is 0, but temperature 0 \(greedy\) draws nothing; set temperature"),
        ({"temperature": -1.0}, r"temperature is -1\.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        (
            {"use_chat_template": False, "chat_template": "{{ messages }}"},
            "chat_template would be ignored: no chat template is used .*--no-chat-template.*; remove one of the two",
        ),
        (
            {"use_chat_template": False, "chat_template_kwargs": '{"short": true}'},
            "chat_template_kwargs would be ignored",
        ),
        ({"noise_sigma": -0.1}, "noise_sigma is -0.1"),
        ({"noise_seed": 1}, "noise_seed is 1, but there is no noise; set noise_sigma"),
        ({"adapter_only": True}, "adapter_only leaves the base out, and there is no adapter"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_an_option_without_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluation(**options).checked()


def test_templates_and_json_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ of_the_file }}")
    assert evaluation(chat_template=str(tmp_path / "t.jinja")).checked().chat_template == "{{ of_the_file }}"
    assert evaluation(chat_template="{{ messages }}").checked().chat_template == "{{ messages }}"
    options = {"enable_thinking": False}
    for text, value in ((json.dumps(options), options), (options, options), ("{}", {}), ({}, {}), (None, None)):
        assert evaluation(chat_template_kwargs=text).chat_template_kwargs == value
    assert evaluation(tasks="amc23 , running_sum").tasks == ["amc23", "running_sum"]


ROW = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '"text"',
        '{"prompt": "?", "answer": "1", "answer": "2"}',
        *(
            json.dumps(row)
            for row in ({"prompt": "1+1="}, {**ROW, "prompt": 1}, {**ROW, "answer": True}, {**ROW, "answer": " "})
        ),
    ],
)
def test_a_line_of_another_form_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(ROW)}\n\n{line}\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 3"):
        check_tasks([f"jsonl:{tmp_path}/x.jsonl"])


def test_problems_are_read_letter_for_letter(tmp_path: Path) -> None:
    rows = '{"prompt": "a\u2028b", "answer": 0.10}\n\n{"prompt": "c", "answer": 7}\n{"prompt": "d", "answer": "1e3"}\n'
    (tmp_path / "x.jsonl").write_text("\ufeff" + rows)
    found = [(row["prompt"], row["answer"]) for row in read_problems(tmp_path / "x.jsonl")]
    assert found == [("a\u2028b", "0.10"), ("c", "7"), ("d", "1e3")]
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no problems"):
        read_problems(tmp_path / "x.jsonl")


def test_an_open_choice_is_made_as_in_training(save_adapter: Make, tmp_path: Path) -> None:
    recipe = {"system_prompt": "S", "chat_template_kwargs": {"enable_thinking": False}, "max_completion_length": 77}
    adapter = save_adapter(tmp_path / "a", 1, recipe=recipe)
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    saved = open_adapter(adapter)
    sampling, texts = as_trained.taken_over(Sampling(), saved)
    assert (sampling.system_prompt, sampling.chat_template, sampling.max_new_tokens) == ("S", "{{ messages }}", 77)
    assert sampling.chat_template_kwargs == {"enable_thinking": False}
    assert ", ".join(texts) == (
        "system_prompt, max_new_tokens 77, chat_template, chat_template_kwargs {'enable_thinking': False}"
    )
    own = Sampling(system_prompt="", chat_template="{{ x }}", max_new_tokens=5, chat_template_kwargs={})
    assert as_trained.taken_over(own, saved) == (own, [])
    off, texts = as_trained.taken_over(Sampling(use_chat_template=False), saved)
    assert (off.chat_template, off.chat_template_kwargs) == (None, None)
    assert texts == ["system_prompt", "max_new_tokens 77"]
    assert as_trained.overridden(Sampling(), saved) == as_trained.overridden(sampling, saved) == []
    assert as_trained.overridden(Sampling(system_prompt="x" * 101, use_chat_template=False), saved) == [
        "no chat template",
        f"system_prompt {'x' * 97}..., there S",
    ]
    assert as_trained.overridden(own, saved) == [
        "system_prompt none, there S",
        "max_new_tokens 5, there 77",
        "chat_template {{ x }}, there {{ messages }}",
        "chat_template_kwargs none, there {'enable_thinking': False}",
    ]


def test_temperature_and_top_p_are_compared_with_training() -> None:
    assert as_trained.warmer_or_colder(Sampling(), {"temperature": 1.0, "top_p": 0.9}) == ["temperature 0, there 1"]
    drawn = Sampling(temperature=0.6, top_p=0.9)
    assert as_trained.warmer_or_colder(drawn, {"temperature": 0.6, "top_p": 0.8}) == ["top_p 0.9, there 0.8"]
    assert as_trained.warmer_or_colder(drawn, {}) == []


@pytest.mark.parametrize(
    ("recipe", "greedy", "drawn"),
    [
        ({"temperature": 1.0, "repetition_penalty": 1.0, "top_k": 0, "min_p": None, "generation_kwargs": None}, {}, {}),
        (
            {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2},
            {"repetition_penalty": 1.2},
            {"top_k": 20, "min_p": 0.1},
        ),
        ({"vllm_structured_outputs_regex": "[0-9]"}, {"structured_outputs": {"regex": "[0-9]"}}, {}),
        ({"generation_kwargs": {"stop": ["x"]}}, {"stop": ["x"], "include_stop_str_in_output": True}, {}),
        ({"generation_kwargs": {"bad_words": ["x"], "detokenize": True}}, {"bad_words": ["x"]}, {}),
    ],
    ids=["nothing", "probabilities", "regex", "stop", "words"],
)
def test_sampling_parameters_are_taken_over_and_taken_back(
    recipe: dict[str, object], greedy: dict[str, object], drawn: dict[str, object], save_adapter: Make, tmp_path: Path
) -> None:
    saved = open_adapter(save_adapter(tmp_path / "a", 1, recipe=recipe))
    for temperature, expected in ((0.0, greedy), (0.6, {**greedy, **drawn})):
        sampling, texts = as_trained.taken_over(Sampling(temperature=temperature), saved)
        assert (sampling.generation_kwargs or {}) == expected
        assert texts == ([f"generation_kwargs {expected}"] if expected else [])
        off = Sampling(temperature=temperature, generation_kwargs={})
        assert as_trained.taken_over(off, saved) == (off, [])


@pytest.mark.parametrize(
    ("recipe", "task"),
    [
        ({"dataset_name": "openai/gsm8k", "reward_funcs": ["accuracy", "format"]}, "gsm8k"),
        ({"dataset_name": "running_sum"}, "running_sum"),
        ({"dataset_name": "bigmath"}, "math_500"),
        ({"dataset_name": "somebody/poems"}, "TASKS"),
        ({"dataset_name": "train.jsonl"}, "jsonl:HERE/train.jsonl"),
        ({"dataset_name": "."}, "jsonl:HERE/test.jsonl"),
        ({"dataset_name": "others"}, "TASKS"),  # lines for a custom reward
        ({"dataset_name": "test.jsonl", "reward_funcs": ["exact_answer"]}, "jsonl-exact:HERE/test.jsonl"),
        ({"dataset_name": "test.jsonl", "reward_funcs": ["format", "dapo_score"]}, "jsonl-accuracy:HERE/test.jsonl"),
        ({"dataset_name": "test.jsonl", "reward_funcs": ["accuracy", "last_number"]}, "jsonl-number:HERE/test.jsonl"),
        ({"environments": "higher_lower"}, "environment:higher_lower"),
        ({"environments": {"a": "x.A", "b": "x.B"}, "tools": ["t"]}, "environment:a,environment:b"),
        ({"dataset_name": "gsm8k", "tools": ["t"]}, "tools --problems PROBLEMS.jsonl"),
    ],
    ids=str,
)
def test_the_printed_command_asks_for_what_was_taught(
    recipe: dict[str, Any], task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "others").mkdir()
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROW))
        (tmp_path / "others" / f"{name}.jsonl").write_text(json.dumps({"prompt": "?", "colour": "red"}))
    monkeypatch.chdir(tmp_path)
    state = {"base": "org/base", "quantization": "nf4", "recipe": recipe}
    assert as_trained.command("runs/a b", state) == (
        f"qerl evaluate org/base --adapter 'runs/a b' --quantization nf4 --tasks {task.replace('HERE', str(tmp_path))} "
        "--output_dir 'runs/a b/evaluation'"
    )


@pytest.mark.parametrize(
    ("recipe", "task"),
    [
        ({"dataset_name": "pick_number", "reward_funcs": ["last_number"]}, "jsonl-number:"),
        ({"reward_funcs": ["exact_answer"]}, "jsonl-exact:"),
        ({"dataset_name": "reasoning_gym", "reward_funcs": ["reasoning_gym"]}, None),
        ({"dataset_name": "gsm8k", "reward_funcs": ["accuracy"]}, None),
        ({"environments": "higher_lower"}, None),
    ],
    ids=str,
)
def test_held_out_problems_become_the_task(recipe: dict[str, Any], task: str | None, tmp_path: Path) -> None:
    assert as_trained.needs_held_out(tmp_path, recipe) == (task is not None)
    if task is not None:
        file = tmp_path / as_trained.HELD_OUT
        file.write_text(json.dumps(ROW))
        assert f" --tasks {task}{file} " in as_trained.command(tmp_path, {"recipe": recipe})
        assert not as_trained.needs_held_out(tmp_path, recipe)


def test_a_run_that_acts_leaves_its_problems(tmp_path: Path) -> None:
    for key in ({"tools": ["t"]}, {"environments": "x.A"}):
        recipe = {"dataset_name": "gsm8k", "reward_funcs": ["accuracy"], **key}
        assert as_trained.needs_held_out(tmp_path, recipe)
        assert "--problems" in as_trained.command(tmp_path, {"recipe": recipe})
        (tmp_path / as_trained.HELD_OUT).write_text(json.dumps(ROW))
        assert "--problems" not in as_trained.command(tmp_path, {"recipe": recipe})
        (tmp_path / as_trained.HELD_OUT).unlink()


def test_another_environment_has_no_part_in_the_runs_tools() -> None:
    recipe = {"environments": {"a": "x.A"}, "tools": ["t"], "reward_funcs": ["r"], "max_tool_tokens": 5, "beta": 0.0}
    assert as_trained.acting(recipe, ["environment:x.A", "gsm8k"]) == {"max_tool_tokens": 5}
    assert as_trained.acting(recipe, ["gsm8k", "environment:a"]) == as_trained.acting(recipe) == {
        key: value for key, value in recipe.items() if key != "beta"
    }  # fmt: skip
    assert as_trained.acting({"tools": ["t"]}, ["tools"]) and not as_trained.acting({"reward_funcs": ["r"]}, ["tools"])


def test_a_task_of_the_training_file_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine, folder = {"dataset_name": "mine.jsonl"}, {"dataset_name": str(tmp_path / "data")}
    known = {"dataset_name": "bigmath", "dataset_kwargs": {"path": "mine.jsonl"}}
    cases = [
        ("jsonl:mine.jsonl", mine, True),
        (f"jsonl-exact:{tmp_path}/mine.jsonl", mine, True),
        (f"jsonl-number:{tmp_path}/data/../mine.jsonl", known, True),
        ("jsonl:other.jsonl", mine, False),
        ("jsonl:data/train.jsonl", folder, True),
        ("jsonl:data/test.jsonl", folder, False),
        ("gsm8k", {"dataset_name": "gsm8k"}, False),
        ("jsonl:mine.jsonl", {}, False),
    ]
    assert [as_trained.is_of_training(task, recipe) for task, recipe, _ in cases] == [known for *_, known in cases]
    assert as_trained.is_of_training("tools", mine, Path("mine.jsonl"))
    assert not as_trained.is_of_training("environment:x", mine, Path("other.jsonl"))
    assert not as_trained.is_of_training("gsm8k", mine, Path("mine.jsonl"))
