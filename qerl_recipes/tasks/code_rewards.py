"""Reward programs by the tests that they pass: Open-R1's ``code`` and ``binary_code``.

Where a provider fails, the reward of a completion is None: TRL leaves it out of the mean, and
``rewards/NAME/unjudged`` counts the share of such completions. Open-R1 gives 0 instead, as for a wrong program.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.tasks.answers import Completion, text_of
from qerl_recipes.tasks.code_providers import judge_of
from qerl_recipes.tasks.interface import Reward

if TYPE_CHECKING:
    from datasets import Dataset

EXAMPLE = '{"language": "python", "test_cases": [{"input": "1 2", "output": "3"}]}'
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
ALL_PASSED = 0.99  # binary_code: the share of passed tests above which the reward is 1


def tests_of(verification_info: Any) -> list[tuple[str, str]]:
    """Return (input, expected output) of each test in ``verification_info``, such as EXAMPLE; else raise ValueError."""
    info = json.loads(verification_info) if isinstance(verification_info, str) else verification_info
    if not isinstance(info, Mapping) or not isinstance(info.get("test_cases"), list) or not info["test_cases"]:
        raise ValueError(f"there are no tests; write {EXAMPLE}")
    if info.get("language", "python") != "python":
        raise ValueError(f"the language is {info['language']!r}, and only python is run")
    for test in info["test_cases"]:
        if test.get("type", "stdin_stdout") not in (None, "stdin_stdout"):
            raise ValueError(f"a test has the type {test['type']!r}, and only stdin_stdout is run")
        if not (isinstance(test.get("input"), str) and isinstance(test.get("output"), str)):
            raise ValueError("a test must have the texts input and output")
    return [(test["input"], test["output"]) for test in info["test_cases"]]


def data_problems(reward: str, rows: "Dataset", split: str) -> Iterator[str]:
    """Yield a line for problems whose tests ``code`` and ``binary_code`` cannot run."""
    wrong = []
    for row, info in enumerate(rows["verification_info"], 1):
        try:
            tests_of(info)
        except ValueError as error:
            wrong.append((row, error))
    if wrong:
        yield (
            f"reward {reward} runs the tests in the column verification_info, which cannot be done in {len(wrong)} of "
            f"the {len(rows)} rows of the {split} data, the first of them row {wrong[0][0]}: {wrong[0][1]}; leave "
            "these problems out"
        )


def code(script: ScriptArguments) -> Reward:
    """Return a reward: the share of tests that the program in a completion's last ``python`` block passes.

    ``tests_of`` describes the column ``verification_info``. A test passes if the program ends with status 0 and writes
    the expected lines; Open-R1 also accepts the first of several lines alone. The reward is 0 without a block, and once
    a test takes longer than 5 seconds, or all of them 30: with ``code_provider: local`` of CPU time, beside 11 seconds
    in which a test may sleep.
    """
    return _reward("code", script, float)


def binary_code(script: ScriptArguments) -> Reward:
    """Return a reward: 1 if the reward ``code`` is above 0.99, else 0."""
    return _reward("binary_code", script, lambda share: float(share > ALL_PASSED))


def _reward(name: str, script: ScriptArguments, value: Callable[[float], float]) -> Reward:
    """Return the reward ``name``: the ``value`` of the share of passed tests, and None where it is not known.

    It scores ``parallel_code_exec_per_proc`` completions at a time.
    """
    judge = judge_of(script)
    warned = False

    def reward(
        completions: list[Completion],
        verification_info: list[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **others: Any,
    ) -> list[float | None]:
        nonlocal warned
        failures: list[Exception] = []

        def score(text: str, info: Any) -> float | None:
            *_, program = ["", *BLOCK.findall(text)]
            try:
                return value(judge(program, tests_of(info)) if program else 0.0)
            except Exception as error:
                failures.append(error)
                return None

        with ThreadPoolExecutor(script.parallel_code_exec_per_proc) as pool:
            scores = list(pool.map(score, map(text_of, completions), verification_info))
        if log_metric is not None:
            log_metric(f"rewards/{name}/unjudged", len(failures) / len(completions))
        if failures and not warned:
            warned = True
            warnings.warn(
                f"reward {name}: {len(failures)} of {len(completions)} programs could not be judged and have no "
                f"reward, the first because of {type(failures[0]).__name__}: {failures[0]}. Later ones are counted in "
                f"rewards/{name}/unjudged, without a warning",
                stacklevel=2,
            )
        return scores

    reward.__name__ = name
    return reward
