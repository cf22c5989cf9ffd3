"""Test that stock TRL trains by the same settings, refuses what it would ignore, and leaves what a study judges."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import trl
import yaml
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.study.inventory import read_table
from qerl_recipes.train import stock_trl
from qerl_vllm_plugin.wire.safetensors_file import read_header

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "recipes/demo/grpo/bf16_lora.yaml")
OWN = {"save_strategy", "logging_strategy", "logging_steps", "model_init_kwargs"}


def test_every_setting_that_trl_has_is_the_recipes() -> None:
    flags = ["--temperature", "0.7", "--epsilon_high", "0.3", "--per_device_train_batch_size", "32"]
    _, training, model = parse(["--config", RECIPE, *flags, "--gradient_accumulation_steps", "4", "--use_cpu", "true"])
    config = stock_trl.config(training, model)
    shared = [field.name for field in fields(trl.GRPOConfig) if field.init and field.name not in OWN]
    assert {name: getattr(config, name) for name in shared} == {name: getattr(training, name) for name in shared}
    assert (config.temperature, config.epsilon_high, config.gradient_accumulation_steps) == (0.7, 0.3, 4)
    assert (config.vllm_importance_sampling_mode, config.vllm_importance_sampling_clip_max) == ("token_truncate", 2.0)
    assert config.model_init_kwargs["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("quantization", "qerl_nvfp4"), ("noise_mode", "engine"), ("dynamic_sampling", "true")),
        *(("train_norms", "true"), ("push_to_hub", "true")),
    ],
)
def test_what_stock_trl_would_ignore_is_refused_by_name(key: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{key}: .* is not for stock TRL"):
        stock_trl.main(["--config", RECIPE, f"--{key}", value, "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_what_was_trained_is_not_trained_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="model is there; name another one"):
        stock_trl.main(["--config", RECIPE, "--output_dir", str(tmp_path)], all_weights=True)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_compares_stock_trl_with_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, judge and tabulate each kind of arm on the demo; all weights at a rate that changes what is answered."""
    monkeypatch.chdir(ROOT)
    keys = {"quantization": "bf16", "max_steps": 3}
    plan = {
        "recipe": "recipes/demo/grpo/bf16_lora.yaml",
        "arms": {
            "ours": keys,
            "stock": {**keys, "trainer": "trl"},
            "whole": {**keys, "trainer": "trl_all_weights", "dtype": "float32", "bf16": False, "learning_rate": 1e-5},
        },
        "seeds": [0],
        "evaluations": {"greedy": {"tasks": "running_sum", "max_samples": 64}},
        "primary": "greedy",
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    done = CliRunner().invoke(app, ["study", str(tmp_path / "plan.yaml"), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    figures = {}
    for arm in plan["arms"]:
        folder = tmp_path / "out" / arm / "seed-0"
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert all(step["step_seconds"] > 0 and step["completion_length"] > 0 for step in steps)
        figures[arm] = [step["reward"] for step in steps]
        assert (folder / ("model" if arm == "whole" else "adapter") / "qerl_state.json").is_file()
        if arm == "whole":  # nothing is rounded between trainer, engine and what is judged
            assert all(step["logp_diff_mean"] < 1e-4 for step in steps)
            header = read_header(folder / "model/model.safetensors")
            assert {tensor.dtype for tensor in header.values()} == {"F32"}
    for stock in ("stock", "whole"):  # the start is the same, the draws are not
        assert figures[stock][0] == pytest.approx(figures["ours"][0], abs=0.15)
    rows = read_table(tmp_path / "out/results.csv.gz")
    assert set(rows.arm[rows.metric == "accuracy"]) == set(plan["arms"])
    assert set(rows.arm[rows.metric == "base_accuracy"]) == {"ours", "stock"}
