"""``qerl report``: one page with everything in it, of whatever a folder holds, and clear errors for the rest."""

import html
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from qerl_recipes.evaluate import plots, report
from qerl_recipes.evaluate.figures import too_many_cut
from qerl_recipes.files.adapter import open_adapter

STEPS = [
    {"step": step, "reward": 0.1 * step, "entropy": 1 / step, "sigma": 1e-2, "logp_mismatch_mean": 1e-3}
    for step in range(1, 8)
]
RESULT = {"accuracy": 0.5, "n": 100, "ci95": [0.4038, 0.5962]}


def fill(folder: Path, *, steps: list[dict] | None = None, evaluation: object = None) -> Path:
    if steps is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    if evaluation is not None:
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def test_the_page_needs_no_network_and_holds_every_picture(tmp_path: Path) -> None:
    fill(tmp_path, steps=STEPS, evaluation={"tasks": {"gsm8k": {"base": RESULT, "adapter": RESULT}}})
    page = report.write(tmp_path).read_text()
    assert page.count("<svg") >= 5
    assert not re.search(r'(src|href)="(?!#|data:)', page), "a picture or a style from elsewhere"
    assert "<script" not in page
    for text in ("Reward", "Entropy", "sigma", "50.0", "40.4", "59.6"):
        assert text in page, text


@pytest.mark.parametrize("part", ["metrics", "evaluation"])
def test_a_folder_with_only_one_half_has_a_report(part: str, tmp_path: Path) -> None:
    if part == "metrics":
        fill(tmp_path, steps=STEPS[:1])
    else:
        fill(tmp_path, evaluation={"tasks": {"gsm8k": {"base": RESULT}}})
    page = report.write(tmp_path).read_text()
    assert "<svg" in page and ("first 1 steps last 1 steps" in words(page)) == (part == "metrics")


def test_texts_are_escaped_and_missing_numbers_are_gaps(tmp_path: Path) -> None:
    steps = [*STEPS, {"step": 8, "reward": None}, {"step": 9, "reward": float("nan"), "entropy": 0.1}]
    fill(tmp_path, steps=steps, evaluation={"tasks": {"<b>task</b>": {"base": RESULT}}, "note": "<i>x</i>"})
    page = report.write(tmp_path).read_text()
    assert "<b>task</b>" not in page and "<i>x</i>" not in page
    assert ">nan<" not in page


def test_a_last_line_that_a_killed_run_left_half_written_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path, steps=STEPS)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')
    assert len(report.read_metrics(tmp_path / "metrics.jsonl")) == len(STEPS)
    report.write(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", "{\n", r"metrics\.jsonl, line 1 is no JSON"),
        ("metrics.jsonl", '{"reward": 1}\n', r'metrics\.jsonl, line 1 must be .* "step"'),
        ("evaluation.json", "{", r"evaluation\.json is damaged"),
        ("evaluation.json", "[]", r"evaluation\.json must hold a JSON object"),
        ("evaluation.json", '{"tasks": {"x": {"base": {"accuracy": 1}}}}', r"evaluation\.json does not hold"),
    ],
    ids=["not_json", "no_step", "half_an_object", "a_list", "no_interval"],
)
def test_a_damaged_file_is_named_and_the_old_page_stays(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        report.write(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_folder_with_nothing_to_report_names_the_commands_that_make_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"qerl train --config[\s\S]*qerl evaluate"):
        report.write(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        report.write(tmp_path / "nowhere")


STATE = {
    "base": "/models/Qwen2.5-7B-Instruct",
    "quantization": "qerl_nvfp4",
    "train_norms": False,
    "seed": 3,
    "date": "2026-02-01T10:20:30+00:00",
    "seconds": 5400,
    "versions": {"trl": "1.16.0"},
    "recipe": {
        "dataset_name": "gsm8k",
        "learning_rate": 1e-05,
        "reward_funcs": ["accuracy", "format"],
        "loss_type": "dapo",
        "noise_mode": "shared",
        "sigma_start": 0.01,
        "sigma_end": 0.0001,
        "num_stages": 10,
    },
}


def words(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page.partition("<body>")[2]).split())


def test_the_page_says_what_was_run_when_and_with_which_settings_in_words(tmp_path: Path) -> None:
    fill(tmp_path, steps=STEPS)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "qerl_state.json").write_text(json.dumps(STATE))
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]})
    )
    page = report.write(tmp_path).read_text()
    assert "<h1>Qwen2.5-7B-Instruct on gsm8k</h1>" in page
    said = words(page)
    assert f"{tmp_path.name}; NVFP4, 4 bits, frozen; 7 steps; trained in 90 minutes; 2026-02-01 10:20 UTC" in said
    for text in (
        "learning rate 1e-05",
        "rewards accuracy, format",
        "loss dapo",
        "noise in engine and trainer (shared), sigma 0.01 to 0.0001 in 10 stages",
        "adapter LoRA, rank 32, alpha 64, on q_proj, v_proj",
        "the dark line over it the mean of 5 steps",
        f"qerl evaluate /models/Qwen2.5-7B-Instruct --adapter {tmp_path} --quantization qerl_nvfp4 --tasks gsm8k",
    ):
        assert text in said, text
    assert not re.search(r"reward_funcs|noise_mode|sigma_start|base_hash", page)


