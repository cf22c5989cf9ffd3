"""Run a program that a model has written, on this machine, under limits.

    outcome = run("print(int(input()) + 1)", "41", seconds=5)
    outcome.output, outcome.status      # ("42\n", 0)

**These limits are no isolation from a determined attacker**, who may know a hole in the kernel. They guard against what
a policy writes by accident or finds out by trial. Nothing here runs unless a recipe names it (``code_provider:
local``).

A program has an empty folder, a process group and an environment of its own, without tokens or proxies. Its CPU time,
wall time, memory, files, disk and number of processes are limited. At its end all its processes are killed. How far
they are shut in depends on what the kernel allows:

* ``namespaces``: the program sees no other process and no network. It can write to its folder alone, which is gone at
  the end. Where the trainer is root, it also has a user id of its own. It can read what that user may read.
* ``own user``, for root in a container without namespaces: it has a user id of its own, by which its processes are
  found. It has the network, and can write where all users may.
* ``limits``, for another user without namespaces: it has the network, the files and the processes of the trainer's
  user. A process that hides its environment and its folder outlives the program.

The best that works is tried out once and used; a warning names what is lacking. Root without either cannot be limited
in its processes: that is refused.
"""

import contextlib
import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PYTHON = sys.executable
LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
NAMESPACES, OWN_USER, LIMITS = "namespaces", "own user", "limits"
LACKING = {
    OWN_USER: "it reaches the network and may write where all users may, such as /tmp",
    LIMITS: "it reaches the network, and your user's files and processes",
}
MEMORY, OUTPUT = 1 << 30, 1 << 16  # bytes
DISK = 1 << 26  # bytes, of its folder and of each file
TOOL_SECONDS, TOOL_OUTPUT = 5.0, 2048  # of the tool python; bytes of output and of errors
PROCESSES, OPEN_FILES = 32, 128
UIDS = range(61184, 65520)  # nobody's: systemd gives them to services for as long as these run
OUT_OF_CPU_TIME = 128 + signal.SIGXCPU
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
LONGEST_PAUSE = 0.05  # seconds between two looks at a program


class SandboxError(RuntimeError):
    """Report that a program could not be started; this says nothing about the program."""


class Outcome(NamedTuple):
    """Hold the first ``output_bytes`` of a program's output, the last ones of its errors, and how it ended.

    ``status`` is the exit status, or 128 and the signal's number. It is None where the time or the disk ran out.
    """

    output: str
    errors: str
    status: int | None


def run(
    program: str,
    stdin: str = "",
    *,
    seconds: float,
    memory_bytes: int = MEMORY,
    output_bytes: int = OUTPUT,
) -> Outcome:
    """Run a Python program with this interpreter and its packages; return when all its processes are dead.

    ``seconds`` limits the CPU time of each process, in whole seconds; twice as much and one second limits the wall
    time. ``memory_bytes`` limits the address space of each process. Two runs of one program give the same output
    unless it asks for the time, for chance or for the network: hashes have a fixed seed, and its folder is left out.

    Raises SandboxError if the program could not be started.
    """
    return _run(kind(), program, stdin, seconds, memory_bytes, output_bytes)


@functools.cache
def kind() -> str:
    """Return how programs are shut in on this machine: ``namespaces``, ``own user`` or ``limits``.

    Warns once where it is not ``namespaces``. Raises SandboxError for root where neither of the first two works.
    """
    is_root = os.geteuid() == 0
    reasons = []
    for possible in (NAMESPACES, OWN_USER if is_root else LIMITS):
        try:
            outcome = _run(possible, "print(6 * 7)", "", 20, MEMORY, OUTPUT)
        except (SandboxError, OSError) as error:
            reasons.append(f"{possible}: {error}")
            continue
        if outcome.output != "42\n":
            reasons.append(f"{possible}: {outcome.errors.strip()[-200:] or f'status {outcome.status}'}")
            continue
        if possible != NAMESPACES:
            warnings.warn(
                f"code_provider: local runs programs without namespaces, which this kernel refuses ({reasons[0]}): a "
                f"program is limited in time, memory and processes, but {LACKING[possible]}",
                stacklevel=2,
            )
        return possible
    way_out = (
        "run as another user than root, with Python where others may read it, or allow namespaces (docker run "
        "--cap-add SYS_ADMIN --security-opt apparmor=unconfined)"
        if is_root
        else "use another code_provider"
    )
    raise SandboxError(f"cannot limit programs here ({'; '.join(reasons)}); {way_out}")


def _run(kind: str, program: str, stdin: str, seconds: float, memory_bytes: int, output_bytes: int) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="qerl-program-", ignore_cleanup_errors=True) as name:
        place = Path(name).resolve()
        folder, source = place / "work", place / "program.py"
        folder.mkdir(mode=0o700)
        source.write_text(program, encoding="utf-8", errors="replace")
        (place / "input").write_text(stdin, encoding="utf-8", errors="replace")
        uid = _free_uid() if os.geteuid() == 0 else None
        if uid is not None:
            place.chmod(0o755)
            os.chown(folder, uid, uid)
        cpu, processes = max(1, math.ceil(seconds)), _most_processes(kind)
        limits = {
            "RLIMIT_CPU": (cpu, cpu + 1),  # at the first it is told to end, at the second it is ended
            "RLIMIT_AS": (memory_bytes, memory_bytes),
            "RLIMIT_FSIZE": (DISK, DISK),
            "RLIMIT_NOFILE": (OPEN_FILES, OPEN_FILES),
            "RLIMIT_CORE": (0, 0),
            "RLIMIT_NPROC": (processes, processes),
        }
        wall = 2 * seconds + 1
        settings = {
            "namespaces": kind == NAMESPACES,
            "uid": uid,
            "folder": str(folder),
            "home": os.path.realpath(os.path.expanduser("~")),
            "visible": [*_interpreter(), str(place)],
            "disk": DISK,
            "limits": limits,
            "seconds": math.ceil(wall) + 5,
            "command": [PYTHON, "-s", str(source)],
        }
        status = _launch(settings, place, uid, wall)
        output = _read(place / "output", output_bytes).replace(f"{place}/", "")
        errors = _read(place / "errors", output_bytes, from_end=True).replace(f"{place}/", "")
        return Outcome(output, errors, None if status == OUT_OF_CPU_TIME else status)


