"""Train and evaluate every run of a study, several at a time; a study may be stopped and started at will.

A run's folder holds what `qerl train` writes, ``evaluation/NAME/`` of each evaluation, ``log.txt``, and the time that
it took of its device, ``hours.jsonl``. What is there is not done again: a finished run is left alone, an interrupted
training goes on from its last saved state.

The start of an engine takes longer than many an evaluation. So the runs that wait for theirs on the same weights get it
in one process, on one engine. None waits for others to come.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl_recipes.evaluate.as_trained import settled
from qerl_recipes.files.metrics_file import FILE
from qerl_recipes.files.run_state import MODEL
from qerl_recipes.files.whole_folder import locked, write_text
from qerl_recipes.machine import processes
from qerl_recipes.machine.gpu import installed_gpu, visible_names
from qerl_recipes.recipe.file import flags
from qerl_recipes.recipe.keys import with_current_names
from qerl_recipes.study.check import check, check_tasks, refuse_missing_bases
from qerl_recipes.study.inventory import RESULT, TIMES, accuracy, all_runs, is_finished, keep, refuse_other_weights
from qerl_recipes.study.plan import TRAINERS, Run, Study, StudyError
from qerl_vllm_plugin.wire.address import hidden

CLI, LOG = "qerl_recipes.cli", "log.txt"
MARK, RECIPE = "study.json", "recipe_keys"  # of a study's folder, and in it the keys of its recipe
REFUSED, HINT = "qerl: ", "(QERL_TRACEBACK"  # begin a command's refusal, and the line after it
BESIDE_OTHERS = "qerl: another process gave memory back"  # begins a refusal that a second start may not meet
FULL = re.compile(r"out of memory|Free memory on device|No available memory for the cache", re.IGNORECASE)
CURSOR_UP = "\x1b[A"  # what tqdm writes behind one progress bar below another
PATIENCE = 120.0  # seconds for a training to end that a killed study has left behind
ARGUMENT = 100_000  # bytes; Linux takes an argument of 128 KiB
EVALUATE = 4  # one in so many jobs evaluates, while there is something to train


class RunsFailedError(StudyError):
    """Report the runs of a study that have failed."""


def run(study: Study, folder: Path, *, jobs: int = 1, minutes: float | None = None, table: Path | None = None) -> bool:
    """Run what is missing of ``study`` below ``folder``; return True if all of it is there now.

    ``jobs`` trainings or evaluations work at a time, dealt out to the visible GPUs. After ``minutes``, SIGTERM or
    Ctrl-C everything is told to end; the next call goes on. The runs that ``table`` has are not made again
    (``inventory.keep``).

    Before anything runs, raises StudyError for what `qerl train` or `qerl evaluate` would refuse; a ``folder`` of
    another study, of one at work, or begun with another recipe; and a base that is missing or holds other weights. At
    the end, raises RunsFailedError, naming each run that has failed.
    """
    if jobs < 1:
        raise StudyError(f"--jobs is {jobs}; it must be at least 1")
    environment = processes.inherited()  # before torch and what it imports have added to it
    if jobs > 1:  # a share of the processor's threads, which torch would let spin
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    check(study)
    folder.mkdir(parents=True, exist_ok=True)
    busy = StudyError(f"another `qerl study` is at work in {folder}; wait for it, or name another folder")
    with locked(folder, busy):
        _claim(study, folder)
        if table is not None:
            keep(study, table, folder)
        refuse_other_weights(study, folder)
        if missing := [one for one in all_runs(study, folder) if not is_finished(study, one, folder)]:
            refuse_missing_bases(study, missing)
            check_tasks(study)
        gpu = installed_gpu()
        share = min(1.0, max(1, len(visible_gpus())) / jobs)
        machine = Machine("CPU" if gpu is None else gpu.name, environment, share)
        with _ends_in_order(machine, minutes):
            failed = finish_all(study, folder, jobs, machine)
    if machine.stopping.is_set():
        say("stopped before the end; the same command goes on")
    if failed:
        raise RunsFailedError("; ".join(failed))
    return not machine.stopping.is_set()


def _claim(study: Study, folder: Path) -> None:
    """Write what decides the study's runs into its folder, or raise StudyError if something else stands there."""
    texts = {"about", "question", "afterwards"}
    mark, content = folder / MARK, json.loads(study.model_dump_json(exclude=texts))
    recipe = json.loads(json.dumps(study.decided({}), default=str))
    if not mark.is_file():
        if any(folder.iterdir()):
            raise StudyError(f"{folder} is not empty and holds no study; name another folder with --output")
        write_text(mark, json.dumps({**content, RECIPE: recipe}, indent=1) + "\n")
        return
    before = json.loads(mark.read_text(encoding="utf-8"))
    begun = with_current_names(before.pop(RECIPE, {}))
    before = json.loads(Study.model_validate(before).model_dump_json(exclude=texts))
    if changed := sorted(key for key in {*begun, *recipe} if begun.get(key) != recipe.get(key)):
        differ = f"{', '.join(changed)} differ; put them back, or name another --output"
        raise StudyError(f"{folder} was begun with another {study.recipe}: {differ}")
    if changed := sorted(key for key in content if before[key] != content[key]):
        raise StudyError(f"{folder} holds another study: {', '.join(changed)} differ; name another with --output")


