"""Reward programs by the tests that they pass: Open-R1's ``code``, ``binary_code``, ``cf_code`` and ``ioi_code``.

Where a provider fails, the reward of a completion is None: TRL leaves it out of the mean, and
``rewards/NAME/unjudged`` counts the share of such completions. Open-R1 gives 0 instead, as for a wrong program.
"""

import functools
import inspect
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks.answers import Completion, text_of
from qerl_recipes.tasks.code_providers import Piston, judge_of
from qerl_recipes.tasks.interface import Reward

if TYPE_CHECKING:
    from datasets import Dataset

Scorer = Callable[[str, Mapping[str, Any]], "float | None"]  # (text of a completion, columns of its row)
EXAMPLE = '{"language": "python", "test_cases": [{"input": "1 2", "output": "3"}]}'
ALL_PASSED = 0.99  # binary_code: the share of passed tests above which the reward is 1
NO_PROGRAM, NOT_COMPILED = -1.0, -0.1  # cf_code
SCORING_MODES = ("pass_fail", "partial", "weighted_sum")
CF_TESTS = "CF_TESTS_FOLDER"  # environment variable, as in Open-R1


def last_block(text: str, language: str) -> str:
    """Return the content of the last code block of a language in a text, or "" without one."""
    blocks = re.findall(rf"```{re.escape(language)}\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else ""


def tests_of(verification_info: Any) -> list[tuple[str, str]]:
    """Return the (input, expected output) of each test in ``verification_info``, a mapping or its JSON text.

    It has the ``language`` python and ``test_cases``, mappings with these two texts. Raises ValueError for anything
    else.
    """
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

    The column ``verification_info`` has the tests; ``tests_of`` says how. A test passes if the program ends with
    status 0 and writes the expected lines; Open-R1 also accepts the first of several lines alone. Without a block the
    reward is 0, and also once a test takes longer than 5 seconds, or all of them 30. With ``code_provider: local``
    these are seconds of CPU time, so that the load of the machine changes no reward; a program may also sleep 11
    seconds in a test. Raises what ``judge_of`` raises.
    """
    return _reward("code", _share(script), script.parallel_code_exec_per_proc, "verification_info")


def binary_code(script: ScriptArguments) -> Reward:
    """Return a reward: 1 if the reward ``code`` is above 0.99, else 0."""
    share = _share(script)

    def scored(text: str, problem: Mapping[str, Any]) -> float:
        return float(share(text, problem) > ALL_PASSED)

    return _reward("binary_code", scored, script.parallel_code_exec_per_proc, "verification_info")


def _share(script: ScriptArguments) -> Callable[[str, Mapping[str, Any]], float]:
    judge = judge_of(script)

    def share(text: str, problem: Mapping[str, Any]) -> float:
        program = last_block(text, "python")
        return judge(program, tests_of(problem["verification_info"])) if program else 0.0

    return share


def _reward(name: str, scored: Scorer, parallel: int, *columns: str) -> Reward:
    """Return the reward ``name``, which scores ``parallel`` completions at a time and needs ``columns`` of the data.

    Where ``scored(text, row)`` raises an exception, the score is None, and the first time there is a warning.
    """
    warned = False

    def reward(
        completions: list[Completion], log_metric: Callable[[str, float], None] | None = None, **given: Any
    ) -> list[float | None]:
        nonlocal warned
        lists = {column: values for column, values in given.items() if isinstance(values, list)}
        problems = [{column: values[i] for column, values in lists.items()} for i in range(len(completions))]
        failures: list[Exception] = []

        def score(text: str, problem: Mapping[str, Any]) -> float | None:
            try:
                return scored(text, problem)
            except Exception as error:
                failures.append(error)
                return None

        with ThreadPoolExecutor(parallel) as pool:
            scores = list(pool.map(score, map(text_of, completions), problems))
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

    needed = [inspect.Parameter(column, inspect.Parameter.KEYWORD_ONLY) for column in ("completions", *columns)]
    rest = inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD)
    reward.__name__ = name
    reward.__signature__ = inspect.Signature([*needed, rest])  # type: ignore[attr-defined]
    return reward


def cf_code(script: ScriptArguments) -> Reward:
    """Return a reward for Codeforces problems, whose tests run on Piston servers with Open-R1's packages.

    The columns are those of the data set open-r1/codeforces, configuration verifiable-prompts. The reward is -1 without
    a code block of the row's ``language``, -0.1 if the program cannot be compiled, and None without tests. Else
    ``code_eval_scoring_mode`` decides: ``pass_fail`` is 1 if all tests pass, else 0; ``partial`` is the share of passed
    tests; ``weighted_sum`` is ``pass_fail`` and a tenth of ``partial``. ``code_eval_test_batch_size`` tests run at a
    time, all if it is below 1; ``pass_fail`` ends with the first batch in which a test fails.

    To the official tests come those generated by Open-R1, if ``CF_TESTS_FOLDER`` names the folder with them.
    """
    mode, size = script.code_eval_scoring_mode, script.code_eval_test_batch_size
    if mode not in SCORING_MODES:
        raise ConfigError(f"code_eval_scoring_mode cannot be {mode!r}; it is one of {', '.join(SCORING_MODES)}")
    piston = Piston("reward cf_code")
    if (folder := os.environ.get(CF_TESTS)) is None:
        warnings.warn(f"reward cf_code runs the official tests alone, for {CF_TESTS} is not set", stacklevel=2)

    def scored(text: str, problem: Mapping[str, Any]) -> float | None:
        language = problem["language"]
        if language not in ("python", "cpp"):
            raise ValueError(f"the language is {language!r}, neither python nor cpp")
        tests = list(problem["official_tests"] or ())
        if folder is not None:
            tests += _generated_tests(folder, int(problem["id"].split("/")[0])).get(problem["id"], ())
        if not tests:
            return None
        program = last_block(text, language)
        if not program:
            return NO_PROGRAM

        def passes(test: Mapping[str, str]) -> bool | None:
            """Return None if the program cannot be compiled."""
            answer = piston.execute(_codeforces_request(program, language, problem, test), problem["time_limit"] + 60)
            if (answer.get("compile") or {}).get("code"):
                return None
            return answer["run"]["code"] == 0 and answer["run"]["stdout"].strip() == "1"

        passed = 0
        for results in _in_batches(passes, tests, size):
            if None in results:
                return NOT_COMPILED
            passed += sum(map(bool, results))
            if mode == "pass_fail" and not all(results):
                break
        all_passed, share = float(passed == len(tests)), passed / len(tests)
        return {"pass_fail": all_passed, "partial": share, "weighted_sum": all_passed + 0.1 * share}[mode]

    columns = "id", "language", "official_tests", "time_limit", "memory_limit", "input_mode"
    return _reward("cf_code", scored, piston.places, *columns)


def _codeforces_request(
    program: str, language: str, problem: Mapping[str, Any], test: Mapping[str, str]
) -> dict[str, Any]:
    limits = {"TIME_LIMIT": "time_limit", "MEMORY_LIMIT": "memory_limit", "INPUT_MODE": "input_mode"}
    files = {
        f"main.{language}": program,
        "checker.py": problem.get("generated_checker"),
        "input.txt": test["input"],
        "correct_output.txt": test["output"],
        "grader_config": "\n".join(f"{name}={problem[column]}" for name, column in limits.items()),
    }
    return {
        "language": "cf_python3" if language == "python" else "c++17",
        "files": [{"name": name, "content": content} for name, content in files.items() if content is not None],
        "run_timeout": int(1000 * (problem["time_limit"] + 10)),  # the package itself watches over time_limit
    }


@functools.lru_cache(maxsize=32)
def _generated_tests(folder: str, contest: int) -> dict[str, list[Mapping[str, str]]]:
    """Return Open-R1's tests of the problems of a contest, by problem."""
    import pyarrow.parquet

    file = Path(folder, f"test_cases_{contest:04d}.parquet")
    tests: dict[str, list[Mapping[str, str]]] = {}
    for row in pyarrow.parquet.read_table(file).to_pylist() if file.exists() else ():
        tests.setdefault(row["problem_id"], []).append(row)
    return tests


def ioi_code(script: ScriptArguments) -> Reward:
    """Return a reward for subtasks of the IOI, whose tests run on Piston servers with Open-R1's package ``cms_ioi``.

    The columns are those of the data set open-r1/ioi; the program is the last ``cpp`` block. The reward is the lowest
    score of a test, rounded to ``score_precision`` digits; 0 without a block. ``code_eval_test_batch_size`` tests run
    at a time (below 1: all), to the first batch in which one scores 0. Tests come from the column ``test_cases``, else
    from open-r1/ioi-test-cases. Raises ConfigError for ``ioi_provider: morph``, which is not built in.
    """
    if script.ioi_provider != "piston":
        raise ConfigError(f"ioi_provider: {script.ioi_provider} is not built in; use ioi_provider: piston")
    piston = Piston("reward ioi_code")

    def scored(text: str, problem: Mapping[str, Any]) -> float:
        program = _with_headers(last_block(text, "cpp"), problem["id"])
        if not program:
            return 0.0
        tests = problem.get("test_cases") or _ioi_tests(problem["year"])[problem["id"]]
        if not isinstance(tests, Mapping):
            tests = dict(zip(problem["test_names"], tests, strict=True))

        def score(name: str) -> float:
            answer = piston.execute(_ioi_request(program, problem, *tests[name]), problem["time_limit"] + 60)
            return _ioi_score(answer)

        scores: list[float] = []
        for results in _in_batches(score, problem["test_names"], script.code_eval_test_batch_size):
            scores += results
            if 0.0 in results:
                break
        return round(min(scores), problem["score_precision"])

    columns = "id", "year", "test_names", "time_limit", "memory_limit", "score_precision", "grader_files"
    return _reward("ioi_code", scored, piston.places, *columns)


def _with_headers(program: str, problem: str) -> str:
    """Return a program with what models forget: the headers of C++ and of the problem, and the namespace std."""
    if not program:
        return ""
    lines = ["#include <bits/stdc++.h>"]
    if f'#include "{problem}.h"' not in program:
        lines.append(f'#include "{problem}.h"')
    if "using namespace std;" not in program and "std::" not in program:
        lines.append("using namespace std;")
    return "\n".join([*lines, program])


def _ioi_request(program: str, problem: Mapping[str, Any], given: str, expected: str | None) -> dict[str, Any]:
    files = {f"graders/{problem['id'].lower()}.cpp": program, "input.txt": given}
    if expected:
        files["correct_output.txt"] = expected
    files |= {name: content for name, content in problem["grader_files"] if content}
    return {
        "language": "cms_ioi",
        "files": [{"name": name, "content": content} for name, content in files.items()],
        "run_timeout": round(1000 * (problem["time_limit"] + 3)),  # the package itself watches over time_limit
        "run_memory_limit": problem["memory_limit"],
    }


def _ioi_score(answer: Mapping[str, Any]) -> float:
    """Return the score of a test: 0 for a program that cannot be compiled, or runs out of time or memory."""
    if (answer.get("compile") or {}).get("code"):
        return 0.0
    run = answer["run"]
    if run["code"] == 1 and "MemoryError" in run["stderr"]:
        return 0.0
    if run["stdout"]:
        return float(run["stdout"])
    if run["signal"] == "SIGKILL" or run["code"] == 0:
        return 0.0
    raise RuntimeError(f"the grader ended with {run['code']}: {run['stderr'][:300]}")


@functools.cache
def _ioi_tests(year: int) -> dict[str, dict[str, tuple[str, str]]]:
    from datasets import load_dataset

    tests: dict[str, dict[str, tuple[str, str]]] = {}
    for test in load_dataset("open-r1/ioi-test-cases", name=str(year), split="train"):
        tests.setdefault(test["problem_id"], {})[test["test_name"]] = test["test_input"], test["test_output"]
    return tests


def _in_batches(function: Callable[[Any], Any], tests: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Yield the results of ``size`` tests, which run side by side, batch after batch; of all if it is below 1."""
    size = size if size >= 1 else len(tests)
    with ThreadPoolExecutor(size) as pool:
        for start in range(0, len(tests), size):
            yield list(pool.map(function, tests[start : start + size]))
