"""What an evaluation asks for where its user says nothing: as in training; and the command that evaluates a run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qerl_recipes.evaluate import request as evaluation_request
from qerl_recipes.files.adapter import open_adapter
from qerl_recipes.recipe.generation import template_text

Make = Callable[..., Path]


def test_what_is_left_open_is_settled_as_in_training_and_a_flag_stands_above_it(
    save_adapter: Make, tmp_path: Path
) -> None:
    recipe = {"system_prompt": "S", "chat_template_kwargs": {"enable_thinking": False}, "max_completion_length": 77}
    adapter = save_adapter(tmp_path / "a", 1, recipe=recipe)
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    found = open_adapter(adapter)
    sampling, said = evaluation_request.Sampling().as_in_training(found)
    assert (sampling.system_prompt, sampling.chat_template, sampling.max_new_tokens) == ("S", "{{ messages }}", 77)
    assert sampling.chat_template_kwargs == {"enable_thinking": False}
    assert ", ".join(said) == (
        "system_prompt, max_new_tokens 77, chat_template, chat_template_kwargs {'enable_thinking': False}"
    )
    assert sampling.unlike({"temperature": 1.0, "top_p": 0.9}) == ["temperature 0, there 1"]
    drawn = evaluation_request.Sampling(temperature=0.6, top_p=0.9)
    assert drawn.unlike({"temperature": 0.6, "top_p": 0.8}) == ["top_p 0.9, there 0.8"]
    assert drawn.unlike({}) == []
    own = evaluation_request.Sampling(
        system_prompt="", chat_template="{{ x }}", max_new_tokens=5, chat_template_kwargs={}
    )
    assert own.as_in_training(found) == (own, [])
    off, said = evaluation_request.Sampling(use_chat_template=False).as_in_training(found)
    assert (off.chat_template, off.chat_template_kwargs) == (None, None)
    assert said == ["system_prompt", "max_new_tokens 77"]


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
def test_what_training_sampled_with_is_taken_over_and_can_be_taken_back(
    recipe: dict[str, object], greedy: dict[str, object], drawn: dict[str, object], save_adapter: Make, tmp_path: Path
) -> None:
    found = open_adapter(save_adapter(tmp_path / "a", 1, recipe=recipe))
    for temperature, expected in ((0.0, greedy), (0.6, {**greedy, **drawn})):
        sampling, said = evaluation_request.Sampling(temperature).as_in_training(found)
        assert (sampling.generation_kwargs or {}) == expected
        assert said == ([f"generation_kwargs {expected}"] if expected else [])
        off = evaluation_request.Sampling(temperature, generation_kwargs={})
        assert off.as_in_training(found) == (off, [])


@pytest.mark.parametrize(
    ("dataset", "task"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("running_sum", "running_sum"),
        ("bigmath", "math_500"),
        ("dapo_math_17k", "math_500"),
        ("reasoning_gym", "TASKS"),
    ],
)
@pytest.mark.parametrize("rewards", [{}, {"reward_funcs": ["accuracy", "format"]}], ids=["", "rewards"])
def test_the_command_that_evaluates_a_run_asks_for_what_it_was_taught(
    dataset: str, task: str, rewards: dict[str, list[str]]
) -> None:
    state = {"base": "org/base", "quantization": "nf4", "recipe": {"dataset_name": dataset, **rewards}}
    assert evaluation_request.command("runs/a b", state) == (
        f"qerl evaluate org/base --adapter 'runs/a b' --quantization nf4 --tasks {task} --output_dir "
        "'runs/a b/evaluation'"
    )


def test_the_command_asks_for_a_local_file_and_for_the_held_out_one_in_a_folder(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "?", "answer": "1"}))
    state = {"recipe": {"dataset_name": f"{tmp_path}/train.jsonl"}}
    assert f"--tasks jsonl:{tmp_path}/train.jsonl " in evaluation_request.command("run", state)
    state = {"recipe": {"dataset_name": str(tmp_path)}}
    assert f"--tasks jsonl:{tmp_path}/test.jsonl " in evaluation_request.command("run", state)


def test_no_task_is_guessed_for_data_that_none_is_known_to_ask_for(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "?", "colour": "red"}))  # for a reward of one's own
    for dataset in (str(tmp_path), f"{tmp_path}/train.jsonl", "somebody/poems", None):
        assert " --tasks TASKS " in evaluation_request.command("run", {"recipe": {"dataset_name": dataset}})


def test_the_command_judges_a_local_file_as_the_reward_did_and_works_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "?", "answer": "yes"}))
    monkeypatch.chdir(tmp_path)
    state = {"recipe": {"dataset_name": "mine.jsonl", "reward_funcs": ["exact_answer"]}}
    assert f"--tasks jsonl-exact:{tmp_path}/mine.jsonl " in evaluation_request.command("run", state)
    judged = ((["format", "dapo_score"], "accuracy"), (["accuracy", "last_number"], "number"), (["length"], "accuracy"))
    for rewards, task in judged:
        state = {"recipe": {"dataset_name": "mine.jsonl", "reward_funcs": rewards}}
        assert f"--tasks jsonl-{task}:{tmp_path}/mine.jsonl " in evaluation_request.command("run", state)


def test_a_task_of_the_file_that_was_trained_on_is_known_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert [evaluation_request.is_of_training(task, recipe) for task, recipe, _ in cases] == [x for *_, x in cases]


@pytest.mark.parametrize(
    ("numbers", "num_samples", "refused"),
    [
        ({"top_p": 1.0, "max_new_tokens": 1}, 1, None),
        ({"temperature": 0.1}, 2, None),
        ({"temperature": 0.1, "top_p": 0.9, "seed": 0}, 1, None),
        ({"use_chat_template": False, "chat_template_kwargs": {}}, 1, None),
        ({"use_chat_template": True, "chat_template": "{{ x }}"}, 1, None),
        ({}, 2, "num_samples is 2, but temperature 0"),
        ({}, 0, "num_samples is 0"),
        ({"top_p": 1.01}, 1, r"top_p is 1\.01"),
        ({"max_new_tokens": 0}, 1, "max_new_tokens is 0"),  # of which a task's own length would have been made
        ({"temperature": float("inf")}, 1, "temperature is inf"),
    ],
)
def test_numbers_are_refused_from_where_they_make_no_sense(
    numbers: dict[str, float], num_samples: int, refused: str | None
) -> None:
    sampling = evaluation_request.Sampling(**numbers)
    if refused is None:
        sampling.check(num_samples)
        return
    with pytest.raises(ValueError, match=refused):
        sampling.check(num_samples)


def test_one_solved_problem_is_refused_as_several_are() -> None:
    evaluation_request.check(["gsm8k"], num_fewshot=1)
    with pytest.raises(ValueError, match="num_fewshot is 1, but task math_500 has no solved problems"):
        evaluation_request.check(["gsm8k", "math_500"], num_fewshot=1)


def test_a_template_is_text_or_a_file_and_empty_options_are_not_none(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ of_the_file }}")
    for given, read in (
        ("{% for m in messages %}-{% endfor %}",) * 2,
        ("{{ messages }}",) * 2,
        (str(tmp_path / "t.jinja"), "{{ of_the_file }}"),
    ):
        assert template_text(given) == read
    options = {"enable_thinking": False}
    for asked, found in (
        (options, options),
        ('{"enable_thinking": false}', options),
        (None, None),
        ({}, {}),
        ("{}", {}),
    ):
        assert evaluation_request.json_object("x", asked, "{}") == found  # what is not None stands above the training's