# The processes.


@dataclass
class Machine:
    """Hold the processes of a study, each with ``environment`` and a ``share`` of one device; threads share it."""

    device: str
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    share: float = 1.0
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)  # a signal may come while one is answered
    stopping: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """Ask every process to end: a training saves its state at the end of the rollout, an evaluation is redone."""
        self.stopping.set()
        with self.lock:
            for process in self.processes:
                process.send_signal(signal.SIGTERM)

    def call(self, arguments: Sequence[str], log: Path, gpu: str | None, *, beside: Sequence[Path] = ()) -> int | None:
        """Run ``qerl ARGUMENTS`` with its output appended to ``log``; return its exit code, None if it was not started.

        ``gpu`` is the one that it may see, None for all that this process sees. ``beside`` are the logs of other runs
        that it works for; they say where its output is, and the time is divided among all.
        """
        with self.lock:
            if self.stopping.is_set():
                return None
            stream = log.open("ab")
            stream.write(hidden(f"$ qerl {shlex.join(arguments)}\n").encode())
            stream.flush()
            for other in beside:
                with other.open("a", encoding="utf-8") as lines:
                    lines.write(f"$ qerl {arguments[0]} for this run and others: see {log}\n")
            environment = {**self.environment, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
            command = [sys.executable, "-m", CLI, *arguments]
            began = time.monotonic()
            process = processes.start(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
            self.processes.add(process)
        try:
            return process.wait()
        finally:
            processes.end(process)
            with self.lock:
                self.processes.discard(process)
            stream.close()
            seconds = (time.monotonic() - began) * self.share / (1 + len(beside))
            for one in (log, *beside):
                with (one.parent / TIMES).open("a", encoding="utf-8") as record:
                    record.write(json.dumps({"device": self.device, "seconds": round(seconds, 3)}) + "\n")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them; one alone needs no name."""
    names = visible_names()
    return names if len(names) > 1 else []


@contextlib.contextmanager
def _ends_in_order(machine: Machine, minutes: float | None) -> Iterator[None]:
    """Let SIGTERM, Ctrl-C and the end of ``minutes`` tell the runs to end, and wait for them."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: machine.stop()) for number in numbers]
    timer = threading.Timer(60 * (minutes or 0.0), machine.stop)
    timer.daemon = True
    if minutes is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# What is left to do, and who does it.


def take_together(study: Study, trained: list[Run], places: int) -> list[Run]:
    """Take from the runs that wait for their evaluations those to begin on one of ``places`` free places."""
    weights = _weights(study, trained[0])
    alike = [one for one in trained if _weights(study, one) == weights]
    together = alike[: -(-len(alike) // places)]
    trained[:] = [one for one in trained if one not in together]
    return together


def finish_all(study: Study, folder: Path, jobs: int, machine: Machine) -> list[str]:
    """Finish what is missing, each arm at its best value once its sweep is through; return why runs failed."""
    free = list(itertools.islice(itertools.cycle(visible_gpus() or [None]), jobs))
    untrained, trained, failed, begun = list[Run](), list[Run](), list[str](), list[str]()
    at_work: dict[Future[list[str]], tuple[str | None, list[Run], list[Run]]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            known = all_runs(study, folder)
            finished = {one.folder for one in known if is_finished(study, one, folder)}
            more = ", of those known yet" if study.sweep else ""
            say(f"{len(finished)} of {len(known)} runs are there{more}")
            for one in known:
                if one.folder not in finished.union(begun):
                    (trained if (folder / one.folder / one.trained).is_dir() else untrained).append(one)
                    begun.append(one.folder)
            while free and (untrained or trained):
                evaluations = sum(queue is trained for *_, queue in at_work.values())
                if trained and (not untrained or evaluations < max(1, jobs // EVALUATE)):
                    queue, runs = trained, take_together(study, trained, 1 if untrained else len(free))
                else:
                    queue, runs = untrained, [untrained.pop(0)]
                gpu = free.pop(0)
                task = pool.submit(_evaluate if queue is trained else _train, study, runs, folder, machine, gpu)
                at_work[task] = gpu, runs, queue
            if not at_work:
                return failed
            for task in wait(at_work, return_when=FIRST_COMPLETED).done:
                gpu, runs, queue = at_work.pop(task)
                reasons = task.result()
                places = [*free, *(place for place, *_ in at_work.values())]
                if reasons and gpu in places and any(_ran_full(folder / one.folder / LOG) for one in runs):
                    queue[:0] = runs
                    say(f"{len(places)} at a time from here on: more do not fit into the memory of the GPU")
                    continue
                free.append(gpu)
                failed += reasons
                if queue is untrained and not reasons and not machine.stopping.is_set():
                    trained += runs
                    trained.sort(key=lambda one: begun.index(one.folder))


def _train(study: Study, runs: Sequence[Run], root: Path, machine: Machine, gpu: str | None) -> list[str]:
    """Train one run; return why it failed."""
    (one,) = runs
    folder = root / one.folder
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not machine.stopping.is_set():
        # a killed study may have left a training behind, which saves its state and ends
        with contextlib.suppress(BlockingIOError), locked(folder, BlockingIOError()):
            break
        time.sleep(0.2)

    def attempt() -> int | None:
        own: dict[str, Any] = {"output_dir": str(folder)}
        if any(folder.glob("checkpoint-*")):
            own["resume_from_checkpoint"] = True
        command = [*TRAINERS[one.trainer], "--config", str(study.recipe), *one.flags, *flags(own)]
        return machine.call(command, folder / LOG, gpu)

    code = _begun_again(attempt, one, folder, machine)
    return [] if code == 0 else _failure(one, folder, code, machine)


def _evaluate(study: Study, runs: Sequence[Run], root: Path, machine: Machine, gpu: str | None) -> list[str]:
    """Evaluate runs together, or each on its own if that fails, as far as it is missing; return why runs failed."""

    def attempt() -> int | None:
        if not (missing := _evaluations(study, runs, root)):
            return 0
        log, *beside = (root / one.folder / LOG for one in runs)
        return machine.call(["evaluate-each", json.dumps(missing)], log, gpu, beside=beside)

    def apart(*parts: Sequence[Run]) -> list[str]:
        return [reason for part in parts for reason in _evaluate(study, part, root, machine, gpu)]

    if len(runs) > 1 and len(json.dumps(_evaluations(study, runs, root))) > ARGUMENT:
        return apart(runs[: len(runs) // 2], runs[len(runs) // 2 :])
    folder = root / runs[0].folder
    code = _begun_again(attempt, runs[0], folder, machine)
    if code != 0 and len(runs) > 1:
        return apart(*([one] for one in runs))
    if code != 0:
        return _failure(runs[0], folder, code, machine)
    for one in runs:
        say(f"{one.folder}: done, {accuracy(study, one, root):.1%}")
    return []


def _weights(study: Study, one: Run) -> tuple[Any, ...]:
    """Return what runs must agree on to be evaluated together; ``evaluate_each`` separates those that cannot be."""
    recipe = study.settled(one.keys)
    own = one.folder if one.trained == MODEL else recipe["model_name_or_path"]
    return own, recipe.get("quantization"), recipe.get("lora_r")


def _begun_again(attempt: Callable[[], int | None], one: Run, folder: Path, machine: Machine) -> int | None:
    """Return the exit code of a command, which is begun once more if it ended because its engine did not start.

    Of engines that start side by side one fails now and then: vLLM chooses a free port before it takes it, and may read
    a file of its compilation cache while another process writes it. A refusal, a training that has made a step, and
    what was told to end are left alone.
    """
    code = attempt()
    if code is None or code <= 0 or machine.stopping.is_set() or _ran_full(folder / LOG):
        return code
    has_steps = not (folder / one.trained).is_dir() and (folder / FILE).exists()
    reason = _reason(folder / LOG)
    if has_steps or (reason.startswith(REFUSED) and not reason.startswith(BESIDE_OTHERS)):
        return code
    say(f"{one.folder}: ended with {code} before it had made anything, and is begun once more")
    return attempt()


def _evaluations(study: Study, runs: Sequence[Run], root: Path) -> list[dict[str, Any]]:
    """Return the options of the missing evaluations; those of one name are neighbours, which may share an engine."""
    missing = []
    for name, one in itertools.product(study.evaluations, runs):
        folder, recipe = root / one.folder, study.settled(one.keys)
        options = study.evaluations_of(one).get(name)
        if options is None or (folder / "evaluation" / name / RESULT).is_file():
            continue
        settings = {
            "base": recipe["model_name_or_path"],
            "adapter": str(folder / "adapter"),
            "quantization": recipe.get("quantization", "qerl_nvfp4"),
            "adapter_only": one.kind == "sweep" or one.seed != study.seeds[0],
            "output_dir": str(folder / "evaluation" / name),
        }
        if one.trained == MODEL:
            settings |= {"base": str(folder / MODEL), "adapter": None, "adapter_only": False}
            if isinstance(own := recipe.get("generation_kwargs"), str):
                recipe["generation_kwargs"] = json.loads(own)
            renders = options.get("use_chat_template") is not False
            settings |= settled(recipe, options.get("temperature", 0), renders)
            settings["dtype"] = recipe.get("dtype")
        missing.append({**settings, **options})
    return missing


def _failure(one: Run, folder: Path, code: int | None, machine: Machine) -> list[str]:
    if machine.stopping.is_set():
        return []  # told to end; the next call goes on
    reason = _reason(folder / LOG)
    say(f"{one.folder}: failed: {reason}")
    return [f"{one.folder} ended with {code}: {reason} (all of it in {folder / LOG})"]


def _output(log: Path) -> list[str]:
    """Return the lines of the last command in a log."""
    text = log.read_text(encoding="utf-8", errors="replace").replace(CURSOR_UP, "")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[max((i for i, line in enumerate(lines, start=1) if line.startswith("$ ")), default=0) :]


def _ran_full(log: Path) -> bool:
    """Return whether the last command in a log found no room in the memory of its GPU."""
    return any(FULL.search(line) for line in _output(log))


def _reason(log: Path) -> str:
    """Return why the last command in a log has failed: its refusal, a GPU without room, or else its last line."""
    output = _output(log)
    refusals = [i for i, line in enumerate(output) if line.startswith(REFUSED)]
    if not refusals:
        return next(filter(FULL.search, output), output[-1] if output else "it said nothing")
    whole = itertools.takewhile(lambda line: not line.startswith(HINT), output[refusals[-1] :])
    return " ".join(line.strip() for line in whole)
