"""What a study has left to do, on as many places as it has jobs: trainings, and evaluations of what is trained.

The start of an engine takes longer than many an evaluation. So runs that wait for theirs on the same weights get it in
one process, on one engine. None waits for others to come: a few evaluations are at work at a time, and those that are
trained meanwhile are the next.
"""

import itertools
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl_recipes.files.whole_folder import lock
from qerl_recipes.machine.gpu import visible_names
from qerl_recipes.recipe.keys import CANNOT_RUN
from qerl_recipes.study.check import with_list
from qerl_recipes.study.plan import Run, Study, flags
from qerl_recipes.study.processes import Machine
from qerl_recipes.study.there import RESULT, all_runs, figures, is_finished

LOG, METRICS = "log.txt", "metrics.jsonl"
REFUSED = "qerl: "  # how a line begins in which a command says why it does not do what was asked
REFUSED_RECIPE = f"{REFUSED}{CANNOT_RUN}"  # and where that is for what stands in the recipe
HINT = "(QERL_TRACEBACK"  # and the one behind the last of these
PATIENCE = 120.0  # seconds for a training to end that a killed study has left behind
ARGUMENT = 100_000  # bytes; Linux takes an argument of 128 KiB
EVALUATE = 4  # one in so many jobs evaluates, while there is something to train


