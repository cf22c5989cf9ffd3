"""Use an environment that runs in an interpreter of its own, with other versions of packages than the trainer's.

Each instance has a process. If it dies or hangs, one episode is lost and not those that run beside it. Instances are
made once and reset for each episode, so that a class is imported only as often as a batch has episodes.
"""

import contextlib
import inspect
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import typing
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qerl_recipes.machine import processes
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks.interface import Environment

logger = logging.getLogger(__name__)

SERVER = Path(__file__).with_name("environment_server.py")
PATIENCE = 300.0  # seconds for import, constructor, reset and reward


class EnvironmentLost(RuntimeError):
    """Report that an environment's process has died or did not answer, which ends its episode."""


def in_its_own_interpreter(
    python: str, path: str, arguments: Mapping[str, Any], seconds: float | None
) -> Callable[[], Environment]:
    """Return a function that makes the environment at ``path`` in processes of the interpreter ``python``.

    What it makes has the class's methods, with the same names, types and docstrings. A tool has ``seconds``, or
    PATIENCE if that is None. Raises ConfigError if the environment cannot be made in the first process.
    """
    executable = shutil.which(Path(python).expanduser())
    if executable is None:
        raise ConfigError(f"environment_python: {python} is no program; name an interpreter, such as VENV/bin/python")
    if "." not in path and ":" not in path:
        raise ConfigError(
            f"environments: {path} is a name in the trainer's own interpreter; with environment_python give the dotted "
            "path of a class, such as my_package.MyEnvironment"
        )
    line = [executable, str(SERVER), path, json.dumps(arguments)]
    first = Process(line)
    try:
        description = first.description()
    except EnvironmentLost as error:
        raise ConfigError(f"environments: {path} in {python}: {error}") from error
    ready = [first]
    methods = {
        name: _method(name, method, PATIENCE if seconds is None or name in ("reset", "get_reward") else seconds)
        for name, method in description["methods"].items()
    }
    own = {**methods, "_process": None, "_start": lambda self: ready.pop() if ready else Process(line)}
    return type(description["name"], (_Remote,), own)  # one class: TRL tells environments by it


class _Remote:
    """Hold one environment's process, and ask it; the names of its methods are those of the class there."""

    _process: "Process | None"
    _start: Callable[[], "Process"]

    def __init__(self) -> None:
        self._process = self._start()
        self._lost = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._ask({"name": name}, PATIENCE)

    def _called(self, name: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        request = {"name": name, "arguments": arguments}
        if name == "reset":
            if self._process is not None:
                with contextlib.suppress(EnvironmentLost):
                    return self._ask(request, seconds)
            self._process = self._start()  # the episode has not begun: another process can begin it
            return self._ask(request, seconds)
        if self._process is None and name == "get_reward":
            return None
        return self._ask(request, seconds)

    def _ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        if self._process is None:
            raise EnvironmentLost(self._lost)
        try:
            answer = self._process.ask(request, seconds)
        except BaseException as error:  # a time limit is one
            self._process.end()
            self._process = None
            self._lost = f"environment {type(self).__name__}: {error} in {request['name']}; the episode has ended"
            logger.warning("%s. The run goes on", self._lost)
            if isinstance(error, EnvironmentLost):
                raise EnvironmentLost(self._lost) from error
            raise
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


def _method(name: str, method: Mapping[str, Any], seconds: float) -> Callable[..., Any]:
    """Return a method with the signature and the docstring of one in another interpreter."""

    def call(self: _Remote, *args: Any, **arguments: Any) -> Any:
        bound = signature.bind(self, *args, **arguments)
        given = dict(list(bound.arguments.items())[1:])
        for variable in (one.name for one in parameters if one.kind is one.VAR_KEYWORD):
            given |= given.pop(variable, {})
        return self._called(name, given, seconds)

    parameters = [
        inspect.Parameter(
            one["name"],
            inspect._ParameterKind(one["kind"]),
            default=one["default"][0] if one["default"] else inspect.Parameter.empty,
            annotation=inspect.Parameter.empty if one["type"] is None else one["type"],
        )
        for one in method["parameters"]
    ]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = method["doc"]
    types = {one.name: one.annotation for one in parameters if one.annotation is not one.empty}
    call.__annotations__ = types if method["returns"] is None else {**types, "return": method["returns"]}
    with contextlib.suppress(NameError):  # a class of its own is no type of a tool, and is refused with others
        call.__annotations__ = typing.get_type_hints(call, vars(typing))
    signature = inspect.Signature(parameters)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


class Process:
    """Run the server of one environment; it ends with this object, and when the trainer ends."""

    def __init__(self, line: list[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            line = [*line[:2], str(theirs.fileno()), *line[2:]]
            self._process = processes.start(line, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()])
        self._socket, self._answers = ours, ours.makefile(encoding="utf-8")
        self._description: dict[str, Any] | None = None
        self.end = weakref.finalize(self, _end, self._process, ours)

    def description(self) -> dict[str, Any]:
        """Return what the server says of the class; raise EnvironmentLost if it could not be made."""
        if self._description is None:
            self._description = self._read(PATIENCE)
            if "error" in self._description:
                raise EnvironmentLost(self._description["error"])
        return self._description

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the server's answer; raise EnvironmentLost if there is none within ``seconds``."""
        self.description()
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall((json.dumps(request, default=str) + "\n").encode())
        except OSError as error:
            raise self._died() from error
        return self._read(seconds)

    def _read(self, seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            line = self._answers.readline()
        except TimeoutError as error:
            raise EnvironmentLost(f"its process did not answer in {seconds:g} s") from error
        except OSError as error:
            raise self._died() from error
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> EnvironmentLost:
        with contextlib.suppress(Exception):
            self._process.wait(10)
        return EnvironmentLost(f"its process has ended (code {self._process.poll()})")


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    """End a process and what it has started, at once: there may be a hundred, and a hanging one would not hear."""
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
