"""Know what a study has: its table ``results.csv.gz``, the runs in its folder, and runs that other tables have.

A table has the columns arm, seed, step, metric and value. ``arm`` is ``NAME``, or ``NAME@VALUE`` of the sweep's key.
Metrics of a step are those of ``metrics.jsonl``. At the last step of a finished run stand what its evaluations say
(``figures``) and what its steps come to (``summaries``). The facts of a run are metrics, too, which say something by
their names: ``hours/DEVICE``; ``base/DIGITS``, the weights that it was trained on; ``plan/DIGITS``, its keys and
evaluations; ``problems/EVALUATION/DIGITS``; and how each answer was judged, the value being the number of problems:
``by_problem/EVALUATION/TASK/POLICY/WHAT/ANSWERS/DIGITS`` (``evaluate.figures.packed``). TASK counts from 0, POLICY
is adapter or base, WHAT right or ended, and ANSWERS how many there are to each problem.
"""

import functools
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_recipes.files.metrics_file import FILE, current_name, read_metrics
from qerl_recipes.files.run_state import MODEL
from qerl_recipes.files.whole_folder import write_bytes
from qerl_recipes.recipe.keys import with_former_names
from qerl_recipes.study.plan import Run, Study, StudyError, best_values, first_runs, later_runs, possible_runs, run_of
from qerl_vllm_plugin.adapter.folder import base_hash, trained_on

TABLE = "results.csv.gz"
TYPES = {"arm": str, "seed": int, "step": int, "metric": str, "value": float}
COLUMNS = list(TYPES)
KEPT = "finished.csv.gz"  # the runs that `--finished` has brought, in the study's folder
RESULT, TIMES = "evaluation.json", "hours.jsonl"  # in the folder of a run
HOURS, BASE, PLAN, PROBLEMS, BY_PROBLEM = FACTS = ("hours/", "base/", "plan/", "problems/", "by_problem/")
DIGITS = 12  # of a hash in a table
ENDS = 5  # steps averaged at the start and at the end of a run
LATE = 10  # scored steps averaged for the level that the reward has reached
ROUNDING = 1e-5  # of a reward in a table, which has six digits
JUDGED = ("accuracy", "ended", "calls", "failures")  # metrics of an evaluation; the last two of episodes alone


# The table.


def beside(file: Path) -> Path:
    """Return where the published table of the study in NAME.yaml is: NAME/results.csv.gz."""
    return file.parent / file.stem / TABLE


