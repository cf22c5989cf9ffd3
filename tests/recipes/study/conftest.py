"""Make a study file and the results of its runs, without running any."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import save_file

from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.study import runner
from qerl_recipes.study.inventory import COLUMNS
from qerl_vllm_plugin.adapter.folder import base_hash

CONTENT = {
    "recipe": "recipe.yaml",
    "arms": {"a": {"quantization": "bf16"}, "b": {"quantization": "qerl_nvfp4"}},
    "seeds": [0, 1, 2],
    "sweep": {"key": "learning_rate", "values": [1e-4, 1e-3], "seeds": [100, 101], "common": 1e-3},
    "evaluations": {"greedy": {"tasks": "running_sum"}},
    "primary": "greedy",
    "comparisons": [["b", "a"]],
    "target_reward": 0.5,
}


def table_of(rows):
    """Make a table from rows (arm, seed, step, metric, value)."""
    return pd.DataFrame(rows, columns=COLUMNS).astype({"value": float})


@pytest.fixture
def rows_table():
    return table_of


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Return study(**changes), which writes a study file in the current folder and gives its path."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("model_name_or_path: base\n")

    def write(**changes):
        content = {key: value for key, value in {**CONTENT, **changes}.items() if value is not None}
        Path("study.yaml").write_text(yaml.safe_dump(content))
        return Path("study.yaml")

    return write


@pytest.fixture
def make_base():
    """Return make_base(value), which writes a checkpoint with other weights and gives its name in a table."""

    def make(value):
        Path("base").mkdir(exist_ok=True)
        Path("base/config.json").write_text("{}")
        save_file({"w": torch.full((4,), float(value))}, "base/model.safetensors")
        return base_hash("base")[:12]

    return make


@pytest.fixture
def claimed():
    """Return claimed(plan, folder), which makes the folder as a beginning study leaves it."""

    def begin(plan, folder):
        folder.mkdir()
        runner._claim(plan, folder)
        return folder

    return begin


@pytest.fixture
def finish():
    """Return finish(run, folder, accuracy, rewards), which writes what `qerl train` and `qerl evaluate` leave
    of a run; with ``calls`` its policy has called tools, half of the time in vain.
    """

    def leave(run, folder, accuracy, rewards=(0.0, 1.0), problems=None, calls=None):
        of = folder / run.folder
        (of / "evaluation" / "greedy").mkdir(parents=True, exist_ok=True)
        of_step = {"entropy": 1.0, "step_seconds": 2.0, "equal_groups": 0.25, "kept": True, "mode": "rollout"}
        lines = [{"step": i + 1, "reward": r, **of_step} for i, r in enumerate(rewards)]
        lines.insert(1, {"step": 1, "eval/reward": 9.0})  # an evaluation on held-out problems during training
        (of / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if Path("base/config.json").is_file():
            (of / "adapter").mkdir(exist_ok=True)
            (of / "adapter/qerl_state.json").write_text(json.dumps({"base_hash": base_hash("base")}))
        task = {"base": {"accuracy": 0.1}, "adapter": {"accuracy": accuracy}}
        if calls is not None:
            task["base"] |= {"calls": 0.25, "failures": 0.125}
            task["adapter"] |= {"calls": calls, "failures": calls / 2}
        result = {"tasks": {"running_sum": task}, "problems_sha256": {"running_sum": problems} if problems else {}}
        # Write this last and as a whole, as `qerl evaluate` does, since a running study reads it as soon as it exists.
        write_text(of / "evaluation" / "greedy" / "evaluation.json", json.dumps(result))

    return leave
