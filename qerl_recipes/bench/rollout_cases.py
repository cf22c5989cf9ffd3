"""What ``qerl bench rollout`` measures: cases, and the orders that their repeats are."""

from collections.abc import Sequence
from typing import NamedTuple

PREFILLED = 64  # prompts of the prefill, each as long as the engine allows
WARM_UP_TOKENS = 16


class Case(NamedTuple):
    """``batch`` sequences of ``input`` tokens, with ``output`` tokens sampled for each."""

    batch: int
    input: int
    output: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.input} in, {self.output} out"


class Order(NamedTuple):
    """A case, once. Its prompts follow from ``number``, that of the case, and ``repeat`` alone, so that all arms have
    the same; repeat 0 warms up."""

    number: int
    repeat: int
    batch: int
    input: int
    output: int


def make_cases(batch: Sequence[int], input_len: Sequence[int], output_len: Sequence[int]) -> list[Case]:
    """The lists side by side; one of a single number counts for all. Raises ValueError for anything else."""
    lists = {"batch": batch, "input_len": input_len, "output_len": output_len}
    longest = max(map(len, lists.values()))
    for name, numbers in lists.items():
        if not numbers or min(numbers) < 1 or len(numbers) not in (1, longest):
            raise ValueError(f"{name} is {list(numbers)}; give one number, or {longest} of them, each at least 1")
    if min(output_len) < 2:
        raise ValueError("output_len is at least 2: the first token comes with the prefill")
    return [Case(*numbers) for numbers in zip(*(list(n) * (longest // len(n)) for n in lists.values()), strict=True)]


def length(cases: Sequence[Case]) -> int:
    """Tokens of the longest sequence."""
    return max(case.input + case.output for case in cases)


def sequences(cases: Sequence[Case]) -> int:
    """The most sequences that are computed at a time."""
    return max(*(case.batch for case in cases), PREFILLED)


def prefill(cases: Sequence[Case]) -> Case:
    """The prefill by itself: of prompts as long as the longest sequence."""
    return Case(PREFILLED, length(cases) - 1, 1)


def rows(cases: Sequence[Case]) -> list[tuple[int, int]]:
    """All that is measured, as (sequences at a time, tokens of each)."""
    return [*((case.batch, case.input + case.output) for case in cases), (PREFILLED, length(cases))]


def orders(number: int, case: Case, repeats: int) -> list[Order]:
    """A warm-up of few tokens, and the repeats."""
    warm_up = case._replace(output=min(case.output, WARM_UP_TOKENS))
    return [Order(number, 0, *warm_up), *(Order(number, repeat, *case) for repeat in range(1, repeats + 1))]
