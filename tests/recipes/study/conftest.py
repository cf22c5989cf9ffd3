"""A study file, and what its runs leave behind, without running any."""

import json
from pathlib import Path

import pytest
import yaml

from qerl_recipes.files.whole_folder import write_text

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


@pytest.fixture
def study(tmp_path, monkeypatch):
    """study(**changes) -> the path of a study file, in the folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("model_name_or_path: base\n")

    def write(**changes):
        content = {key: value for key, value in {**CONTENT, **changes}.items() if value is not None}
        Path("study.yaml").write_text(yaml.safe_dump(content))
        return Path("study.yaml")

    return write


@pytest.fixture
def finish():
    """finish(run, folder, accuracy, rewards): what `qerl train` and `qerl evaluate` leave behind of a run."""

    def leave(one, folder, accuracy, rewards=(0.0, 1.0)):
        of = folder / one.folder
        (of / "evaluation" / "greedy").mkdir(parents=True)
        task = {"base": {"accuracy": 0.1}, "adapter": {"accuracy": accuracy}}
        lines = [{"step": i + 1, "reward": r, "entropy": 1.0, "step_seconds": 2.0} for i, r in enumerate(rewards)]
        lines.insert(1, {"step": 1, "eval/reward": 9.0})  # an evaluation on held-out problems while training
        (of / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        # last and whole, as `qerl evaluate` does: a study that runs reads it as soon as it is there
        write_text(of / "evaluation" / "greedy" / "evaluation.json", json.dumps({"tasks": {"running_sum": task}}))

    return leave
