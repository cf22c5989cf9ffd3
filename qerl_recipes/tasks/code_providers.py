"""Run the programs of completions against test cases: on this machine, or where Open-R1 runs them.

``judge_of(script)`` returns the judge that ``code_provider`` names: ``local`` runs each test in ``sandbox``, ``e2b``
and ``morph`` get one script with all tests of a completion, and ``piston`` a request for each. A judge raises an
exception where its provider fails, which says nothing about the program.
"""

import inspect
import json
import math
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import sandbox

Judge = Callable[[str, Sequence[Sequence[str]]], float]  # (program, [(input, expected output)]) -> 0 to 1
SECONDS, TOTAL_SECONDS = 5.0, 30.0  # of a test; of all tests of a completion
LIFETIME = int(TOTAL_SECONDS + SECONDS) + 5  # seconds, of a sandbox elsewhere
ENDPOINTS, REQUESTS = "PISTON_ENDPOINTS", "PISTON_MAX_REQUESTS_PER_ENDPOINT"  # environment variables, as in Open-R1
TRIES, PAUSE = 3, 1.0  # of a request to Piston; seconds between the first two
INSTEAD = "; or use code_provider: local, which runs programs on this machine"


class ProviderError(RuntimeError):
    """Report that a provider has not run a program."""


def same_output(written: str, expected: str) -> bool:
    """Return True if two outputs have the same lines, white space around them and around the whole left out."""
    lines, others = written.strip().split("\n"), expected.strip().split("\n")
    return [line.strip() for line in lines] == [line.strip() for line in others]


def share_of_passed(run, program, tests, seconds, total):  # type: ignore[no-untyped-def]
    """Return the share of tests that a program passes: it ends with status 0 and writes the expected output.

    It is 0 as soon as the program takes longer than ``seconds`` in a test, or ``total`` in all, as in Open-R1.
    ``run(program, given, seconds) -> (status, output, seconds taken)``, or None where the time has run out. This
    function is also sent to other machines, so it must need nothing but the standard library.
    """
    passed, left = 0, total
    for given, expected in tests:
        ended = run(program, given, seconds) if left > 0 else None
        if ended is None:
            return 0.0
        status, output, taken = ended
        passed += status == 0 and same_output(output, expected)
        left -= taken
    return passed / len(tests)


def run_in_a_process(program, given, seconds):  # type: ignore[no-untyped-def]
    """Run a program without limits on anything but time, in a sandbox that somebody else has set up."""
    begin = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            input=given.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return None
    return ended.returncode, ended.stdout.decode(errors="replace"), time.monotonic() - begin


def judge_of(script: ScriptArguments) -> Judge:
    """Return the judge that ``code_provider`` names; raise ConfigError for an unknown one or what it lacks."""
    providers = {"e2b": _e2b, "local": _local, "morph": _morph, "piston": _piston}
    if script.code_provider not in providers:
        raise ConfigError(f"code_provider cannot be {script.code_provider!r}; it is one of {', '.join(providers)}")
    if script.parallel_code_exec_per_proc < 1:
        raise ConfigError(f"parallel_code_exec_per_proc must be at least 1, not {script.parallel_code_exec_per_proc}")
    return providers[script.code_provider](script)


def python_tool(script: ScriptArguments) -> Callable[[str], str]:
    """Return the tool ``python``; raise ConfigError without ``code_provider: local``, or limits on programs here."""
    if script.code_provider != "local":
        raise ConfigError(
            f"the tool python runs programs on this machine, not with code_provider: {script.code_provider}; use "
            "code_provider: local, whose limits are no isolation"
        )
    _check_limits()
    return sandbox.python


def _check_limits() -> None:
    try:
        sandbox.kind()
    except sandbox.SandboxError as error:
        raise ConfigError(f"code_provider: local {error}") from error


def _local(script: ScriptArguments) -> Judge:
    _check_limits()

    def run(program: str, given: str, seconds: float) -> tuple[int, str, float] | None:
        outcome = sandbox.run(program, given, seconds=seconds, output_bytes=sandbox.DISK)
        return None if outcome.status is None else (outcome.status, outcome.output, outcome.cpu_seconds)

    return lambda program, tests: share_of_passed(run, program, tests, SECONDS, TOTAL_SECONDS)


