"""Use an environment that runs in an interpreter of its own, with other versions of packages than the trainer's.

Each instance has a process. If it dies or hangs, one episode is lost and not those that run beside it: its reward is
None. Instances are made once and reset for each episode, so that a class is imported only as often as a batch has
episodes.
"""

import contextlib
import functools
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
PATIENCE = 300.0  # seconds for import and constructor


class EnvironmentLost(RuntimeError):
    """Report that an environment's process has died or did not answer, which ends its episode."""


def in_its_own_interpreter(
    python: str, path: str, arguments: Mapping[str, Any], seconds: float | None
) -> Callable[[], Environment]:
    """Start the environment at ``path`` in the interpreter ``python``; return a function that makes its instances.

    These have the class's methods, each with ``seconds`` (None: no limit). Raises ConfigError for what is no
    interpreter or no path; so does the returned function if the environment cannot be made in the first process.
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
    ready = [first]

    def make() -> Environment:
        try:
            kind = _remote_class(path, json.dumps(first.description), seconds)
        except EnvironmentLost as error:
            raise ConfigError(f"environments: {path} in {python}: {error}") from error
        return kind(lambda: ready.pop() if ready else Process(line))

    return make


@functools.cache
def _remote_class(path: str, description: str, seconds: float | None) -> "type[_Remote]":
    """Return the class that stands here for the one at ``path``; TRL tells environments apart by their class."""
    described = json.loads(description)
    methods = {name: _method(name, method, seconds) for name, method in described["methods"].items()}
    return type(described["name"], (_Remote,), methods)


class _Remote:
    """Hold one environment's process, and ask it; the names of its methods are those of the class there."""

    _has_warned = False  # set on the class of an environment

    def __init__(self, start: Callable[[], "Process"]) -> None:
        self._start, self._process = start, start()
        self._lost, self._losses = "", 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._unless_lost({"name": name}, PATIENCE)

    def _called(self, name: str, arguments: Mapping[str, Any], seconds: float | None) -> Any:
        request = {"name": name, "arguments": arguments}
        if name == "reset":
            self._lost = ""
            with contextlib.suppress(EnvironmentLost):
                return self._ask(request, seconds)
            self._lost = ""  # the episode has not begun: the next process can begin it
        elif name == "get_reward":
            return self._unless_lost(request, seconds)
        return self._ask(request, seconds)

    def _unless_lost(self, request: Mapping[str, Any], seconds: float | None) -> Any:
        """Return what a reward reads; None of an environment that is lost, so that its episode has no reward."""
        with contextlib.suppress(EnvironmentLost):
            return self._ask(request, seconds)
        return None

    def _ask(self, request: Mapping[str, Any], seconds: float | None) -> Any:
        if self._lost:
            raise EnvironmentLost(self._lost)
        try:
            answer = self._process.ask(request, seconds)
        except BaseException as error:  # a time limit is one
            self._process.end()
            self._process = self._start()  # at once, so that those of several lost episodes start together
            self._losses += 1
            ending = "" if request["name"] == "reset" else "; the episode has ended"
            self._lost = f"environment {type(self).__name__}: {error} in {request['name']}{ending}"
            if not type(self)._has_warned:
                type(self)._has_warned = True
                logger.warning("%s. environments_lost counts this and later ones", self._lost)
            if isinstance(error, EnvironmentLost):
                raise EnvironmentLost(self._lost) from error
            raise
        if "error" in answer:
            name = request["name"]
            if name in ("reset", "get_reward"):  # it ends the run, as ``time_limit.watched`` says
                raise ValueError(f"environment {type(self).__name__}: {name} failed ({answer['error']})")
            raise RuntimeError(answer["error"])
        return answer["value"]


def take_losses(environment: Any) -> int | None:
    """Return how many processes an environment has lost since the last call; None if it runs in this process."""
    if not isinstance(environment, _Remote):
        return None
    losses, environment._losses = environment._losses, 0
    return losses


def _method(name: str, method: Mapping[str, Any], seconds: float | None) -> Callable[..., Any]:
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
        self.end = weakref.finalize(self, _end, self._process, ours)

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """Return what the server says of the class; raise EnvironmentLost if it could not be made."""
        answer = self._answer(None, PATIENCE)
        if "error" in answer:
            raise EnvironmentLost(answer["error"])
        return answer

    def ask(self, request: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
        """Return the server's answer; raise EnvironmentLost if there is none within ``seconds`` (None: no limit)."""
        _ = self.description  # the server's first line
        return self._answer(request, seconds)

    def _answer(self, request: Mapping[str, Any] | None, seconds: float | None) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            if request is not None:
                self._socket.sendall((json.dumps(request, default=str) + "\n").encode())
            line = self._answers.readline()
        except TimeoutError as error:
            raise EnvironmentLost(f"its process did not answer in {seconds:g} s") from error
        except OSError:
            line = ""
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            raise EnvironmentLost(f"its process has ended (code {self._process.poll()})")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    """End a process and what it has started, at once: there may be a hundred, and a hanging one would not hear."""
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
