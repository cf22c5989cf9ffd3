"""A study: what its file may say, which runs follow, what is done again, and the numbers of its page."""

import gzip
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.evaluate.request import check as check_tasks
from qerl_recipes.study import outline, results
from qerl_recipes.study import run as runner
from qerl_recipes.study.conduct import conduct
from qerl_recipes.study.plan import StudyError, best_values, first_runs, later_runs, read
from qerl_recipes.study.statistics import holm, judged, paired

ROOT = Path(__file__).parents[3]
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

LARGER = {"claim": "a larger rate suits b", "expect": "higher", "margin": 0.01, "metric": "sweep_gain"}


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


def finish(one, folder, accuracy, rewards=(0.0, 1.0)):
    """What `qerl train` and `qerl evaluate` leave behind of a run."""
    of = folder / one.folder
    (of / "evaluation" / "greedy").mkdir(parents=True)
    task = {"base": {"accuracy": 0.1}, "adapter": {"accuracy": accuracy}}
    (of / "evaluation" / "greedy" / "evaluation.json").write_text(json.dumps({"tasks": {"running_sum": task}}))
    lines = [{"step": i + 1, "reward": r, "entropy": 1.0, "step_seconds": 2.0} for i, r in enumerate(rewards)]
    lines.insert(1, {"step": 1, "eval/reward": 9.0})  # an evaluation on held-out problems while training
    (of / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {"a": {}}}, "at least two"),
        ({"arms": {"a": {"seed": 1}, "b": {}}}, "arms.a: seed is set by the study"),
        ({"arms": {"a": {"learning_rate": 1e-3}, "b": {}}}, "arms.a: learning_rate is set by the study"),
        ({"arms": {"../a": {}, "b": {}}}, "becomes a folder's name"),
        ({"comparisons": [["a", "c"]]}, "'c' is not one of the arms a, b"),
        ({"claims": [{"claim": "x", "pair": ["a", "c"], "expect": "higher", "margin": 1}]}, "claims: 'c' is not one"),
        ({"claims": [{"claim": "x", "pair": ["a", "b"], "expect": "higher", "margin": 0}]}, "claims.0.margin"),
        ({"sweep": None, "claims": [{**LARGER, "pair": ["b", "a"]}]}, "the metric sweep_gain needs a sweep"),
        ({"primary": "sampled"}, "'sampled' is not one of the evaluations greedy"),
        ({"seeds": [0, 0]}, "each may stand there once"),
        ({"seeds": [0, 100]}, "not be chosen on the seeds that are compared"),
        ({"sweep": {**CONTENT["sweep"], "common": 1.0}}, "1.0 is not one of the values"),
        ({"arm": {}}, "arm: Extra inputs are not permitted"),
        ({"recipe": "nowhere.yaml"}, "recipe nowhere.yaml does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_study_that_cannot_be_run_is_refused_by_its_key(changes, message, study):
    with pytest.raises(StudyError, match=message):
        read(study(**changes))


def test_the_best_value_is_chosen_by_arm_on_seeds_of_its_own_and_then_compared(study, tmp_path):
    plan = read(study())
    sweep = first_runs(plan)
    assert {(r.arm, r.seed, r.value) for r in sweep} == {
        (arm, seed, value) for arm in "ab" for seed in (100, 101) for value in (1e-4, 1e-3)
    }
    assert all(r.keys == {**CONTENT["arms"][r.arm], "learning_rate": r.value} for r in sweep)
    assert runner.all_runs(plan, tmp_path) == sweep  # nothing is known yet
    accuracy = {("a", 100): (0.6, 0.2), ("a", 101): (0.2, 0.3), ("b", 100): (0.1, 0.3), ("b", 101): (0.1, 0.3)}
    for one in sweep:
        finish(one, tmp_path, accuracy[one.arm, one.seed][0 if one.value == 1e-4 else 1])
    best = best_values(plan, runner.sweep_accuracies(plan, tmp_path))
    assert best == {"a": 1e-4, "b": 1e-3}
    later = later_runs(plan, best)
    # b's best is the common value: those runs serve both
    assert {(r.arm, r.value, r.kind) for r in later} == {
        ("a", 1e-4, "best"),
        ("b", 1e-3, "best"),
        ("a", 1e-3, "common"),
    }
    assert {r.seed for r in later} == {0, 1, 2} and len(later) == 9
    assert len(runner.all_runs(plan, tmp_path)) == len(sweep) + 9


@pytest.mark.parametrize("file", sorted((ROOT / "recipes/studies").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_study_of_the_repository_can_be_planned(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = read(file)
    outline.check(plan)
    for options in plan.evaluations.values():
        check_tasks([options["tasks"]])
    printed = CliRunner().invoke(app, ["study", str(file), "--dry-run"])
    assert printed.exit_code == 0 and all(f"| {arm} |" in printed.output for arm in plan.arms)
    assert f"x {len(plan.seeds)} seeds" in printed.output and "paired by seed" in printed.output


def test_the_plan_counts_runs_and_an_arm_that_train_would_refuse_is_named(study):
    plan = read(study())
    text = outline.outline(plan, Path("study.yaml"))
    assert f"= {len(first_runs(plan))}, for the best value" in text and "2 arms x 3 seeds (0, 1, 2) = 6" in text
    assert "greedy (primary: decides): tasks: running_sum" in text and "judged by" in text.lower() and "b - a" in text
    for keys, message in (
        ({"learning_rat": 1}, r"arms\.b: .*learning_rat"),
        ({"noise_mode": "corrected", "vllm_importance_sampling_correction": False}, r"arms\.b: noise_mode: corrected"),
    ):
        with pytest.raises(StudyError, match=message):
            outline.check(read(study(arms={"a": {"quantization": "bf16"}, "b": keys})))


def test_a_folder_of_another_study_is_left_alone(study, tmp_path):
    plan = read(study(sweep=None))
    for one in first_runs(plan):
        finish(one, tmp_path / "out", 0.5)
    with pytest.raises(StudyError, match="is not empty and holds no study"):
        runner.run(plan, tmp_path / "out")
    (tmp_path / "out" / "study.json").write_text(plan.model_dump_json())
    assert runner.run(plan, tmp_path / "out")  # all is there: nothing is started
    changed = read(study(sweep=None, target_reward=0.7))
    with pytest.raises(StudyError, match="holds another study: target_reward differ"):
        runner.run(changed, tmp_path / "out")


def test_a_run_that_fails_is_named_with_its_last_line_and_the_others_go_on(study, tmp_path):
    plan = read(study(sweep=None, seeds=[0], evaluations={"greedy": {"tasks": "no_such_task"}}))
    for one in first_runs(plan):
        (tmp_path / one.folder / "adapter").mkdir(parents=True)  # trained already: what fails is the evaluation
    (tmp_path / "study.json").write_text(plan.model_dump_json())
    with pytest.raises(StudyError) as error:
        runner.run(plan, tmp_path, jobs=2)
    assert "a/seed-0 ended with 2" in str(error.value) and "b/seed-0 ended with 2" in str(error.value)
    assert "no_such_task" in (tmp_path / "a" / "seed-0" / "log.txt").read_text()


def test_the_jobs_are_dealt_out_to_the_gpus_and_the_base_is_judged_once(study, tmp_path, monkeypatch):
    both = {"greedy": {"tasks": "running_sum"}, "sampled": {"tasks": "running_sum", "num_samples": 8}}
    plan, out = read(study(evaluations=both)), tmp_path / "out"
    calls = []

    def call(self, arguments, log, gpu):
        calls.append((arguments, gpu))
        time.sleep(0.02)  # as long as the others need to take a GPU each
        if arguments[0] == "evaluate":
            folder = Path(arguments[arguments.index("--output_dir") + 1])
            folder.mkdir(parents=True)
            accuracy = {"accuracy": 0.5, "pass_at": {"8": {"value": 0.75}}, "maj_at": {"8": {"value": 0.25}}}
            arms = {"adapter": accuracy, **({} if "--adapter_only" in arguments else {"base": {"accuracy": 0.1}})}
            (folder / "evaluation.json").write_text(json.dumps({"tasks": {"running_sum": arms}}))
        return 0

    monkeypatch.setattr(runner.Machine, "call", call)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert runner.run(plan, out, jobs=4)
    assert {gpu for _, gpu in calls} == {"2", "5"}
    assert min(sum(gpu == name for _, gpu in calls) for name in "25") >= len(calls) // 4
    evaluated = [arguments for arguments, _ in calls if arguments[0] == "evaluate"]
    of_sweep = [a for a in evaluated if "seed-10" in a[a.index("--output_dir") + 1]]
    assert len(of_sweep) == 8 and not any("sampled" in " ".join(arguments) for arguments in of_sweep)
    assert all("--adapter_only" in arguments for arguments in of_sweep)
    with_base = {a[a.index("--output_dir") + 1] for a in evaluated if "--adapter_only" not in a}
    labels = [f"{arm}@{value}" for arm in "ab" for value in (0.0001, 0.001)]
    assert with_base == {str(out / f"{of}/seed-0/evaluation/{name}") for of in labels for name in both}
    found = runner.figures(plan, later_runs(plan, {"a": 1e-3, "b": 1e-3})[0], out)
    assert found == {"accuracy": 0.5, "pass@8": 0.75, "maj@8": 0.25, "base_accuracy": 0.1} | {
        "accuracy/sampled": 0.5, "pass@8/sampled": 0.75, "maj@8/sampled": 0.25, "base_accuracy/sampled": 0.1
    }  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert runner.visible_gpus() == []


def test_a_comparison_is_paired_by_seed_and_agrees_with_scipy_and_a_published_correction():
    rng = np.random.default_rng(1)
    common = rng.normal(0, 1.0, 8)  # what a seed does to both arms: unpaired, it would drown the difference
    a = {seed: 0.5 + value + 0.05 * rng.normal() for seed, value in enumerate(common)}
    b = dict(enumerate(common)) | {99: 7.0}  # a seed that a does not have counts for nothing
    found = paired("a", "b", a, b)
    assert found.seeds == 8 and found.low < found.difference < found.high
    differences = [a[s] - b[s] for s in range(8)]
    assert found.p == pytest.approx(stats.ttest_rel([a[s] for s in range(8)], [b[s] for s in range(8)]).pvalue)
    assert found.difference == pytest.approx(np.mean(differences)) == pytest.approx(0.5, abs=0.06)
    assert found.effect == pytest.approx(np.mean(differences) / np.std(differences, ddof=1))
    assert stats.ttest_ind(list(a.values()), common).pvalue > 0.05 > found.p  # the control: unpaired sees nothing
    with pytest.raises(ValueError, match="have 1 seeds in common"):
        paired("a", "b", {1: 0.0}, {1: 0.0, 2: 0.0})
    # Holm's procedure on 0.01, 0.04, 0.03, 0.005 gives 0.03, 0.06, 0.06, 0.02 (R's p.adjust documentation)
    raw = [found.__class__("a", "b", 5, 1.0, 0.5, 1.5, 1.0, p) for p in (0.01, 0.04, 0.03, 0.005)]
    assert [c.p_holm for c in holm(raw)] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [c.verdict() for c in holm(raw)] == ["higher", "undecided at this size", "undecided at this size", "higher"]


@pytest.mark.parametrize(
    ("differences", "expect", "verdict"),
    [
        ([0.03, 0.04, 0.035], "higher", "supported"),
        ([0.03, 0.04, 0.035], "lower", "not supported"),
        ([0.03, 0.04, 0.035], "not lower", "supported"),
        ([0.001, -0.001, 0.002], "higher", "not supported"),  # there may be an effect, and it does not matter
        ([0.001, -0.001, 0.002], "not lower", "supported"),
        ([0.10, -0.05, 0.02], "higher", "undecided at this size"),
        ([0.10, -0.05, 0.02], "not lower", "undecided at this size"),
        ([-0.03, -0.04, -0.035], "lower", "supported"),
        ([-0.03, -0.04, -0.035], "not lower", "not supported"),
    ],
)
def test_a_claim_is_judged_by_its_margin_and_the_t_distribution(differences, expect, verdict):
    (found,) = holm([paired("a", "b", dict(enumerate(differences)), dict.fromkeys(range(3), 0.0))])
    half = stats.t.ppf(0.975, 2) * np.std(differences, ddof=1) / math.sqrt(3)
    assert (found.t_high - found.t_low) / 2 == pytest.approx(half)
    assert judged(found, expect, 0.01) == verdict


def test_equal_differences_over_few_seeds_prove_nothing():
    two, many = (paired("a", "b", dict.fromkeys(range(n), 0.503), dict.fromkeys(range(n), 0.5)) for n in (2, 8))
    assert (two.p, many.p) == (0.5, 2**-7) and two.effect == math.inf
    assert judged(*holm([two]), "higher", 0.001) == "undecided at this size"
    assert judged(*holm([many]), "higher", 0.001) == "supported"
    assert paired("a", "b", {0: 0.1 + 0.2, 1: 0.3}, {0: 0.3, 1: 0.3}).p == 1.0  # equal but for a last bit


def test_claims_are_judged_on_their_own_metric_and_corrected_together(study, tmp_path):
    claims = [
        {"claim": "b learns faster", "pair": ["b", "a"], "expect": "higher", "margin": 0.01, "metric": "reward_area"},
        {"claim": "b is as good", "pair": ["b", "a"], "expect": "not lower", "margin": 0.02},
    ]
    file = study(sweep=None, claims=claims)
    plan, out = read(file), tmp_path / "out"
    for one in first_runs(plan):
        jitter = 0.001 * one.seed
        finish(one, out, 0.5, rewards=(0.0, 1.0 + jitter) if one.arm == "b" else (0.0, 0.8 - jitter))
    rows = results.collect(plan, out)
    faster, good = results.verdicts(plan, results.final(rows))
    assert [(v.claim.claim, v.verdict) for v in (faster, good)] == [
        ("b learns faster", "supported"),
        ("b is as good", "supported"),
    ]
    c = faster.measured
    assert c.p_holm == pytest.approx(2 * c.p) and c.difference == pytest.approx(0.101)
    results.write_table(rows, out / results.TABLE)
    page = conduct(file, table=out / results.TABLE).read_text()
    assert "| b learns faster | reward_area: b higher than a, margin 0.01; a - b = +0.101, 95 % (t) +0.0985" in page
    assert "claim: b is as good. Supported where b's accuracy is not lower than a's" in outline.outline(plan, file)


def test_what_the_steps_of_a_run_come_to():
    steps = [
        {"step": i + 1, "reward": r, "entropy": e, "step_seconds": 2.0}
        for i, (r, e) in enumerate([(0.0, 3.0), (0.2, 2.0), (0.4, 1.0), (0.6, 1.0), (0.8, 1.0), (1.0, 0.0)])
    ]
    found = results.summaries(steps, 0.5)
    assert found["reward_area"] == pytest.approx(0.5) and found["entropy_start"] == pytest.approx(1.6)
    assert found["steps_to_target"] == 6 and found["seconds_to_target"] == pytest.approx(12.0)
    assert "steps_to_target" not in results.summaries(steps, 0.9)
    # a rollout that serves two steps is scored in the first of them; the second takes its time all the same
    between = [{"step": 2 * s["step"], "entropy": 9.0, "step_seconds": 1.0} for s in steps]
    halves = [each for s, b in zip(steps, between, strict=True) for each in ({**s, "step": 2 * s["step"] - 1}, b)]
    found = results.summaries(halves, 0.5)
    assert found["reward_area"] == pytest.approx(0.5)
    assert (found["steps_to_target"], found["seconds_to_target"]) == (11, pytest.approx(6 * 2.0 + 5 * 1.0))


def test_of_each_metric_the_last_step_that_has_it_counts():
    rows = [("a", 0, 1, "reward", 0.1), ("a", 0, 2, "reward", 0.7), ("b", 5, 2, "seen", 1.0), ("b", 5, 1, "seen", 0.2)]
    found = results.final(rows)
    assert found["reward"] == {"a": {0: 0.7}} and found["seen"] == {"b": {5: 1.0}}
    assert found["absent"] == {}


def test_the_page_follows_from_the_table_alone_and_compares_the_seeds_of_the_study(study, tmp_path):
    file = study()
    plan, out = read(file), tmp_path / "out"
    for one in first_runs(plan):
        finish(one, out, 0.9 if one.value == 1e-3 else 0.1)  # the sweep's seeds: far from what is compared
    for one in later_runs(plan, {"a": 1e-3, "b": 1e-3}):
        finish(one, out, {"a": 0.5, "b": 0.6}[one.arm] + 0.01 * one.seed * (1 if one.arm == "a" else 1.1))
    rows = results.collect(plan, out)
    results.write_table(rows, out / results.TABLE)
    written = (out / results.TABLE).read_bytes()
    again = results.read_table(out / results.TABLE)
    results.write_table(again, out / results.TABLE)
    assert (out / results.TABLE).read_bytes() == written
    page = conduct(file, table=out / results.TABLE).read_text()
    (compared,) = results.comparisons(plan, results.final(again))["best"]
    assert (compared.a, compared.b, compared.seeds) == ("b", "a", 3)
    assert compared.difference == pytest.approx(0.101) and "+10.1%" in page
    assert "| b@0.001 | 3 | 0.611 ± 0.011 |" in page and "0.9" not in page.split("## All arms")[0]
    assert "## learning_rate: accuracy over the seeds 100, 101" in page and "| a | 0.1 ± 0 | 0.9 ± 0 |" in page
    assert (out / "curves_best.png").stat().st_size > 5000
    for content in (b"no table", gzip.compress(b"arm,seed,metric,step,value\na,0,1,2,3\n")):
        (out / results.TABLE).write_bytes(content)
        with pytest.raises(StudyError, match="is no table of a study"):
            conduct(file, table=out / results.TABLE)


@pytest.mark.slow
@pytest.mark.integration
def test_a_killed_study_goes_on_where_it_was_and_ends_as_one_that_was_not(tmp_path):
    """Two arms of the demo, one seed; killed by the clock once, the same first steps as a run that was left alone."""
    root = Path(__file__).parents[3]
    content = {
        "recipe": str(root / "recipes/demo/grpo/nvfp4_lora.yaml"),
        "arms": {
            arm: {
                "quantization": quantization,
                "max_steps": 4,
                "save_strategy": "steps",
                "save_steps": 1,
                "model_name_or_path": str(root / "recipes/demo/starting_model"),
            }
            for arm, quantization in (("bf16_lora", "bf16"), ("nvfp4_lora", "qerl_nvfp4"))
        },
        "seeds": [0],
        "evaluations": {"greedy": {"tasks": "running_sum", "max_samples": 8, "gpu_memory_utilization": 0.2}},
        "primary": "greedy",
    }
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(content))

    def call(folder, *options):
        line = [sys.executable, "-m", "qerl_recipes.cli", "study", str(file), "--output", str(folder), *options]
        assert subprocess.run(line, timeout=280).returncode == 0
        return sorted(results.read_table(folder / results.TABLE))

    broken, whole = tmp_path / "broken", tmp_path / "whole"
    assert not any(metric == "accuracy" for *_, metric, _ in call(broken, "--minutes", "0.4"))
    again, at_once = call(broken), call(whole)
    timed = ("seconds", "per_s", "adapter_version")
    kept = [[row for row in rows if not any(word in row[3] for word in timed)] for rows in (again, at_once)]
    assert kept[0] == kept[1] and sum(row[3] == "accuracy" for row in again) == 2
    assert all(math.isfinite(row[4]) for row in again)