def _elsewhere(result_of: Callable[[str], Any]) -> Judge:
    """Return a judge with a provider that runs whole scripts; ``result_of(script)`` is what a script gives."""

    functions = "\n\n".join(inspect.getsource(each) for each in (same_output, share_of_passed, run_in_a_process))

    def judge(program: str, tests: Sequence[Sequence[str]]) -> float:
        arguments = json.dumps([program, [list(test) for test in tests], SECONDS, TOTAL_SECONDS])
        last_line = f"share_of_passed(run_in_a_process, *json.loads({arguments!r}))"  # its value is the result
        result = str(result_of(f"import json, subprocess, sys, time\n\n{functions}\n{last_line}\n"))
        try:
            share = float(result.strip().rpartition("\n")[2])  # other lines are the program's
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            raise ProviderError(f"the script gave no share of passed tests but {result[-200:]!r}")
        return share

    return judge


def _needed(variable: str, provider: str) -> str:
    if not (value := os.environ.get(variable, "")):
        raise ConfigError(f"code_provider: {provider} needs the environment variable {variable}{INSTEAD}")
    return value


def _e2b(script: ScriptArguments) -> Judge:
    try:
        from e2b_code_interpreter import Sandbox
    except ImportError as error:
        raise ConfigError(f"code_provider: e2b needs a package: pip install e2b-code-interpreter{INSTEAD}") from error
    _needed("E2B_API_KEY", "e2b")

    def result_of(tests: str) -> Any:
        with Sandbox.create(timeout=LIFETIME) as machine:
            execution = machine.run_code(tests, language="python", timeout=LIFETIME)
        if execution.error is not None:
            raise ProviderError(f"e2b: {execution.error.name}: {execution.error.value}")
        return execution.text

    return _elsewhere(result_of)


def _morph(script: ScriptArguments) -> Judge:
    try:
        from morphcloud.api import MorphCloudClient
        from morphcloud.sandbox import Sandbox
    except ImportError as error:
        raise ConfigError(f"code_provider: morph needs a package: pip install 'morphcloud<0.1.80'{INSTEAD}") from error
    client = MorphCloudClient(api_key=_needed("MORPH_API_KEY", "morph"))

    def result_of(tests: str) -> Any:
        machine = Sandbox.new(client=client, ttl_seconds=LIFETIME)
        try:
            return machine.run_code(tests, language="python", timeout=LIFETIME).text
        finally:
            machine.close()
            machine.shutdown()

    return _elsewhere(result_of)


def _piston(script: ScriptArguments) -> Judge:
    """Return the judge that asks the servers of ``PISTON_ENDPOINTS``, the next one that is free.

    The addresses are separated by commas and end in /api/v2. Each server has at most
    ``PISTON_MAX_REQUESTS_PER_ENDPOINT`` requests at a time, by default 1.
    """
    addresses = [address.strip() for address in os.environ.get(ENDPOINTS, "").split(",") if address.strip()]
    if not addresses or not all(address.startswith("http") for address in addresses):
        raise ConfigError(
            f"code_provider: piston needs the environment variable {ENDPOINTS}, the addresses of Piston servers, "
            "such as http://127.0.0.1:2000/api/v2, separated by commas"
        )
    if not (most := os.environ.get(REQUESTS, "1")).isdecimal() or most == "0":
        raise ConfigError(f"{REQUESTS} must be a number of requests, at least 1, not {most!r}")
    free: queue.Queue[str] = queue.Queue()
    for address in addresses * int(most):
        free.put(address)

    def run(program: str, given: str, seconds: float) -> tuple[int, str, float] | None:
        files = [{"name": "main.py", "content": program}]
        request = {"language": "python", "version": "*", "files": files, "stdin": given}
        body = json.dumps({**request, "run_timeout": int(1000 * seconds)}).encode()
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            address = free.get()
            asked = Request(f"{address.rstrip('/')}/execute", body, {"Content-Type": "application/json"})
            begin = time.monotonic()
            try:
                with urlopen(asked, timeout=seconds + 30) as reply:
                    answer = json.load(reply)
                ended, taken = answer.get("run"), time.monotonic() - begin
                if ended and "Resource temporarily unavailable" not in (ended["stderr"] or ""):
                    return None if ended["signal"] == "SIGKILL" else (ended["code"], ended["stdout"], taken)
                failure = f"did not run the program: {json.dumps(answer)[:300]}"
            except HTTPError as error:
                failure = f"answered {error.code}: {error.read(300).decode(errors='replace')}"
            except (OSError, ValueError) as error:
                failure = str(error)
            finally:
                free.put(address)
        raise ProviderError(f"{address}: {failure}")

    return lambda program, tests: share_of_passed(run, program, tests, SECONDS, TOTAL_SECONDS)
