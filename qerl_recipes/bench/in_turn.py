"""The arms of ``qerl bench rollout`` take turns: each case is repeated arm by arm, so that what changes about the GPU
while it is measured changes for all of them. One arm works at a time, and the others wait without a processor (the
workers of an engine on several GPUs do so a second after their last work; until then they look for more).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from qerl_recipes.bench import rollout_cases
from qerl_recipes.bench.process import Arm, ArmFailedError
from qerl_recipes.bench.rollout_cases import Case

Found = dict[str, Any]


def take_turns(
    module: str,
    requests: Mapping[str, Found],
    cases: Sequence[Case],
    repeats: int,
    note: Callable[[str, Found], None],
) -> None:
    """Start the arms, all at once, and measure every case with each of them, ``repeats`` times in turn.

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
                answers = in_turn(lambda arm, order=order: arm.ask(order._asdict()))  # type: ignore[misc]
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
        for arm in arms.values():  # all at once
            arm.dismiss()
        for arm in arms.values():
            arm.end()
