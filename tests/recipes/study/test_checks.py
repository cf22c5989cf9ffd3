"""What a study is refused for before any of its runs begins."""

import re
import sys
from pathlib import Path

import pytest

import qerl_recipes.evaluate
from qerl_recipes.study import run as runner
from qerl_recipes.study.plan import StudyError, first_runs, read


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "no_such_task"}, "evaluations.greedy: there is no task 'no_such_task'"),
        ({"tasks": "running_sum", "num_samples": 8}, "evaluations.greedy: num_samples is 8, but temperature 0"),
        ({"tasks": "running_sum", "max_new_token": 8}, "evaluations.greedy: max_new_token: Extra inputs"),
        ({"tasks": "running_sum", "kv_cache_memory_bytes": "4e9"}, "evaluations.greedy: kv_cache_memory_bytes: "),
        ({"tasks": "running_sum", "adapter_only": True}, "evaluations.greedy: adapter_only is set by the study"),
    ],
)
def test_an_evaluation_that_would_be_refused_is_refused_before_anything_is_trained(options, message, study, tmp_path):
    with pytest.raises(StudyError, match=re.escape(message)):
        runner.run(read(study(evaluations={"greedy": options})), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def without_lighteval(patch):
    patch.delattr(qerl_recipes.evaluate, "tasks", raising=False)
    patch.setitem(sys.modules, "qerl_recipes.evaluate.tasks", None)


def without_its_data(patch):
    def load(*_):
        raise ConnectionError("no such data set")

    patch.setattr("qerl_recipes.evaluate.tasks._load", load)


@pytest.mark.parametrize(
    ("broken", "message"),
    [(without_lighteval, "nothing can be evaluated here"), (without_its_data, "evaluations.greedy cannot be made")],
)
def test_what_cannot_be_judged_here_is_not_trained(broken, message, study, finish, tmp_path, monkeypatch):
    """lighteval looks for its packages only as it is imported, and a training may take hours."""
    plan, out = read(study(sweep=None, seeds=[0])), tmp_path / "out"
    broken(monkeypatch)
    with pytest.raises(StudyError, match=f"{message}.*, so nothing is trained"):
        runner.run(plan, out)
    assert not out.exists()
    for one in first_runs(plan):
        finish(one, out, 0.5)
    (out / "study.json").write_text(plan.model_dump_json())
    assert runner.run(plan, out)  # nothing is left to be judged


@pytest.mark.parametrize(
    ("recipe", "refused"),
    [
        ("model_name_or_path: base\nlora_r: 8\n", "lora_r"),
        ("model_name_or_path: other\nlora_r: 32\n", "model_name_or_path"),
        ("model_name_or_path: base\n", "lora_r"),
        ("# said otherwise\nlora_r: 32\nmodel_name_or_path: base\nseed: 7\noutput_dir: elsewhere\n", None),
    ],
)
def test_a_recipe_that_was_changed_since_the_first_runs_is_refused(recipe, refused, study, finish, tmp_path):
    """Half of the runs would be of one recipe and half of another, and the page would not tell."""
    plan, out = read(study(sweep=None, seeds=[0])), tmp_path / "out"
    Path("recipe.yaml").write_text("model_name_or_path: base\nlora_r: 32\n")
    out.mkdir()
    runner._claim(plan, out)
    for one in first_runs(plan):
        finish(one, out, 0.5)
    Path("recipe.yaml").write_text(recipe)
    if refused is None:
        assert runner.run(plan, out)
        return
    with pytest.raises(StudyError, match=f"begun with another recipe.yaml: {refused} differ; put them back"):
        runner.run(plan, out)


def test_a_folder_that_does_not_say_its_recipe_is_gone_on_with(study, finish, tmp_path):
    plan, out = read(study(sweep=None, seeds=[0])), tmp_path / "out"
    for one in first_runs(plan):
        finish(one, out, 0.5)
    (out / "study.json").write_text(plan.model_dump_json())
    assert runner.run(plan, out)
