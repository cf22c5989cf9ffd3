"""``qerl study``: trains and evaluates every run of a study, several at a time; may be stopped and started at will.

A run's folder holds what `qerl train` writes, ``evaluation/NAME/`` of each evaluation, ``log.txt``, and what it took of
its device, ``hours.jsonl``. What is there is not done again: a finished run is left alone, an interrupted training goes
on from its last saved state.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from rich.console import Console

from qerl_recipes.files.whole_folder import lock, write_text
from qerl_recipes.machine.gpu import installed_gpu
from qerl_recipes.machine.server_process import inherited
from qerl_recipes.study import finished
from qerl_recipes.study.base import refuse_other_weights
from qerl_recipes.study.check import check, check_tasks, with_list
from qerl_recipes.study.plan import Run, Study, StudyError, best_values, first_runs, flags, later_runs
from qerl_recipes.study.processes import Machine

RESULT, LOG = "evaluation.json", "log.txt"
METRICS = "metrics.jsonl"
MARK, RECIPE = "study.json", "recipe_keys"  # of a study's folder, and in it what its runs have of the recipe
REFUSED = "qerl: "  # how a line begins in which a command says why it does not do what was asked
PATIENCE = 120.0  # seconds for a training to end that a killed study has left behind


class RunsFailedError(StudyError):
    """Some runs of a study have failed; the others are there."""


def run(study: Study, folder: Path, *, jobs: int = 1, minutes: float | None = None, table: Path | None = None) -> bool:
    """Run what is missing of ``study`` below ``folder`` -> whether all of it is there now.

    ``jobs`` trainings or evaluations at a time, each on one of the visible GPUs, as many on each as on any other;
    several on a GPU want vllm_kv_cache_memory_bytes in the recipe, and kv_cache_memory_bytes in the evaluations.
    After ``minutes`` everything is told to end; the next call goes on. SIGTERM and Ctrl-C do the same. The runs that
    ``table`` has are not made again (`finished.keep`), in this call or later.

    Raises StudyError, before anything runs, for keys that `qerl train` or `qerl evaluate` would refuse, for evaluations
    whose problems or judge are not here, where ``folder`` belongs to another study, to one at work, or to this one with
    another recipe, where a base holds other weights than for the runs so far, and for a ``table`` that is not this
    study's; and RunsFailedError, at the end, naming each run that has failed.
    """
    if jobs < 1:
        raise StudyError(f"--jobs is {jobs}; it must be at least 1")
    environment = _environment(jobs)  # before torch and what it imports have added to it
    check(study)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        handle = lock(folder)
    except BlockingIOError as error:
        raise StudyError(f"another `qerl study` is at work in {folder}; wait for it, or name another folder") from error
    try:
        _claim(study, folder)
        if table is not None:
            finished.keep(study, table, folder)
        else:
            finished.refuse_other_bases(study, finished.kept(folder), str(folder / finished.KEPT))
        runs = all_runs(study, folder)
        refuse_other_weights(study, runs, folder)
        if not all(is_finished(study, one, folder) for one in runs):
            check_tasks(study)
        gpu = installed_gpu()
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        machine = Machine(deadline, Console(stderr=True), "CPU" if gpu is None else gpu.name, environment)
        with _ends_in_order(machine):
            failed = _all(study, folder, jobs, machine)
    finally:
        os.close(handle)
    if failed:
        raise RunsFailedError("; ".join(failed))
    return not machine.stopping.is_set()


def _environment(jobs: int) -> dict[str, str]:
    """What the processes of a study get: this one's, but for what holds for its own engines alone, and a share of the
    processor. Torch takes a thread for each core and lets it spin, which slows everything where each job does so."""
    found = inherited()
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    return found


def all_runs(study: Study, folder: Path) -> list[Run]:
    """The runs of a study as far as its results say which they are; one that serves two purposes stands there once."""
    runs = first_runs(study)
    if study.sweep is not None:
        runs += later_runs(study, best_values(study, sweep_accuracies(study, folder)))
    return list({run.folder: run for run in runs}.values())


def is_finished(study: Study, run: Run, folder: Path) -> bool:
    """Whether a run is trained and all its evaluations are there, or a table has them."""
    if (run.label, run.seed) in finished.kept(folder):
        return True
    return all((folder / run.folder / "evaluation" / name / RESULT).is_file() for name in study.evaluations_of(run))


def figures(study: Study, run: Run, folder: Path) -> dict[str, float]:
    """What the evaluations of a finished run say: ``accuracy`` (the primary one), ``accuracy/NAME``, ``pass@K/NAME``
    and ``maj@K/NAME`` for several answers a problem, and the same of the base, where it was judged, as ``base_...``."""
    found: dict[str, float] = {}
    for name in study.evaluations_of(run):
        path = folder / run.folder / "evaluation" / name / RESULT
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"].values()
        of = "" if name == study.primary else f"/{name}"
        for arm in next(iter(tasks)):
            prefix = "base_" if arm == "base" else ""
            found[f"{prefix}accuracy{of}"] = sum(task[arm]["accuracy"] for task in tasks) / len(tasks)
            for kind, label in (("pass_at", "pass"), ("maj_at", "maj")):
                for k in next(iter(tasks))[arm].get(kind, {}):
                    mean = sum(task[arm][kind][k]["value"] for task in tasks) / len(tasks)
                    found[f"{prefix}{label}@{k}{of}"] = mean
    return found


def sweep_accuracies(study: Study, folder: Path) -> dict[tuple[str, int, float], float]:
    """(arm, seed, value) -> the primary accuracy of the sweep's runs that have finished."""
    return {
        (run.arm, run.seed, run.value): _accuracy(study, run, folder)
        for run in first_runs(study)
        if run.value is not None and is_finished(study, run, folder)
    }


