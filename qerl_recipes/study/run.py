"""``qerl study``: trains and evaluates every run of a study, several at a time; may be stopped and started at will.

A run's folder holds what `qerl train` writes, ``evaluation/NAME/`` of each evaluation, ``log.txt``, and what it took of
its device, ``hours.jsonl``. What is there is not done again: a finished run is left alone, an interrupted training goes
on from its last saved state.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from qerl_recipes.files.whole_folder import lock, write_text
from qerl_recipes.machine.gpu import installed_gpu
from qerl_recipes.machine.processes import inherited
from qerl_recipes.study import finished
from qerl_recipes.study.base import refuse_missing_bases, refuse_other_weights
from qerl_recipes.study.check import check, check_tasks
from qerl_recipes.study.plan import Study, StudyError
from qerl_recipes.study.processes import Machine
from qerl_recipes.study.there import all_runs, is_finished
from qerl_recipes.study.work import finish_all

MARK, RECIPE = "study.json", "recipe_keys"  # of a study's folder, and in it what its runs have of the recipe
MOST = 5  # failed runs whose reasons are given at the end


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
    another recipe, where a base is not there, or holds other weights than for the runs so far, and for a ``table`` that
    is not this study's; and RunsFailedError, at the end, naming each run that has failed.
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
        if missing := [one for one in runs if not is_finished(study, one, folder)]:
            refuse_missing_bases(study, missing)
            check_tasks(study)
        gpu = installed_gpu()
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        machine = Machine(deadline, Console(stderr=True), "CPU" if gpu is None else gpu.name, environment)
        with _ends_in_order(machine):
            failed = finish_all(study, folder, jobs, machine)
    finally:
        os.close(handle)
    if failed:
        more = [f"and {len(failed) - MOST} more, whose reasons stand above"] if len(failed) > MOST else []
        raise RunsFailedError("; ".join([*failed[:MOST], *more]))
    return not machine.stopping.is_set()


def _environment(jobs: int) -> dict[str, str]:
    """What the processes of a study get: this one's, but for what holds for its own engines alone, and a share of the
    processor. Torch takes a thread for each core and lets it spin, which slows everything where each job does so."""
    found = inherited()
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    return found


def says_its_recipe(folder: Path) -> bool:
    """Whether the runs in a study's folder are known to be of the recipe that is there now: `run` refuses another."""
    mark = folder / MARK
    return mark.is_file() and RECIPE in json.loads(mark.read_text(encoding="utf-8"))


def _claim(study: Study, folder: Path) -> None:
    """Write the study and its recipe's keys into its folder, which is locked, or see that they are those that stand
    there. (Folders of before have no keys of the recipe.)"""
    mark, content = folder / MARK, json.loads(study.model_dump_json(exclude={"afterwards"}))
    recipe = json.loads(json.dumps(study.decided({}), default=str))
    if mark.is_file():
        before = json.loads(mark.read_text(encoding="utf-8"))
        begun, _ = before.pop(RECIPE, recipe), before.pop("afterwards", None)
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
