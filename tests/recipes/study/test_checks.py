"""What a study is refused for before any of its runs begins."""

import json
import re
import sys
from pathlib import Path

import pytest

import qerl_recipes.evaluate
from qerl_recipes.study import results, table
from qerl_recipes.study import run as runner
from qerl_recipes.study.check import check_evaluations, check_tasks, with_list
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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 1, "save_steps": 30}, "save_steps: 30 does not"),
        ({"noise_mode": "rollout", "sigma_start": 0.1, "sigma_end": 1e-3, "noise_schedule": "up"}, "noise_schedule: "),
        ({"temperature": 0.0}, "temperature must be at least"),
        ({"top_p": 1.5}, "vLLM takes no such SamplingParams"),
        ({"use_peft": False}, "use_peft"),
        ({"generation_kwargs": {"seed": 1}}, "generation_kwargs cannot set seed"),
    ],
)
def test_an_arm_that_its_training_would_refuse_is_refused_before_any_other_is_trained(keys, message, study, tmp_path):
    arms = {"a": {"quantization": "bf16"}, "b": {"quantization": "qerl_nvfp4", **keys}}
    with pytest.raises(StudyError, match=f"arms.b: this recipe cannot run: .*{message}"):
        runner.run(read(study(arms=arms)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["base", "adapter", "quantization", "output_dir", "adapter_only", "quiet"])
def test_what_the_study_sets_in_every_evaluation_cannot_be_set_in_one(option, study):
    with pytest.raises(StudyError, match=f"evaluations.greedy: {option} is set by the study itself"):
        check_evaluations(read(study(evaluations={"greedy": {"tasks": "running_sum", option: "x"}})))


def test_tasks_may_be_one_text_with_commas_and_spaces():
    assert with_list({"tasks": "amc23 , running_sum", "seed": 1}) == {"tasks": ["amc23", "running_sum"], "seed": 1}


def test_the_problems_of_every_evaluation_are_looked_at_as_far_as_they_will_be_asked(study):
    # lighteval shuffles them, always alike: the second is the one that is asked
    lines = [{"prompt": "a colour", "answer": "blue"}, {"prompt": "2 + 2", "answer": "4"}]
    Path("held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    second = {"tasks": "jsonl-number:held_out.jsonl"}
    check_tasks(read(study(evaluations={"greedy": {"tasks": "running_sum"}, "second": {**second, "max_samples": 1}})))
    with pytest.raises(StudyError, match=r"evaluations.second cannot be made here, .*'blue'.* be read as a number"):
        check_tasks(read(study(evaluations={"greedy": {"tasks": "running_sum"}, "second": second})))


def cannot(error):
    raise error


def without_lighteval(patch):
    patch.delattr(qerl_recipes.evaluate, "tasks", raising=False)
    patch.setitem(sys.modules, "qerl_recipes.evaluate.tasks", None)


def without_its_data(patch):
    patch.setattr("qerl_recipes.evaluate.tasks._load", lambda *_: cannot(ConnectionError("no such data set")))


def without_a_package_of_its_judge(patch):
    patch.setattr("qerl_recipes.evaluate.tasks._load", lambda *_: cannot(ImportError("no such package")))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (without_lighteval, "nothing can be evaluated here"),
        (without_its_data, "evaluations.greedy cannot be made"),
        (without_a_package_of_its_judge, "evaluations.greedy cannot be made"),
    ],
)
def test_what_cannot_be_judged_here_is_not_trained(broken, message, study, finish, tmp_path, monkeypatch):
    """lighteval looks for its packages only as it is imported, and a training may take hours."""
    plan, out = read(study(sweep=None, seeds=[0])), tmp_path / "out"
    broken(monkeypatch)
    with pytest.raises(StudyError, match=f"{message}.*, so nothing is trained"):
        runner.run(plan, out)
    assert not [path for path in out.iterdir() if path.is_dir()]
    for one in first_runs(plan):
        finish(one, out, 0.5)
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
    assert not [metric for *_, metric, _ in results.collect(plan, out) if metric.startswith(table.PLAN)]