def _accuracy(study: Study, run: Run, folder: Path) -> float:
    rows = finished.kept(folder).get((run.label, run.seed), ())
    known = [value for *_, metric, value in rows if metric == "accuracy"]
    return known[0] if known else figures(study, run, folder)["accuracy"]


def says_its_recipe(folder: Path) -> bool:
    """Whether the runs in a study's folder are known to be of the recipe that is there now: `run` refuses another."""
    mark = folder / MARK
    return mark.is_file() and RECIPE in json.loads(mark.read_text(encoding="utf-8"))


def _claim(study: Study, folder: Path) -> None:
    """Write the study and its recipe's keys into its folder, which is locked, or see that they are those that stand
    there. (Folders of before have no keys of the recipe.)"""
    mark, content = folder / MARK, json.loads(study.model_dump_json())
    recipe = json.loads(json.dumps(study.decided({}), default=str))
    if mark.is_file():
        before = json.loads(mark.read_text(encoding="utf-8"))
        begun = before.pop(RECIPE, recipe)
        if changed := sorted(key for key in {*begun, *recipe} if begun.get(key) != recipe.get(key)):
            raise StudyError(
                f"{folder} was begun with another {study.recipe}: {', '.join(changed)} differ; put them back, or begin "
                "anew with another --output"
            )
        if changed := sorted(key for key in {*before, *content} if before.get(key) != content.get(key)):
            raise StudyError(
                f"{folder} holds another study: {', '.join(changed)} differ; name another folder with --output"
            )
        return
    if any(folder.iterdir()):
        raise StudyError(f"{folder} is not empty and holds no study; name another folder with --output")
    write_text(mark, json.dumps({**content, RECIPE: recipe}, indent=1) + "\n")


