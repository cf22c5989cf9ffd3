"""Test how much of an adapter's gain survives a merge: four policies answer the same problems, asked as in training."""

import json

import pytest
from typer.testing import CliRunner

from qerl_recipes import cli
from qerl_recipes.evaluate import merge_eval
from qerl_recipes.evaluate import run as evaluation
from qerl_recipes.files import run_state


@pytest.mark.integration
def test_an_adapters_own_answers_survive_a_merge_in_part(
    make_nvfp4, save_adapter, tmp_path, capfd, monkeypatch, light_engines
):
    """Take the adapter's own answers as right. It then scores 100 %, and a merge loses whatever it changes."""
    base = make_nvfp4("qwen2")
    recipe = {"max_completion_length": 5, "dtype": "float32"}
    state = {"base": str(base), "base_hash": run_state.base_hash(base), "quantization": "qerl_nvfp4", "recipe": recipe}
    adapter = save_adapter(tmp_path / "adapter", seed=1, **state)
    task = tmp_path / "own.jsonl"
    lines = [{"prompt": f"{a}+{b}=", "answer": "none"} for a in range(1, 10) for b in range(1, 9)]
    task.write_text("\n".join(map(json.dumps, lines)))
    evaluation.evaluate(str(base), str(adapter), [f"jsonl-exact:{task}"], output_dir=tmp_path / "own", quiet=True)
    given = [json.loads(line) for line in (tmp_path / "own/answers.jsonl").read_text().splitlines()]
    own = [{"prompt": g["prompt"], "answer": g["answers"][0]} for g in given if g["model"] == "adapter"]
    own = [line for line in own if line["answer"].strip()]
    task.write_text("\n".join(map(json.dumps, own)))

    options = ["--merge", "--evaluate", f"jsonl-exact:{task}", "--max_samples", "24"]
    monkeypatch.setenv("COLUMNS", "200")
    cli.app(["export", str(adapter), str(tmp_path / "m"), *options], standalone_mode=False)
    printed = capfd.readouterr().out
    record = json.loads((tmp_path / "m" / merge_eval.RESULT).read_text())
    by_name = {policy["policy"]: policy for policy in record["policies"]}
    assert (record["n"], record["arm"]) == (24, "qerl_nvfp4")
    assert by_name["adapter"]["accuracy"] == 1.0 and by_name["base"]["accuracy"] < 0.5
    gain = 1 - by_name["base"]["accuracy"]
    for name in ("merged, BF16", "merged, NVFP4 again"):
        left = by_name[name]["accuracy"] - by_name["base"]["accuracy"]
        assert by_name[name]["survives"] == pytest.approx(left / gain)
        assert f"{by_name[name]['survives']:.0%}" in printed
    # Rounding to 16 bits changes little, and rounding to 4 bits more.
    assert by_name["merged, BF16"]["survives"] > 0.7 > by_name["merged, NVFP4 again"]["survives"]
    asked = json.loads((tmp_path / "m/survival/bf16/evaluation.json").read_text())
    assert asked["max_new_tokens"] == {f"jsonl-exact:{task}": 5} and asked["dtype"] == "float32"


@pytest.mark.parametrize(("of_adapter", "shares"), [(0.75, [0.8, -0.2]), (0.25, [None, None])])
def test_what_survives_is_a_share_of_the_gain_over_the_base(of_adapter, shares, monkeypatch, tmp_path):
    """Let the base score 0.25: then 0.65 is four fifths of the gain to 0.75, and 0.15 is a loss."""
    calls, prompts = [], dict.fromkeys(merge_eval.PROMPTS, "as trained")
    settings = {"max_model_length": 64, "dtype": "float16"}

    def evaluate(model, adapter, tasks, **options):
        calls.append(options)
        of_base = {"bf16": 0.65, "qerl_nvfp4": 0.15}.get(options.get("quantization"), 0.25)
        accuracies = {"base": of_base, "adapter": of_adapter}
        figures = {"ci95": [0.0, 1.0], "n": 40, "ended": 1.0}
        judged = {name: {"accuracy": share, **figures} for name, share in accuracies.items()}
        more = {"sampling": prompts, "max_new_tokens": {"sums": 7}, "quantization": "the arm"}
        return {"tasks": {"sums": judged}, **settings, **more}

    monkeypatch.setattr(merge_eval, "evaluate", evaluate)
    merge_eval.measure("adapter", tmp_path, "sums", base="base", max_samples=40, seed=3)
    found = json.loads((tmp_path / merge_eval.RESULT).read_text())["policies"]
    assert [policy["survives"] for policy in found[2:]] == pytest.approx(shares)
    asked = {**prompts, **settings, "max_new_tokens": 7, "max_samples": 40, "seed": 3}
    assert len(calls) == 3 and all(asked.items() <= of_merged.items() for of_merged in calls[1:])


def test_measuring_needs_a_merge_and_a_task_that_exists(tmp_path):
    def call(*options):
        return CliRunner(env={"COLUMNS": "400"}).invoke(
            cli.app, ["export", str(tmp_path), str(tmp_path / "out"), *options]
        )

    assert "add --merge" in call("--evaluate", "running_sum").output
    assert "--max_samples is of --evaluate" in call("--merge", "--max_samples", "3").output
    assert "--gpu_memory_utilization is of --evaluate" in call("--merge", "--gpu_memory_utilization", "0.9").output
    assert "no task 'sums'" in str(call("--merge", "--evaluate", "sums").exception)
    acts = call("--merge", "--evaluate", "environment:higher_lower")
    assert "which a merged checkpoint has not; name a task without episodes" in str(acts.exception)
    assert "--measure is the former name" in call("--merge", "--measure", "sums", "--evaluate", "sums").output
    with pytest.warns(FutureWarning, match="--measure is called --evaluate now"):
        assert "no task 'sums'" in str(call("--merge", "--measure", "sums").exception)
    assert not (tmp_path / "out").exists()