def test_first_and_last_steps_are_steps_where_not_each_has_a_value(tmp_path: Path) -> None:
    """A rollout for four steps is scored once: the first five steps have two rewards, not the first five rewards."""
    steps = [{"step": i, "entropy": i, **({"reward": i / 10} if i % 4 == 1 else {})} for i in range(1, 21)]
    del steps[-4]["reward"]
    said = words(report.write(fill(tmp_path, steps=steps)).read_text())
    assert "reward 0.300 entropy, nats per token 3.0000 18.0000" in said  # (0.1 + 0.5) / 2, and none at the end
    steps[-4] = {**steps[-4], "reward": 1.7}
    assert "reward 0.300 1.700" in words(report.write(fill(tmp_path, steps=steps)).read_text())


def test_a_step_without_a_finite_number_is_counted_beside_the_mean(tmp_path: Path) -> None:
    steps = [{"step": i, "reward": None if i > 6 else 0.5, "entropy": 1.0} for i in range(1, 10)]
    said = words(report.write(fill(tmp_path, steps=steps)).read_text())
    assert "reward 0.500 0.500 (3 not finite) entropy" in said
    steps = [{**step, "reward": None} for step in steps]
    assert "reward (5 not finite) (5 not finite)" in words(report.write(fill(tmp_path, steps=steps)).read_text())


