"""Test how much of an adapter's gain survives a merge: four policies answer the same problems, asked as in training."""

import json
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("of_adapter", "shares", "printed"),
    [(0.75, [0.8, -0.2], ["80%", "-20%"]), (0.25, [None, None], ["no gain"] * 2), (0.2, [None, None], ["no gain"] * 2)],
)
def test_what_survives_is_a_share_of_the_gain_over_the_base(of_adapter, shares, printed, monkeypatch, tmp_path, capfd):
    """Let the base score 0.25: then 0.65 is four fifths of the gain to 0.75, and 0.15 is a loss."""
    calls = []
    sampling = {"system_prompt": "sum", "chat_template": "t", "chat_template_kwargs": {}, "use_chat_template": True}
    sampling |= {"generation_kwargs": {"stop": ["8"]}}
    length = {"max_model_length": 64, "dtype": "float16"}

    def evaluate(model, adapter, tasks, *, output_dir, **options):
        calls.append((model, adapter, tasks, str(output_dir.relative_to(tmp_path)), options))
        of_base = {"bf16": 0.65, "qerl_nvfp4": 0.15}.get(options.get("quantization"), 0.25)
        judged = {
            name: {"accuracy": share, "ci95": [share - 0.1, share + 0.1], "n": 40, "ended": 1 - share}
            for name, share in (("base", of_base), ("adapter", of_adapter))
        }
        more = {"max_new_tokens": {"sums": 7}, "quantization": "the arm", **length}
        return {"tasks": {"sums": judged}, "sampling": {**sampling, "temperature": 0.0}, **more}

    monkeypatch.setattr(merge_eval, "evaluate", evaluate)
    monkeypatch.setattr(merge_eval, "open_adapter", lambda folder: SimpleNamespace(base="trained on"))
    monkeypatch.setenv("COLUMNS", "200")
    merge_eval.measure("adapter", tmp_path, "sums", max_samples=40, seed=3)
    lines = [line for line in capfd.readouterr().out.splitlines() if "merged" in line]
    assert [text in line for text, line in zip(printed, lines, strict=True)] == [True, True]
    assert "35%" in lines[0] and "85%" in lines[1]
    record = json.loads((tmp_path / "survival.json").read_text())
    policies = record.pop("policies")
    assert record == {"task": "sums", "n": 40, "arm": "the arm"}
    assert [policy["policy"] for policy in policies] == ["base", "adapter", "merged, BF16", "merged, NVFP4 again"]
    assert [policy["accuracy"] for policy in policies] == [0.25, of_adapter, 0.65, 0.15]
    assert [policy["survives"] for policy in policies[:2]] == [None, None]
    assert [policy["survives"] for policy in policies[2:]] == pytest.approx(shares)
    assert policies[2]["ci95"] == pytest.approx([0.55, 0.75])
    assert [policy["ended"] for policy in policies] == pytest.approx([0.75, 1 - of_adapter, 0.35, 0.85])

    common = {"max_samples": 40, "quiet": True, "seed": 3}
    merged = {**common, **sampling, **length, "max_new_tokens": 7}
    assert calls == [
        ("trained on", "adapter", ["sums"], "survival/adapter", common),
        (str(tmp_path), None, ["sums"], "survival/bf16", {**merged, "quantization": "bf16"}),
        (str(tmp_path), None, ["sums"], "survival/qerl_nvfp4", {**merged, "quantization": "qerl_nvfp4"}),
    ]
    merge_eval.measure("adapter", tmp_path, "sums", base="lies here now")
    assert calls[3][0] == "lies here now"


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
