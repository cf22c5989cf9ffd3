"""``qerl report``: one page with everything in it, of whatever a folder holds, and clear errors for the rest."""

import json
import re
from pathlib import Path

import pytest

from qerl_recipes import report

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
    assert "<svg" in report.write(tmp_path).read_text()


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
        ("metrics.jsonl", "{\n", r"metrics\.jsonl, line 1 is not JSON"),
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
    with pytest.raises(report.ReportError, match=message):
        report.write(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_folder_with_nothing_to_report_names_the_commands_that_make_it(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match=r"qerl train --config[\s\S]*qerl evaluate"):
        report.write(tmp_path)
    with pytest.raises(report.ReportError, match="there is no folder"):
        report.write(tmp_path / "nowhere")