def test_figures_of_another_adapter_than_the_one_that_lies_there_are_said_to_be_such(
    save_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    judged = open_adapter(save_adapter(tmp_path / "adapter", 1)).sha256()
    evaluation = {"tasks": {"gsm8k": {"base": RESULT, "adapter": RESULT}}, "adapter_sha256": judged}
    said = "of another adapter than the one that lies here now"
    assert said not in report.write(fill(tmp_path, evaluation=evaluation)).read_text()
    save_adapter(tmp_path / "adapter", 2)  # training went on
    assert said in report.write(tmp_path).read_text()
    fill(tmp_path, evaluation={**evaluation, "adapter_sha256": None})  # of the base alone
    assert said not in report.write(tmp_path).read_text()


def test_only_answers_that_were_drawn_have_a_seed(tmp_path: Path) -> None:
    evaluation = {"tasks": {"gsm8k": {"base": RESULT}}, "max_new_tokens": {"gsm8k": 64}}
    for sampling, said in (
        ({"temperature": 0.0, "top_p": 1.0, "seed": 7}, "evaluated with greedy, at most 64 tokens"),  # of an older file
        ({"temperature": 0.6, "top_p": 0.9, "seed": 7}, "with temperature 0.6, top_p 0.9, seed 7, at most 64 tokens"),
    ):
        fill(tmp_path, evaluation={**evaluation, "sampling": sampling})
        assert said in words(report.write(tmp_path).read_text())


def test_an_evaluation_on_what_was_trained_on_is_said_to_be_one(tmp_path: Path) -> None:
    evaluation = {"tasks": {"jsonl:mine.jsonl": {"base": RESULT}}, "of_training": []}
    assert "no unseen problems" not in words(report.write(fill(tmp_path, evaluation=evaluation)).read_text())
    fill(tmp_path, evaluation={**evaluation, "of_training": ["jsonl:mine.jsonl"]})
    said = words(report.write(tmp_path).read_text())
    assert "jsonl:mine.jsonl: what the adapter was trained on, whole or in part, and no unseen problems." in said


def test_held_out_rewards_and_parts_of_the_reward_have_pictures_and_absent_noise_has_none(tmp_path: Path) -> None:
    steps = [{**step, "sigma": 0.0, "rewards/format/mean": 0.5, "rewards/accuracy/mean": 0.1} for step in STEPS]
    held_out = [{"step": step, "eval/problems": 8, "eval/reward": 0.1 * step} for step in (0, 4)]
    page = report.write(fill(tmp_path, steps=[held_out[0], *steps[:4], held_out[1], *steps[4:]])).read_text()
    assert "7 steps" in page, "an evaluation was counted as a step"
    assert "Reward on held-out problems" in page and "Parts of the reward" in page
    assert "Noise: sigma" not in page
    assert "Noise: sigma" in report.write(fill(tmp_path, steps=STEPS)).read_text()
    assert "Parts of the reward" not in report.write(fill(tmp_path, steps=STEPS)).read_text()


def test_an_evaluation_beside_or_below_the_run_is_found_and_the_newer_one_shown(tmp_path: Path) -> None:
    fill(tmp_path, steps=STEPS)
    assert "Not evaluated yet" in report.write(tmp_path).read_text()
    (tmp_path / "evaluation").mkdir()
    arm = {**RESULT, "pass_at": {"4": {"value": 0.75, "ci95": [0.6, 0.8]}}}
    fill(tmp_path / "evaluation", evaluation={"tasks": {"gsm8k": {"adapter": arm}}})
    page = words(report.write(tmp_path).read_text())
    assert "with adapter 50.0 % 40.4 to 59.6 % 100" in page and "with adapter, pass@4 75.0 %" in page
    fill(tmp_path, evaluation={"tasks": {"gsm8k": {"base": {**RESULT, "accuracy": 0.45}}}})
    os.utime(tmp_path / "evaluation" / "evaluation.json", (1, 1))
    assert "45.0 %" in words(report.write(tmp_path).read_text())
    os.utime(tmp_path / "evaluation.json", (0, 0))
    assert "45.0 %" not in words(report.write(tmp_path).read_text())


def test_an_evaluation_of_a_study_is_found_and_named_and_so_are_those_beside_it(tmp_path: Path) -> None:
    fill(tmp_path, steps=STEPS)
    for age, name in enumerate(("sampled", "greedy", "old")):
        (tmp_path / "evaluation" / name).mkdir(parents=True)
        arm = {**RESULT, "accuracy": 0.45 + age / 100}
        fill(tmp_path / "evaluation" / name, evaluation={"tasks": {"gsm8k": {"adapter": arm}}})
        os.utime(tmp_path / "evaluation" / name / "evaluation.json", (9 - age, 9 - age))
    said = words(report.write(tmp_path).read_text())
    assert "with adapter 45.0 %" in said and "Not evaluated yet" not in said
    assert (
        "From evaluation/sampled/evaluation.json , the newest here; older: evaluation/greedy/evaluation.json, " in said
    )
    for name in ("greedy", "old"):
        (tmp_path / "evaluation" / name / "evaluation.json").unlink()
    said = words(report.write(tmp_path).read_text())
    assert "From evaluation/sampled/evaluation.json ." in said and "older" not in said


def test_the_share_of_answers_that_ended_stands_beside_each_accuracy(tmp_path: Path) -> None:
    many = {"maj_at": {"4": {"value": 0.75, "ci95": [0.6, 0.8]}}}
    arms = {"base": {**RESULT, "ended": 0.85}, "adapter": {**RESULT, **many, "ended": 0.97}}
    evaluation = {"tasks": {"gsm8k": arms}, "max_new_tokens": {"gsm8k": 64}, "max_model_length": 512}
    said = words(report.write(fill(tmp_path, evaluation=evaluation)).read_text())
    row = "40.4 to 59.6 % 100"
    assert (
        f"base 50.0 % {row} 85 % with adapter 50.0 % {row} 97 % with adapter, maj@4 75.0 % 60.0 to 80.0 % 100 97 %"
        in (said)
    )
    assert "gsm8k: 15% (base) and 3% (adapter) of the answers were cut at max_new_tokens=64; accuracy counts" in said
    older = {"base": {**RESULT, "cut": 0.25}, "adapter": RESULT}  # of before: one says what was cut, one nothing
    said = words(report.write(fill(tmp_path, evaluation={"tasks": {"gsm8k": older}})).read_text())
    assert f"base 50.0 % {row} 75 % with adapter 50.0 % {row} " in said and "25% (base) of the answers were cut" in said


@pytest.mark.parametrize(
    ("ended", "longest", "told"),
    [
        ({"base": 0.9, "adapter": 0.95}, 64, None),  # a tenth is not more than a tenth
        (
            {"base": 1.0, "adapter": 0.21},
            64,
            "0% (base) and 79% (adapter) of the answers were cut at max_new_tokens=64",
        ),
        ({"adapter": 0.21}, None, "79% (adapter) of the answers were cut at max_model_length=128; "),
        ({"adapter": 0.21}, 128, "raise max_model_length, or give the share that ended beside the accuracy"),
    ],
)
def test_more_than_a_tenth_of_cut_answers_is_named_with_the_limit(ended, longest, told) -> None:
    tasks = {"x": {label: {"ended": share} for label, share in ended.items()}, "y": {"base": {"ended": 1.0}}}
    found = too_many_cut({"tasks": tasks, "max_new_tokens": {"x": longest, "y": 1}, "max_model_length": 128})
    assert found == [] if told is None else (len(found) == 1 and found[0].startswith("x: ") and told in found[0])


def test_a_run_whose_last_completions_were_cut_says_so(tmp_path: Path) -> None:
    def said(*clipped: float | None) -> str:
        steps = [{"step": i, "reward": 0.5, "completion_clipped": share} for i, share in enumerate(clipped, start=1)]
        for step in steps:  # a rollout for two steps has one share
            if step["completion_clipped"] is None:
                del step["completion_clipped"]
        return words(report.write(fill(tmp_path, steps=steps)).read_text())

    (tmp_path / "qerl_state.json").write_text(json.dumps({**STATE, "recipe": {"max_completion_length": 112}}))
    shown = said(1.0, 1.0, 0.0, 0.1, None, 0.2, 0.1, 0.1)
    assert "completions cut at the limit of length 52.5% 12.5%" in shown
    assert (
        "In the last steps 12% of the completions were cut at max_completion_length=112; rewards are of what" in shown
    )
    assert "In the last steps" not in said(1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1), "a tenth is not more than a tenth"


AS_TRAINED = {"system_prompt": "sum", "use_chat_template": True, "chat_template": "{{ t }}"}
AS_TRAINED |= {"chat_template_kwargs": {"short": True}}
UNLIKE = {
    "weights": ({"quantization": "bf16"}, {}, "weights BF16, frozen NVFP4, 4 bits, frozen"),
    "dtype": ({"dtype": "float16"}, {}, "dtype float16 bfloat16"),
    "base": ({"base_sha256": "2", "base": "/other"}, {}, f"base /other {STATE['base']}"),
    "base-in-its-place": ({"base_sha256": "2"}, {}, f"base {STATE['base']} {STATE['base']}, as it was then"),
    "solved-problems": ({"num_fewshot": 4}, {}, "solved problems shown 4 0"),
    "system-prompt": ({}, {"system_prompt": "x" * 99 + "yz"}, f"system prompt {'x' * 97}... sum"),
    "no-system-prompt": ({}, {"system_prompt": ""}, "system prompt none sum"),
    "another-template": ({}, {"chat_template": "{{ u }}"}, "chat template another one the recipe's"),
    "tokenizers-template": ({}, {"chat_template": None}, "chat template the tokenizer's own the recipe's"),
    "no-template": ({}, {"use_chat_template": False}, "chat template none the recipe's"),
    "options": ({}, {"chat_template_kwargs": None}, "its options none {'short': True}"),
}


@pytest.mark.parametrize(("change", "asked", "told"), UNLIKE.values(), ids=list(UNLIKE))
def test_what_was_judged_otherwise_than_it_was_trained_is_said_by_name(
    change: dict, asked: dict, told: str, tmp_path: Path
) -> None:
    recipe = {
        "dtype": None,
        "system_prompt": "sum",
        "chat_template": "{{ t }}",
        "chat_template_kwargs": {"short": True},
    }
    (tmp_path / "adapter").mkdir()
    state = {**STATE, "base_hash": "1", "recipe": recipe}
    (tmp_path / "adapter" / "qerl_state.json").write_text(json.dumps(state))
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ t }}")
    evaluation = {"tasks": {"gsm8k": {"adapter": RESULT}}, "quantization": "qerl_nvfp4", "dtype": "bfloat16"}
    evaluation |= {"base": STATE["base"], "base_sha256": "1", "num_fewshot": 0, "sampling": AS_TRAINED}
    fill(tmp_path, evaluation=evaluation)
    assert "judged with" not in words(report.write(tmp_path).read_text())
    fill(tmp_path, evaluation={**evaluation, **change, "sampling": {**AS_TRAINED, **asked}})
    said = html.unescape(words(report.write(tmp_path).read_text()))
    heading = "These figures were not made as the run was trained: judged with trained with"
    assert f"{heading} {told} From evaluation.json" in said