def write_table(rows: pd.DataFrame, path: Path) -> None:
    """Write the rows whole or not at all: six digits of each step's figures, and exactly what a run has once."""
    rows = rows[COLUMNS].sort_values(COLUMNS)
    is_of_steps = rows.duplicated(["arm", "seed", "metric"], keep=False)
    values = [
        f"{value:.6g}" if short else repr(value) for value, short in zip(rows.value.tolist(), is_of_steps, strict=True)
    ]
    text = rows.assign(value=values).to_csv(index=False, lineterminator="\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, gzip.compress(text.encode(), mtime=0))


def read_table(path: Path) -> pd.DataFrame:
    """Return the rows of a table, with today's names of its metrics; raise StudyError for a file that is none."""
    try:
        text = io.BytesIO(gzip.decompress(path.read_bytes()))
        rows = pd.read_csv(
            text, dtype=TYPES, keep_default_na=False, na_values={"value": ["nan"]}, float_precision="round_trip"
        )
        if list(rows.columns) != COLUMNS:
            raise ValueError(f"its columns are {', '.join(rows.columns)}")
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise StudyError(f"{path} is no table of a study ({error}); qerl study writes one") from error
    return rows.assign(metric=rows.metric.map({name: current_name(name) for name in rows.metric.unique()}))


def facts(rows: pd.DataFrame, what: str) -> pd.Series:
    """Return what rows say of HOURS, BASE, PLAN or PROBLEMS, by (arm, seed); a run may have several or none."""
    of = rows[rows.metric.str.startswith(what)]
    return of.set_index(["arm", "seed"]).metric.str.removeprefix(what)


def summaries(steps: pd.DataFrame, target: float | None) -> dict[str, float]:
    """Return what the steps of a run come to, as far as ``steps`` (a row a step, a column a metric) has the metrics.

    * ``mean_reward``; ``reward_gain``: the mean of the last ten rewards less that of the first five.
    * ``clipped_end``: the share of completions that were cut at their greatest length in the last five rollouts.
    * ``entropy_start``, ``entropy_end``: means of the first and the last five steps, over the computed completions.
      ``sampled_entropy_start``, ``..._end``: the same estimated over all completions, noise of the rollout included.
      Which completions are computed depends on the rewards, so only these compare arms.
    * ``mean_logp_diff``, ``mean_frac_reward_zero_std``, ``median_step_seconds``, ``median_rollout_tokens_per_s``.
    * ``steps_to_target``, ``seconds_to_target``: until the mean reward of the last five steps reaches ``target``.
    """
    names = ("reward", "completion_clipped", "entropy", "sampled_entropy", "logp_diff_mean", "frac_reward_zero_std")
    steps = steps.reindex(columns=[*names, "step_seconds", "rollout_tokens_per_s"]).dropna(how="all").sort_index()
    first, last, whole, median = steps.head(ENDS).mean(), steps.tail(ENDS).mean(), steps.mean(), steps.median()
    scored = steps[steps.reward.notna()]  # a rollout that serves several steps is scored once
    found = {
        "mean_reward": whole.reward,
        "clipped_end": scored.tail(ENDS).completion_clipped.mean(),
        "entropy_start": first.entropy,
        "entropy_end": last.entropy,
        "sampled_entropy_start": first.sampled_entropy,
        "sampled_entropy_end": last.sampled_entropy,
        "mean_logp_diff": whole.logp_diff_mean,
        "mean_frac_reward_zero_std": whole.frac_reward_zero_std,
        "median_step_seconds": median.step_seconds,
        "median_rollout_tokens_per_s": median.rollout_tokens_per_s,
    }
    if len(scored) >= ENDS + LATE:
        found["reward_gain"] = scored.reward.tail(LATE).mean() - scored.reward.head(ENDS).mean()
    if target is not None:
        least = target - ROUNDING * max(1.0, abs(target))
        reached = scored.index[scored.reward.rolling(ENDS).mean() >= least]
        if len(reached):
            found |= {"steps_to_target": reached[0], "seconds_to_target": steps.step_seconds[: reached[0]].sum()}
    return {name: float(value) for name, value in found.items() if pd.notna(value)}


# The runs of a study's folder.


def all_runs(study: Study, folder: Path) -> list[Run]:
    """Return the runs of a study as far as its results say which they are; a run for two purposes stands there once."""
    runs = first_runs(study)
    if study.sweep is not None:
        accuracies = {
            (run.arm, run.seed, run.value): accuracy(study, run, folder)
            for run in runs
            if run.value is not None and is_finished(study, run, folder)
        }
        runs += later_runs(study, best_values(study, accuracies))
    return list({run.folder: run for run in runs}.values())


def is_finished(study: Study, run: Run, folder: Path) -> bool:
    """Return True if a run is trained and has all its evaluations, or if a table has brought it."""
    if (run.label, run.seed) in kept(folder):
        return True
    return all((folder / run.folder / "evaluation" / name / RESULT).is_file() for name in study.evaluations_of(run))


def accuracy(study: Study, run: Run, folder: Path) -> float:
    if (rows := kept(folder).get((run.label, run.seed))) is not None:
        return float(rows.value[rows.metric == "accuracy"].iloc[0])
    return figures(study, run, folder)["accuracy"]


def figures(study: Study, run: Run, folder: Path) -> dict[str, float]:
    """Return what the evaluations of a finished run say.

    The primary one gives ``accuracy`` and ``ended``, the share of answers that ended by themselves; another one gives
    ``accuracy/NAME`` and ``ended/NAME``. Tasks of episodes add ``calls`` and ``failures``, the means of an episode.
    Several answers a problem add ``pass@K/NAME`` and ``maj@K/NAME``. The same of the base begins with ``base_``. Facts
    are the problems, and the judgement of each answer.
    """
    found: dict[str, float] = {}
    for name in study.evaluations_of(run):
        path = folder / run.folder / "evaluation" / name / RESULT
        content = json.loads(path.read_text(encoding="utf-8"))
        of = "" if name == study.primary else f"/{name}"
        tasks = pd.DataFrame(list(content["tasks"].values()))  # a row a task, a column for adapter and base
        if run.trained == MODEL:  # what was judged without an adapter is what was trained
            tasks = tasks.rename(columns={"base": "adapter"})
        for policy in tasks:
            prefix = "base_" if policy == "base" else ""
            judged = pd.DataFrame(tasks[policy].tolist())
            for metric in judged.columns.intersection(JUDGED):
                found[f"{prefix}{metric}{of}"] = float(judged[metric].mean(skipna=False))
            for metric, label in (("pass_at", "pass"), ("maj_at", "maj")):
                for k in judged[metric].iloc[0] if metric in judged and judged[metric].notna().all() else ():
                    mean = sum(task[k]["value"] for task in judged[metric]) / len(judged)
                    found[f"{prefix}{label}@{k}{of}"] = mean
            for number, task in enumerate(tasks[policy]):
                for what, digits in task.get("by_problem", {}).items():
                    answers = f"{BY_PROBLEM}{name}/{number}/{policy}/{what}/{task['num_samples']}/{digits}"
                    found[answers] = float(task["n"])
        if hashes := content.get("problems_sha256"):
            found[f"{PROBLEMS}{name}/{_digest(sorted(hashes.items()))}"] = 1.0
    return found


def collect(study: Study, folder: Path) -> pd.DataFrame:
    """Return the rows of all finished and taken runs; raise StudyError where they were asked other problems."""
    tables = [taken_rows(study)]
    for run in all_runs(study, folder):
        if (rows := kept(folder).get((run.label, run.seed))) is not None:
            tables.append(rows)
        elif is_finished(study, run, folder):
            tables += _rows_of_run(study, run, folder)
    found = pd.concat(tables, ignore_index=True)
    _refuse_other_problems(study, found)
    return found


def _rows_of_run(study: Study, run: Run, root: Path) -> list[pd.DataFrame]:
    folder = root / run.folder
    records = pd.DataFrame(read_metrics(folder / FILE)).select_dtypes("number")
    steps = records.melt("step", var_name="metric").dropna().assign(arm=run.label, seed=run.seed)
    by_step = steps.pivot_table(index="step", columns="metric", values="value", aggfunc="last")
    found = figures(study, run, root) | summaries(by_step, study.target_reward)
    if (folder / TIMES).is_file():
        times = pd.read_json(folder / TIMES, lines=True)
        found |= {
            f"{HOURS}{device}": seconds / 3600 for device, seconds in times.groupby("device").seconds.sum().items()
        }
    if base := base_of(folder / run.trained):
        found[f"{BASE}{base}"] = 1.0
    found[f"{PLAN}{plan_of(study, run)}"] = 1.0
    once = pd.DataFrame({"metric": list(found), "value": list(map(float, found.values()))})
    return [steps[COLUMNS], once.assign(arm=run.label, seed=run.seed, step=int(records.step.max()))[COLUMNS]]


def _refuse_other_problems(study: Study, rows: pd.DataFrame) -> None:
    problems = facts(rows, PROBLEMS).str.rsplit("/", n=1, expand=True).drop_duplicates()
    for name, of in problems.groupby(0) if len(problems) else ():
        if len(of) > 1:
            first, other, *_ = (f"{label}/seed-{seed}" for label, seed in of.index)
            tasks = study.evaluations.get(name, {}).get("tasks", name)
            raise StudyError(
                f"evaluations.{name}: {other} was asked other problems than {first}; put back the file or data set "
                f"that {tasks} names, and remove evaluation/{name} of the runs that were asked others"
            )


# The plan and the weights that a run was made with.


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]


