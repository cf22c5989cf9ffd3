"""Test ``qerl report``: it writes one self-contained page of whatever a folder holds, and clear errors otherwise."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qerl_recipes.evaluate import report
from qerl_recipes.evaluate.figures import too_many_cut
from qerl_recipes.evaluate.run import table
from qerl_recipes.files.adapter import open_adapter

STEPS = [
    {"step": step, "reward": 0.1 * step, "entropy": 1 / step, "sigma": 1e-2, "logp_diff_mean": 1e-3}
    for step in range(1, 8)
]
RESULT = {"accuracy": 0.5, "n": 100, "ci95": [0.4038, 0.5962], "ended": 1.0}
BASE = {"tasks": {"gsm8k": {"base": RESULT}}}
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
        "noise_mode": "shared",  # this is the key's former name
        "sigma_start": 0.01,
        "sigma_end": 0.0001,
        "num_stages": 10,
    },
}


def page_of(folder: Path, *, steps: list[dict[str, Any]] | None = None, evaluation: object = None) -> str:
    """Write these steps and this evaluation to a folder and return its page."""
    if steps is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    if evaluation is not None:
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return report.write(folder).read_text()


def words(page: str) -> str:
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page.partition("<body>")[2]).split()))


def text_of(folder: Path, **content: Any) -> str:
    return words(page_of(folder, **content))


def test_the_page_needs_no_network_and_holds_every_picture(tmp_path: Path) -> None:
    evaluation = {"tasks": {"<b>task</b>": {"base": RESULT, "adapter": RESULT}}, "note": "<i>x</i>"}
    steps = [*STEPS, {"step": 8, "reward": None}, {"step": 9, "reward": float("nan"), "entropy": 0.1}]
    page = page_of(tmp_path, steps=steps, evaluation=evaluation)
    assert page.count("<svg") >= 5
    assert not re.search(r'(src|href)="(?!#|data:)', page), "a picture or a style from elsewhere"
    assert "<script" not in page and ">nan<" not in page
    assert "<b>task</b>" not in page and "<i>x</i>" not in page
    for text in ("Reward", "Entropy", "sigma", "50.0", "40.4", "59.6"):
        assert text in page, text


def test_a_folder_with_only_one_half_has_a_report(tmp_path: Path) -> None:
    for name in ("metrics", "evaluation"):
        (tmp_path / name).mkdir()
    assert "first 1 steps last 1 steps" in text_of(tmp_path / "metrics", steps=STEPS[:1])
    page = page_of(tmp_path / "evaluation", evaluation=BASE)
    assert "<svg" in page and "Nothing trained here" in page


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", "{\n", r"metrics\.jsonl, line 1 is no JSON"),
        ("evaluation.json", "{", r"evaluation\.json is damaged"),
        ("evaluation.json", '{"tasks": {"x": {"base": {"accuracy": 1}}}}', r"evaluation\.json does not hold"),
        ("mine.txt", "", r"qerl train --config[\s\S]*qerl evaluate"),
    ],
)
def test_a_damaged_file_is_named_and_the_old_page_stays(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        report.write(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    with pytest.raises(ValueError, match="there is no folder"):
        report.write(tmp_path / "nowhere")


def test_first_and_last_steps_are_steps_not_values(tmp_path: Path) -> None:
    """Check a rollout for four steps, which is scored once: the first five steps then have two rewards, not five."""
    steps = [{"step": i, "entropy": i, **({"reward": i / 10} if i % 4 == 1 else {})} for i in range(1, 21)]
    del steps[-4]["reward"]
    # The first steps' mean is (0.1 + 0.5) / 2, and the last steps have no reward.
    assert "reward 0.300 entropy, nats per token 3.0000 18.0000" in text_of(tmp_path, steps=steps)
    steps[-4] = {**steps[-4], "reward": 1.7}
    assert "reward 0.300 1.700" in text_of(tmp_path, steps=steps)


def test_figures_of_another_adapter_are_marked(save_adapter: Callable[..., Path], tmp_path: Path) -> None:
    judged = open_adapter(save_adapter(tmp_path / "adapter", 1)).sha256()
    evaluation, warning = {**BASE, "adapter_sha256": judged}, "of another adapter than the one that lies here now"
    assert warning not in page_of(tmp_path, evaluation=evaluation)
    save_adapter(tmp_path / "adapter", 2)  # training went on
    assert warning in page_of(tmp_path)
    # an evaluation of the base alone
    assert warning not in page_of(tmp_path, evaluation={**evaluation, "adapter_sha256": None})


def test_held_out_rewards_have_pictures_and_no_noise_none(tmp_path: Path) -> None:
    steps = [{**step, "sigma": 0.0, "rewards/format/mean": 0.5, "rewards/accuracy/mean": 0.1} for step in STEPS]
    held_out = [{"step": step, "eval/problems": 8, "eval/reward": 0.1 * step} for step in (0, 4)]
    page = page_of(tmp_path, steps=[held_out[0], *steps[:4], held_out[1], *steps[4:]])
    assert "7 steps" in page, "an evaluation was counted as a step"
    assert "Reward on held-out problems" in page and "Parts of the reward" in page
    assert "Noise: sigma" not in page
    page = page_of(tmp_path, steps=STEPS)
    assert "Noise: sigma" in page and "Parts of the reward" not in page


@pytest.mark.parametrize(
    ("ended", "longest", "rooms", "line"),
    [
        ({"base": 0.9, "adapter": 0.95}, 64, None, None),  # exactly a tenth is not more than a tenth
        (
            {"base": 1.0, "adapter": 0.21},
            64,
            None,
            "0% (base) and 79% (adapter) of the answers were cut at max_new_tokens=64",
        ),
        ({"adapter": 0.21}, None, None, "79% (adapter) of the answers were cut at max_model_length=128; "),
        (
            {"adapter": 0.21},
            64,
            [64, 100],
            "cut at max_new_tokens=64; accuracy counts what they had written; raise max_n",
        ),
        (
            {"adapter": 0.21},
            64,
            [20, 63],
            "cut at max_model_length=128; accuracy counts what they had written; raise max_m",
        ),
        (
            {"adapter": 0.21},
            64,
            [20, 100],
            "at max_new_tokens=64 or max_model_length=128; accuracy counts what they had written; raise max_new_tokens "
            "and max_model_length, or",
        ),
    ],
)
def test_more_than_a_tenth_of_cut_answers_is_named(ended, longest, rooms, line) -> None:
    room = {} if rooms is None else {"room_of_cut": rooms}  # a file of an earlier release has none
    tasks = {"x": {label: {"ended": share, **room} for label, share in ended.items()}, "y": {"base": {"ended": 1.0}}}
    found = too_many_cut({"tasks": tasks, "max_new_tokens": {"x": longest, "y": 1}, "max_model_length": 128})
    assert found == [] if line is None else (len(found) == 1 and found[0].startswith("x: ") and line in found[0])


def test_a_run_whose_last_completions_were_cut_says_so(tmp_path: Path) -> None:
    (tmp_path / "qerl_state.json").write_text(json.dumps({**STATE, "recipe": {"max_completion_length": 112}}))

    def text(*clipped: float | None) -> str:
        values = [{} if share is None else {"completion_clipped": share} for share in clipped]
        return text_of(tmp_path, steps=[{"step": i, "reward": 0.5, **value} for i, value in enumerate(values, start=1)])

    cut = text(1.0, 1.0, 0.0, 0.1, None, 0.2, 0.1, 0.1)  # a rollout for two steps has one share
    assert "completions cut at the limit of length 52.5% 12.5%" in cut
    assert "In the last steps 12% of the completions were cut at max_completion_length=112; rewards are of what" in cut
    assert "In the last steps" not in text(1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1), "a tenth is not more than a tenth"


def test_what_was_judged_otherwise_than_trained_is_named(tmp_path: Path) -> None:
    heading = "These figures were not made as the run was trained"
    assert heading not in text_of(tmp_path, evaluation=BASE)
    unlike = ["weights bf16, there qerl_nvfp4", "no chat template"]
    text = text_of(tmp_path, evaluation={**BASE, "not_as_in_training": unlike})
    assert f"{heading}: weights bf16, there qerl_nvfp4; no chat template. From evaluation.json" in text


def test_figures_under_noise_say_so(tmp_path: Path) -> None:
    how = {"sampling": {"temperature": 0.0}, "quantization": "bf16", "max_new_tokens": {"gsm8k": 56}}
    evaluation = {**BASE, **how, "noise_sigma": 0.05}
    assert "greedy, noise sigma 0.05, at most 56 tokens" in text_of(tmp_path, evaluation=evaluation)
    assert table(evaluation).title == "accuracy, 95 % interval (bf16, greedy, noise sigma 0.05)"
    assert table({**evaluation, "noise_sigma": 0.0}).title == "accuracy, 95 % interval (bf16, greedy)"