def test_of_the_tokenizers_own_template_and_of_what_no_file_states_nothing_is_said(tmp_path: Path) -> None:
    sampling = {**AS_TRAINED, "chat_template": None}
    unknown = {"tasks": {"gsm8k": {"adapter": RESULT}}, "quantization": "bf16", "num_fewshot": 2, "sampling": sampling}
    assert "judged with" not in words(report.write(fill(tmp_path, evaluation=unknown)).read_text())
    told = "trained with weights BF16, frozen NF4"  # the evaluation itself has it
    fill(tmp_path, evaluation={**unknown, "trained_on": "nf4"})
    assert told in words(report.write(tmp_path).read_text())
    recipe = {"system_prompt": "sum", "chat_template": None, "chat_template_kwargs": {"short": True}}
    (tmp_path / "qerl_state.json").write_text(json.dumps({"quantization": "bf16", "recipe": recipe}))
    (tmp_path / "chat_template.jinja").write_text("{{ t }}")
    for given in (None, "{{ t }}"):  # asked for, or taken over from the run's folder
        fill(tmp_path, evaluation={**unknown, "num_fewshot": 0, "sampling": {**sampling, "chat_template": given}})
        assert "judged with" not in words(report.write(tmp_path).read_text())


def places(picture: str) -> list[int]:
    """How many places each curve of a picture goes through; the lines of its grid have two."""
    curves = re.findall(r'<path d="([^"]*)" clip-path[^>]*style="fill: none', picture)
    return [curve.count("L") + 1 for curve in curves if curve.count("L") > 1]