def plan_of(study: Study, run: Run) -> str:
    """Return a hash of a run's keys, under the former names of older tables, its seed and its evaluations."""
    return _digest([with_former_names(study.decided(run.keys)), run.seed, study.evaluations_of(run)])


def base_of(trained: Path) -> str | None:
    """Return the hash of the base that an adapter or model was trained on, or None if its folder does not say it."""
    found = trained_on(trained)
    return None if found is None else found[:DIGITS]


def refuse_other_bases(trained: Iterable[tuple[str, str, str | None]], way_out: str) -> None:
    """Raise StudyError if a model, of (run, model, hash or None), holds other weights than it was trained on."""
    hash_of = functools.cache(lambda model: base_hash(model)[:DIGITS])  # most runs have one base, of many files
    for run, model, then in trained:
        if (Path(model) / "config.json").is_file() and then != hash_of(model):
            was = f"was trained on another base ({then})" if then else "does not say on which base it was trained"
            raise StudyError(f"{run} {was}, and {model} is now {hash_of(model)}; {way_out}")


def refuse_other_weights(study: Study, folder: Path) -> None:
    """Raise StudyError if a run in ``folder``, or one that a table has brought, was trained on other weights."""
    runs = [(run, base_of(folder / run.folder / run.trained)) for run in all_runs(study, folder)]
    of_runs = [(str(folder / run.folder), _model(study, run), base) for run, base in runs if base is not None]
    refuse_other_bases(of_runs, "put those weights back, or begin anew with another --output")
    _refuse_bases_of(study, kept(folder), folder / KEPT)


