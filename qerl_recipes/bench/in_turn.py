"""The arms of ``qerl bench rollout`` take turns: each case is repeated arm by arm, so that what changes about the GPU
while it is measured changes for all of them. One arm works at a time, and the others wait without a processor; the
workers of an engine on several GPUs do so from a second after their last work on (vLLM's ``SpinCondition``).
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from qerl_recipes.bench import rollout_cases
from qerl_recipes.bench.process import Arm, ArmFailedError
from qerl_recipes.bench.rollout_cases import Case

Found = dict[str, Any]
BUSY = 1.0  # seconds for which workers of an engine on several GPUs look for more work without sleeping


def pause(arms: int, tensor_parallel: int) -> float:
    """Seconds between two turns: where there is not a processor for every process, the workers of the arm before
    would take one from those that are measured, for a second each time."""
    processes = arms * (1 + tensor_parallel)
    is_crowded = tensor_parallel > 1 and arms > 1 and processes > len(os.sched_getaffinity(0))
    return 1.2 * BUSY if is_crowded else 0.0


def take_turns(
    module: str,
    requests: Mapping[str, Found],
    cases: Sequence[Case],
    repeats: int,
    note: Callable[[str, Found], None],
    rest: float = 0.0,
) -> None:
    """Start the arms, all at once, and measure every case with each of them, ``repeats`` times in turn, with a ``rest``
    of so many seconds before each turn.

    ``requests``: of every arm by its name, what ``module`` is asked. ``note`` is called with an arm's name and what was
    found of it, piece by piece: what it says when it is ready; ``cases`` of one row; ``prefill``; or why it ``failed``.
    Then the others go on.
    """
    with _started(module, requests) as arms:

        def in_turn(work: Callable[[Arm], Found]) -> dict[str, Found]:
            """What every arm that is left answers; one that fails is left no more."""
            answers: dict[str, Found] = {}
            for name, arm in list(arms.items()):
                try:
                    answers[name] = work(arm)
                except ArmFailedError as error:
                    arms.pop(name).end()  # its memory may be what the others need
                    note(name, {"failed": str(error)})
            return answers

        def seconds(number: int, case: Case) -> dict[str, list[float]]:
            taken: dict[str, list[float]] = {name: [] for name in arms}
            for order in rollout_cases.orders(number, case, repeats):
                told = order._asdict()

                def turn(arm: Arm, told: Found = told) -> Found:
                    time.sleep(rest)
                    return arm.ask(told)

                answers = in_turn(turn)
                if order.repeat:
                    for name, answer in answers.items():
                        taken[name].append(answer["seconds"])
            return {name: taken[name] for name in arms}

        for name, said in in_turn(Arm.hear).items():
            note(name, said)
        for number, case in enumerate(cases):
            first, whole = seconds(number, case._replace(output=1)), seconds(number, case)
            for name, each in whole.items():
                note(name, {"cases": [{**case._asdict(), "seconds": each, "prefill_seconds": first[name]}]})
        prompts = rollout_cases.prefill(cases)
        for name, each in seconds(len(cases), prompts).items():
            note(name, {"prefill": {"tokens": prompts.batch * prompts.input, "seconds": each}})


@contextmanager
def _started(module: str, requests: Mapping[str, Found]) -> Iterator[dict[str, Arm]]:
    """The arms by name; one that is taken out of them has been ended."""
    arms: dict[str, Arm] = {}
    try:
        for name, request in requests.items():
            arms[name] = Arm(module, request)
        yield arms
    finally:
        with ThreadPoolExecutor(len(requests) or 1) as pool:  # all at once: each may take its time
            for _ in pool.map(Arm.end, arms.values()):
                pass