def _interpreter() -> list[str]:
    """Return the folders of the interpreter, also those that a chain of symbolic links leads through, parents first."""
    programs = [PYTHON]
    while os.path.islink(link := programs[-1]):
        programs.append(os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link))))
    folders = {sys.prefix, sys.base_prefix, *(os.path.dirname(os.path.dirname(program)) for program in programs)}
    return sorted(folders | {os.path.realpath(folder) for folder in folders})


def _launch(settings: dict[str, Any], place: Path, uid: int | None, wall: float) -> int | None:
    """Run the launcher to the end of its program, and kill what is left.

    Returns the status, or None after ``wall`` seconds or once the disk is used up. Raises SandboxError if the launcher
    has not come as far as the program.
    """
    command = [PYTHON, "-IS", str(LAUNCHER)]
    if settings["namespaces"]:
        as_root = [] if uid is not None else ["--user", "--map-root-user"]
        spaces = ["--net", "--pid", "--mount", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        command = ["unshare", *as_root, *spaces, *command]
    environment = {**ENVIRONMENT, **dict.fromkeys(("HOME", "TMPDIR"), settings["folder"])}
    told, started = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, told)
        try:
            stdin, *written = (
                stack.enter_context(open(place / name, mode))
                for name, mode in (("input", "rb"), ("output", "wb"), ("errors", "wb"))
            )
            process = subprocess.Popen(
                [*command, json.dumps({**settings, "started": started})],
                stdin=stdin,
                stdout=written[0],
                stderr=written[1],
                env=environment,
                cwd="/",
                pass_fds=[started],
                start_new_session=True,
            )
        finally:
            os.close(started)
        try:
            status = _wait(process, wall, None if settings["namespaces"] else Path(settings["folder"]))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not settings["namespaces"]:
                _kill_strays(place, uid)
        if not os.read(told, 1):
            raise SandboxError(_read(place / "errors", OUTPUT).strip()[-300:] or f"the launcher ended with {status}")
    return status


def _wait(process: "subprocess.Popen[bytes]", wall: float, folder: Path | None) -> int | None:
    """Wait for the launcher -> its status; None after ``wall`` seconds, or once ``folder`` holds more than DISK."""
    end, pause = time.monotonic() + wall, 0.002
    while time.monotonic() < end:
        try:
            status = process.wait(pause)
            return status if status >= 0 else 128 - status
        except subprocess.TimeoutExpired:
            pause = min(2 * pause, LONGEST_PAUSE)
        if folder is not None and _size(folder) > DISK:
            break
    return None


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder that may change meanwhile."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total


def _kill_strays(folder: Path, uid: int | None) -> None:
    """Kill the processes of a program that have left its process group, until there is none.

    They have the user id ``uid``; where it is None, their environment or working folder is that of the program.
    """
    stopped: set[int] = set()
    while strays := {pid for pid in _pids() if _is_of(pid, folder, uid)} - stopped:
        for pid in strays:
            _signal(pid, signal.SIGSTOP)  # a stopped process starts no others
        stopped |= strays
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _is_of(pid: int, folder: Path, uid: int | None) -> bool:
    """Return True if a process is of the program in ``folder``, whose user id is ``uid`` if it has one of its own."""
    try:
        if uid is not None:
            return os.stat(f"/proc/{pid}").st_uid == uid
        environment, work = Path(f"/proc/{pid}/environ").read_bytes(), os.readlink(f"/proc/{pid}/cwd")
        return str(folder).encode() in environment or Path(work).is_relative_to(folder)
    except OSError:  # it has ended, or is of another user
        return False


def _free_uid() -> int:
    """Return a user id that no process has."""
    taken = set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            taken.add(os.stat(f"/proc/{pid}").st_uid)
    return random.SystemRandom().choice([uid for uid in UIDS if uid not in taken])


def _most_processes(kind: str) -> int:
    """Return the limit on a program's processes: the kernel counts those of its user in its namespace."""
    if kind != LIMITS:
        return PROCESSES
    threads = 0
    for pid in _pids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                threads += len(os.listdir(f"/proc/{pid}/task"))
    return threads + PROCESSES


def _read(file: Path, most: int, from_end: bool = False) -> str:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - most) if from_end else 0)
        return stream.read(most).decode("utf-8", errors="replace")


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It must print its results. It has 5 seconds and no network.

    Returns:
        What the program printed, then its error if there is one.
    """
    outcome = run(code, seconds=TOOL_SECONDS, output_bytes=TOOL_OUTPUT)
    ending = {None: "(the program ran out of time)", 0: ""}.get(outcome.status, f"(exit status {outcome.status})")
    return "\n".join(part for part in (outcome.output.strip(), outcome.errors.strip(), ending) if part)