def _refuse_bases_of(study: Study, runs: Mapping[tuple[str, int], pd.DataFrame], table: Path) -> None:
    possible = possible_runs(study)
    refuse_other_bases(
        ((f"{table}: {run.folder}", _model(study, run), base)
         for key, rows in runs.items() if (run := possible[key]) for base in facts(rows, BASE)),
        "put those weights back, or leave --finished out and name another --output",
    )  # fmt: skip


def _model(study: Study, run: Run) -> str:
    return str(study.settled(run.keys)["model_name_or_path"])


# Runs that a table has, which are not made again.


def keep(study: Study, table: Path, folder: Path) -> None:
    """Count from now on the runs that ``table`` has as finished in ``folder``.

    Runs that only an earlier table has still count; of a run in both, this table's rows do.
    Raises StudyError, before anything is kept, for a file that is no table, and for a run that is not of this study,
    was made by other keys, lacks an evaluation, or does not say by which keys and on which base it was trained.
    """
    rows = read_table(table)
    rows = rows[~rows.arm.isin(list(study.taken_arms))]
    refuse_other_plan(study, rows, table)
    possible, runs = possible_runs(study), dict(iter(rows.groupby(["arm", "seed"])))
    for key, of_run in runs.items():
        names = study.evaluations_of(possible[key])
        wanted = ["accuracy" if name == study.primary else f"accuracy/{name}" for name in names]
        for what in (*wanted, PLAN, BASE):
            if not (of_run.metric.eq(what) | (of_run.metric.str.startswith(what) & (what in FACTS))).any():
                raise StudyError(f"{table}: {possible[key].folder} has no {what}; leave --finished out")
    _refuse_bases_of(study, runs, table)
    earlier = [of_run for run, of_run in kept(folder).items() if run not in runs]
    write_table(pd.concat([*earlier, rows]), folder / KEPT)


def kept(folder: Path) -> Mapping[tuple[str, int], pd.DataFrame]:
    """Return the runs that `keep` has brought into ``folder``, (label, seed) -> their rows; they are what counts."""
    path = folder / KEPT
    return _by_run(path, path.stat().st_mtime_ns) if path.is_file() else {}


@functools.lru_cache(maxsize=1)
def _by_run(path: Path, changed: int) -> Mapping[tuple[str, int], pd.DataFrame]:
    """Read a table once for as long as it is not changed: a study looks at its runs whenever one has ended."""
    return dict(iter(read_table(path).groupby(["arm", "seed"])))


def refuse_other_plan(study: Study, rows: pd.DataFrame, table: Path) -> None:
    """Raise StudyError if a run of ``table`` is not of this study, or was made by other keys, if it says them."""
    possible = possible_runs(study)
    plans = facts(rows, PLAN)
    for label, seed in rows[["arm", "seed"]].drop_duplicates().itertuples(index=False):
        run, where = possible.get((label, seed)), f"{table}: {label}/seed-{seed}"
        if run is None and label not in study.taken_arms:
            raise StudyError(f"{where} is no run of this study; name the table of this one")
        if run is not None and any(plan != plan_of(study, run) for plan in plans[plans.index == (label, seed)]):
            raise StudyError(
                f"{where} was made with other settings (keys of the recipe, the configuration or its evaluations) than "
                "there are now; put those back, or begin anew without this table"
            )


def taken_rows(study: Study) -> pd.DataFrame:
    """Return the rows of the arms that ``study`` takes, by its names; raise StudyError for runs that differ here."""
    tables = [pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in TYPES.items()})]
    if study.taken is None:
        return tables[0]
    table, bases = beside(study.taken.study), []
    if not table.is_file():
        raise StudyError(f"taken: {study.taken.study} has no table {table} yet; run that study first")
    rows, way_out = read_table(table), "take the configuration out of taken.arms, so that it is run here"
    for arm, label in study.taken.arms.items():
        for seed in study.seeds:
            of_run = rows[(rows.arm == label) & (rows.seed == seed)]
            where = f"taken.arms.{arm}: {label}/seed-{seed} of {table}"
            if not (of_run.metric == "accuracy").any():
                raise StudyError(f"{where} has no accuracy; {way_out}")
            run = run_of(study, arm, seed)
            if set(facts(of_run, PLAN)) != {plan_of(study, run)}:
                raise StudyError(
                    f"{where} does not say that it was made by the keys of this configuration, its recipe and its "
                    f"evaluations; put those back, or {way_out}"
                )
            bases += [(where, _model(study, run), base) for base in facts(of_run, BASE).tolist() or [None]]
            tables.append(of_run[~of_run.metric.str.startswith((HOURS, PLAN))].assign(arm=arm))
    refuse_other_bases(bases, way_out)
    return pd.concat(tables)