@dataclass
class Left:
    """The runs that wait, in the order of the plan, and how many evaluations are at work."""

    study: Study
    jobs: int
    untrained: list[Run] = field(default_factory=list)
    trained: list[Run] = field(default_factory=list)
    evaluations: int = 0
    reasons: dict[str, str] = field(default_factory=dict)

    def next(self, places: int) -> tuple[list[Run], bool]:
        """What to begin on one of ``places`` free ones -> (runs, whether they are trained); no runs where none waits.

        Once nothing is left to train, the free places share what is left to evaluate.
        """
        may_evaluate = not self.untrained or self.evaluations < max(1, self.jobs // EVALUATE)
        if self.trained and may_evaluate:
            weights = _weights(self.study, self.trained[0])
            together = [run for run in self.trained if _weights(self.study, run) == weights]
            if not self.untrained:
                together = together[: -(-len(together) // places)]
            self.trained = [run for run in self.trained if run not in together]
            return together, True
        return ([self.untrained.pop(0)] if self.untrained else []), False

    def refused(self, run: Run, reason: str) -> str | None:
        """Note why a training has failed. Where two of an arm were refused for the same, leave the others of it out,
        which differ in their seeds alone -> what is to be said of that."""
        known, self.reasons[run.label] = self.reasons.get(run.label), reason
        others = [one for one in self.untrained if one.label != run.label]
        count = len(self.untrained) - len(others)
        if reason != known or not reason.startswith(REFUSED_RECIPE) or not count:
            return None
        self.untrained = others
        return f"{count} more of {run.label} are not begun: two were refused for the same, and only seeds differ"


def finish_all(study: Study, folder: Path, jobs: int, machine: Machine) -> list[str]:
    """Finish what is missing -> what is to be said of the runs that failed. An arm whose sweep is through goes on at
    its best value while others are still at theirs."""
    free = list(itertools.islice(itertools.cycle(visible_gpus() or [None]), jobs))
    left, failed, begun = Left(study, jobs), list[str](), dict[str, float]()
    at_work: dict[Future[list[str]], tuple[str | None, list[Run], bool]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            known = all_runs(study, folder)
            there = {run.folder for run in known if is_finished(study, run, folder)}
            more = ", of those known yet" if study.sweep else ""
            machine.console.print(f"{len(there)} of {len(known)} runs are there{more}")
            for run in known:
                if run.folder not in begun.keys() | there:
                    (left.trained if (folder / run.folder / "adapter").is_dir() else left.untrained).append(run)
                    begun[run.folder] = time.monotonic()
            while free and (those := left.next(len(free)))[0]:
                runs, trained = those
                gpu = free.pop(0)
                task = pool.submit(_evaluate if trained else _train, study, runs, folder, machine, gpu, begun)
                at_work[task] = gpu, runs, trained
                left.evaluations += trained
            if not at_work:
                return failed
            done, _ = wait(at_work, return_when=FIRST_COMPLETED)
            for each in done:
                gpu, runs, trained = at_work.pop(each)
                free.append(gpu)
                left.evaluations -= trained
                failed += (reasons := each.result())
                if not trained and reasons and (line := left.refused(runs[0], _reason(folder / runs[0].folder / LOG))):
                    machine.console.print(line, markup=False, highlight=False)
                    failed.append(line)
                if not trained and not reasons and not machine.stopping.is_set():
                    left.trained = sorted([*left.trained, *runs], key=lambda run: list(begun).index(run.folder))


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them; none of one alone, which needs no name."""
    found = visible_names()
    return found if len(found) > 1 else []


def _train(
    study: Study, runs: Sequence[Run], root: Path, machine: Machine, gpu: str | None, begun: dict[str, float]
) -> list[str]:
    """Train one run -> what is to be said where that fails."""
    (run,) = runs
    folder = root / run.folder
    begun[run.folder] = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    _wait_for_the_last(folder, machine)

    def attempt() -> int | None:
        keys = {**run.keys, "seed": run.seed, "output_dir": str(folder)}
        if any(folder.glob("checkpoint-*")):
            keys["resume_from_checkpoint"] = True
        return machine.call(["train", "--config", str(study.recipe), *flags(keys)], folder / LOG, gpu)

    code = attempt()
    if _failed_to_start(code, folder, machine):
        _say_again(run, code, machine)
        code = attempt()
    return [] if code == 0 else _ended(run, folder, code, machine)


def _evaluate(
    study: Study, runs: Sequence[Run], root: Path, machine: Machine, gpu: str | None, begun: dict[str, float]
) -> list[str]:
    """Evaluate runs, as far as that is missing -> what is to be said of those where it fails.

    Where several fail together, each is evaluated on its own, and only those that fail then have failed.
    """

    def attempt() -> int | None:
        if not (missing := _evaluations(study, runs, root)):
            return 0
        log, *beside = (root / run.folder / LOG for run in runs)
        return machine.call(["evaluate-each", json.dumps(missing)], log, gpu, beside=beside)

    def apart(*parts: Sequence[Run]) -> list[str]:
        return [said for part in parts for said in _evaluate(study, part, root, machine, gpu, begun)]

    if len(runs) > 1 and len(json.dumps(_evaluations(study, runs, root))) > ARGUMENT:
        return apart(runs[: len(runs) // 2], runs[len(runs) // 2 :])
    code = attempt()
    run, folder = runs[0], root / runs[0].folder
    if _failed_to_start(code, folder, machine):
        _say_again(run, code, machine)
        code = attempt()
    if code != 0 and len(runs) > 1:
        return apart(*([one] for one in runs))
    if code != 0:
        return _ended(run, folder, code, machine)
    for run in runs:
        seconds, accuracy = time.monotonic() - begun[run.folder], figures(study, run, root)["accuracy"]
        machine.console.print(f"{run.folder}: done, {seconds:.0f} s, {accuracy:.1%}")
    return []


def _weights(study: Study, run: Run) -> tuple[Any, ...]:
    """What runs agree on whose evaluations may share an engine; where they do not, each gets one of its own all the
    same (`evaluate_each`)."""
    recipe = study.settled(run.keys)
    return recipe["model_name_or_path"], recipe.get("quantization"), recipe.get("lora_r")


def _say_again(run: Run, code: int | None, machine: Machine) -> None:
    machine.console.print(f"{run.folder}: ended with {code} before it had made anything, and is begun once more")


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


def _evaluations(study: Study, runs: Sequence[Run], root: Path) -> list[dict[str, Any]]:
    """The options of the evaluations of ``runs`` that are missing, those of a name behind each other: neighbours share
    an engine where they want the same one."""
    found = []
    for name, run in itertools.product(study.evaluations, runs):
        folder, recipe = root / run.folder, study.settled(run.keys)
        options = study.evaluations_of(run).get(name)
        if options is None or (folder / "evaluation" / name / RESULT).is_file():
            continue
        one = {
            "base": recipe["model_name_or_path"],
            "adapter": str(folder / "adapter"),
            "quantization": recipe.get("quantization", "qerl_nvfp4"),
            "adapter_only": not study.judges_base(run),
            "output_dir": str(folder / "evaluation" / name),
        }
        found.append({**one, **with_list(options)})
    return found


def _wait_for_the_last(folder: Path, machine: Machine) -> None:
    """A training of a study that was killed saves its state before it ends; wait for it, but not for ever."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not machine.stopping.is_set():
        try:
            os.close(lock(folder))
            return
        except BlockingIOError:
            time.sleep(0.2)


def _ended(run: Run, folder: Path, code: int | None, machine: Machine) -> list[str]:
    if machine.stopping.is_set():
        return []  # told to end; the next call goes on
    reason = _reason(folder / LOG)
    machine.console.print(f"{run.folder}: failed: {reason}", markup=False, highlight=False)
    return [f"{run.folder} ended with {code}: {reason} (all of it in {folder / LOG})"]


def _reason(log: Path) -> str:
    """Why the last command in a log has failed: the refusal, where it is one, else its last line."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    begins = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=-1)
    said = lines[begins + 1 :]
    refusals = [i for i, line in enumerate(said) if line.startswith(REFUSED)]
    if not refusals:
        return said[-1] if said else "it said nothing"
    whole = itertools.takewhile(lambda line: not line.startswith(HINT), said[refusals[-1] :])
    return " ".join(line.strip() for line in whole)
