"""Test what a study refuses before it runs anything: what cannot be judged, and a folder begun otherwise."""

import re
import sys
from pathlib import Path

import pytest

import qerl_recipes.evaluate
from qerl_recipes.files.whole_folder import locked
from qerl_recipes.study import runner
from qerl_recipes.study.plan import StudyError, first_runs, read

pytestmark = pytest.mark.timeout(60)  # a bug that restarts a study forever would never end


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "no_such_task"}, "evaluations.greedy: there is no task 'no_such_task'"),
        ({"tasks": "running_sum", "num_samples": 8}, "evaluations.greedy: num_samples is 8, but temperature 0"),
        ({"tasks": "running_sum", "max_new_token": 8}, "evaluations.greedy: max_new_token: Extra inputs"),
        ({"tasks": "running_sum", "base": "x"}, "evaluations.greedy: base is set by the study itself"),
    ],
)
def test_an_evaluation_that_would_be_refused(options, message, study, tmp_path):
    with pytest.raises(StudyError, match=re.escape(message)):
        runner.run(read(study(evaluations={"greedy": options})), tmp_path / "out")
    with pytest.raises(StudyError, match="--jobs is 0; it must be at least 1"):
        runner.run(read(study()), tmp_path / "out", jobs=0)
    assert not (tmp_path / "out").exists()


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (None, "nothing can be evaluated here"),  # lighteval is missing
        (ConnectionError("no such data set"), "evaluations.greedy cannot be made"),
    ],
)
def test_what_cannot_be_judged_is_not_trained(error, message, study, finish, tmp_path, monkeypatch):
    plan, out = read(study(sweep=None, seeds=[0])), tmp_path / "out"
    if error is None:
        monkeypatch.delattr(qerl_recipes.evaluate, "tasks", raising=False)
        monkeypatch.setitem(sys.modules, "qerl_recipes.evaluate.tasks", None)
    else:
        monkeypatch.setattr("qerl_recipes.evaluate.tasks._definition", lambda *_: fail(error))
    with pytest.raises(StudyError, match=f"{message}.*, so nothing is trained"):
        runner.run(plan, out)
    assert not [path for path in out.iterdir() if path.is_dir()]
    for one in first_runs(plan):
        finish(one, out, 0.5)
    assert runner.run(plan, out)  # every run is finished, so nothing is evaluated


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("model_name_or_path: base\nlora_r: 8\n", "begun with another recipe.yaml: lora_r differ; put them back"),
        ("model_name_or_path: base\n", "another recipe.yaml: lora_r differ"),
        ("# otherwise\nlora_r: 32\nmodel_name_or_path: base\nseed: 7\noutput_dir: elsewhere\n", None),
    ],
)
def test_a_recipe_that_was_changed_since_is_refused(recipe, message, study, finish, claimed, tmp_path):
    """Refuse a changed recipe, since runs of two recipes would mix and the page would not tell."""
    file = study(sweep=None, seeds=[0])
    Path("recipe.yaml").write_text("model_name_or_path: base\nlora_r: 32\n")
    plan, out = read(file), claimed(read(file), tmp_path / "out")
    for one in first_runs(plan):
        finish(one, out, 0.5)
    Path("recipe.yaml").write_text(recipe)
    if message is None:
        assert runner.run(plan, out)
        return
    with pytest.raises(StudyError, match=message):
        runner.run(plan, out)


def test_a_folder_of_another_study_is_left_alone(study, tmp_path, finish, claimed):
    claim = {"claim": "x", "pair": ["b", "a"], "expect": "higher", "margin": 0.01}
    options = {"sweep": None, "claims": [{**claim, "metric": "reward_area"}]}
    plan, out = read(study(**options)), tmp_path / "out"
    claimed(plan, out)
    mark = out / "study.json"
    mark.write_text(mark.read_text().replace("mean_reward", "reward_area"))  # an older version wrote this name
    for one in first_runs(plan):
        finish(one, out, 0.5)
    assert runner.run(plan, out)  # all results exist, so nothing is started
    texts = {"afterwards": {"claims": [claim]}, "about": "it", "question": "what?"}  # these are no part of the plan
    assert runner.run(read(study(**options, **texts)), out)
    with pytest.raises(StudyError, match="holds another study: target_reward differ"):
        runner.run(read(study(**options, target_reward=0.7)), out)
    mark.unlink()
    with pytest.raises(StudyError, match="is not empty and holds no study"):
        runner.run(plan, out)
    assert not mark.exists()


def test_two_studies_never_work_in_one_folder(study, claimed, tmp_path):
    plan = read(study(sweep=None, seeds=[0]))
    with locked(claimed(plan, tmp_path / "out")), pytest.raises(StudyError, match="another `qerl study` is at work in"):
        runner.run(plan, tmp_path / "out")