@contextlib.contextmanager
def _ends_in_order(machine: Machine) -> Iterator[None]:
    """SIGTERM, Ctrl-C and the deadline tell the runs to end, and this process waits for them."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: machine.stop()) for number in numbers]
    timer = None
    if machine.deadline is not None:
        timer = threading.Timer(max(0.0, machine.deadline - time.monotonic()), machine.stop)
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _all(study: Study, folder: Path, jobs: int, machine: Machine) -> list[str]:
    """Finish what is missing -> what is to be said of the runs that failed. An arm whose sweep is through goes on at
    its best value while others are still at theirs."""
    places: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for gpu in itertools.islice(itertools.cycle(visible_gpus() or [None]), jobs):
        places.put(gpu)

    def finish(run: Run) -> str | None:
        gpu = places.get()
        try:
            return _one(study, run, folder, machine, gpu)
        finally:
            places.put(gpu)

    failed: list[str] = []
    begun: set[str] = set()
    at_work: set[Future[str | None]] = set()
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            known = all_runs(study, folder)
            there = {run.folder for run in known if is_finished(study, run, folder)}
            more = ", of those known yet" if study.sweep else ""
            machine.console.print(f"{len(there)} of {len(known)} runs are there{more}")
            for run in known:
                if run.folder not in begun | there:
                    at_work.add(pool.submit(finish, run))
                begun.add(run.folder)
            if not at_work:
                return failed
            done, at_work = wait(at_work, return_when=FIRST_COMPLETED)
            failed += [reason for each in done if (reason := each.result()) is not None]


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them; none of one alone, which needs no name."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        found = [name.strip() for name in given.split(",") if name.strip()]
    else:
        import torch  # counts them without taking memory on any

        found = [str(i) for i in range(torch.cuda.device_count())]
    return found if len(found) > 1 else []


def _one(study: Study, run: Run, root: Path, machine: Machine, gpu: str | None) -> str | None:
    folder, began = root / run.folder, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    code = _attempt(study, run, folder, machine, gpu)
    if _failed_to_start(code, folder, machine):
        machine.console.print(f"{run.folder}: ended with {code} before it had made anything, and is begun once more")
        code = _attempt(study, run, folder, machine, gpu)
    if code != 0:
        return _ended(run, folder, code, machine)
    machine.console.print(
        f"{run.folder}: done, {time.monotonic() - began:.0f} s, {figures(study, run, root)['accuracy']:.1%}"
    )
    return None


def _attempt(study: Study, run: Run, folder: Path, machine: Machine, gpu: str | None) -> int | None:
    """Do what is missing of a run -> the exit code of the command that failed, 0 where everything is there now."""
    if not (folder / "adapter").is_dir():
        _wait_for_the_last(folder, machine)
        keys = {**run.keys, "seed": run.seed, "output_dir": str(folder)}
        if any(folder.glob("checkpoint-*")):
            keys["resume_from_checkpoint"] = True
        code = machine.call(["train", "--config", str(study.recipe), *flags(keys)], folder / LOG, gpu)
        if code != 0:
            return code
    if missing := _evaluations(study, run, folder):
        return machine.call(["evaluate-each", json.dumps(missing)], folder / LOG, gpu)
    return 0


def _failed_to_start(code: int | None, folder: Path, machine: Machine) -> bool:
    """Whether a command ended because its engine did not start, and may do better when it is begun again.

    Of engines that start side by side one fails now and then: vLLM chooses a free port before it takes it, and may read
    a file of its compilation cache while another process writes it. A refusal, a training that has made a step, and
    what was told to end are left alone.
    """
    if code is None or code <= 0 or machine.stopping.is_set():
        return False
    has_steps = not (folder / "adapter").is_dir() and (folder / METRICS).exists()
    return not has_steps and not _reason(folder / LOG).startswith(REFUSED)


def _evaluations(study: Study, run: Run, folder: Path) -> list[dict[str, Any]]:
    """The options of the evaluations of a run that are missing: one process and, where they agree on it, one engine."""
    recipe = study.settled(run.keys)
    common = {
        "base": recipe["model_name_or_path"],
        "adapter": str(folder / "adapter"),
        "quantization": recipe.get("quantization", "qerl_nvfp4"),
        "adapter_only": not study.judges_base(run),
    }
    return [
        {**common, "output_dir": str(folder / "evaluation" / name), **with_list(options)}
        for name, options in study.evaluations_of(run).items()
        if not (folder / "evaluation" / name / RESULT).is_file()
    ]


def _wait_for_the_last(folder: Path, machine: Machine) -> None:
    """A training of a study that was killed saves its state before it ends; wait for it, but not for ever."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not machine.stopping.is_set():
        try:
            os.close(lock(folder))
            return
        except BlockingIOError:
            time.sleep(0.2)


def _ended(run: Run, folder: Path, code: int | None, machine: Machine) -> str | None:
    if machine.stopping.is_set():
        return None  # told to end; the next call goes on
    machine.console.print(f"{run.folder}: failed")
    return f"{run.folder} ended with {code}: {_reason(folder / LOG)} (all of it in {folder / LOG})"


def _reason(log: Path) -> str:
    """Why the last command in a log has failed: the refusal, where it is one, else its last line."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    begins = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=-1)
    said = lines[begins + 1 :]
    return next((line for line in reversed(said) if line.startswith(REFUSED)), said[-1] if said else "it said nothing")