def test_each_picture_has_the_values_of_its_steps(tmp_path: Path) -> None:
    """Sigma alone keeps its value until the next step, and held-out rewards alone are marked."""
    metrics = [{**step, "rollout_tokens_per_s": 10.0 * step["step"], "train_tokens_per_s": None} for step in STEPS]
    metrics[:5] = [{**step, "train_tokens_per_s": 5.0} for step in metrics[:5]]
    held_out = [{"step": step, "eval/reward": 0.1 * step} for step in range(4)]
    page = report.write(fill(tmp_path, steps=[*metrics, *held_out])).read_text()
    pictures = {re.findall(r">([A-Z][^<]+)</text>", picture)[-1]: picture for picture in page.split("<svg")[1:]}
    assert [title for title in pictures if "<g clip-path" in pictures[title]] == ["Reward on held-out problems"]
    assert {title: places(picture) for title, picture in pictures.items()} == {
        "Reward": [7, 7],  # each step, and their running mean
        "Reward on held-out problems": [4],
        "Entropy (nats per token)": [7, 7],
        "Noise: sigma on the norm weights": [13],
        "Trainer and engine: mean |log p difference|": [7],
        "Tokens per second": [7, 5],  # of rollout and training
    }
    assert plots.running_mean([1, 2, 3, 4, 5, 6, 16]) == [1, 1.5, 2, 2.5, 3, 4, 6.8]


def test_an_interval_is_drawn_from_its_low_to_its_high_end() -> None:
    picture = plots.accuracies("of one", [plots.Accuracy("gsm8k", "base", 0.5, 0.45, 0.8, 10)])

    def lines(colour: str) -> list[list[float]]:
        found = re.findall(rf'd="M (\S+) \S+ \nL (\S+) \S+ \n" clip-path[^>]*stroke: {colour}', picture)
        return [[float(end) for end in ends] for ends in found]

    zero, *_, one = [place for place, _ in lines(plots.GRID)]
    ((low, high),) = lines(plots.INK)
    assert [(end - zero) / (one - zero) for end in (low, high)] == pytest.approx([0.45, 0.8], abs=1e-4)


def test_a_colour_means_the_same_in_every_picture() -> None:
    assert plots.colours(["base", "with adapter"]) == plots.colours(["NVFP4 base", "NVFP4 with adapter"])
    assert plots.colours(["with adapter", "base"]) == plots.colours(["base", "with adapter"])[::-1]
    three = plots.colours(["BF16 base", "NVFP4 base", "NVFP4 with adapter"])
    assert three[1:] == plots.colours(["base", "with adapter"]) and len(set(three)) == 3
    parts = plots.colours(["format", "accuracy", "length"])
    assert len(set(parts)) == 3 and not set(parts) & set(three)
