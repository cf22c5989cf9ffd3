"""Run a program that a model has written, on this machine, under limits.

    outcome = run("print(int(input()) + 1)", "41", seconds=5)
    outcome.output, outcome.status      # ("42\n", 0)

**These limits are no isolation from a determined attacker**, who may know a hole in the kernel. They guard against what
a policy writes by accident or finds out by trial. Nothing here runs unless a recipe names it (``code_provider:
local``).

CPU time, wall time, memory, files, disk and number of processes are limited, and at a program's end all its processes
are killed. It has an environment without tokens or proxies. How far it is shut in depends on what the kernel allows:

* ``namespaces``: it sees no other process and no network, and can write to its folder alone. It can read what its user
  may read: where the trainer is root, a user of its own.
* ``own user``, for root in a container without namespaces: it has a user id of its own, by which its processes are
  found. It has the network, and can write where all users may.

The best that works is tried out once and used; a warning names what is lacking. Where neither works, it is refused.
"""

import contextlib
import functools
import json
import math
import os
import random
import shutil
import signal
import socket
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
NAMESPACES, OWN_USER = "namespaces", "own user"
MEMORY, OUTPUT = 1 << 30, 1 << 16  # bytes
DISK = 1 << 26  # bytes, of its folder and of each file
TOOL_SECONDS, TOOL_OUTPUT = 5.0, 2048  # of the tool python; bytes of output and of errors
PROCESSES, OPEN_FILES = 32, 128
UIDS = range(60706, 61184)  # Linux distributions and systemd leave these to nobody
OUT_OF_CPU_TIME, KILLED = 128 + signal.SIGXCPU, 128 + signal.SIGKILL
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
LONGEST_PAUSE = 0.05  # seconds between two looks at a program
LONGEST_WAIT = 10  # times the wall time that a program has when no other takes its processors


class SandboxError(RuntimeError):
    """Report that a program could not be started; this says nothing about the program."""


class Outcome(NamedTuple):
    """Hold the first ``output_bytes`` of a program's output, the last ones of its errors, and how it ended.

    ``status`` is the exit status, or 128 and the signal's number; None where the time or the disk ran out.
    ``cpu_seconds`` leaves out the processes that were killed at its end.
    """

    output: str
    errors: str
    status: int | None
    cpu_seconds: float


def run(
    program: str, stdin: str = "", *, seconds: float, output_bytes: int = OUTPUT, how: str | None = None
) -> Outcome:
    """Run a Python program with this interpreter and its packages; return when all its processes are dead.

    ``seconds`` limits the CPU time of all its processes; twice as much and one second limits the time in which it runs
    or sleeps, without waiting for a processor. ``how`` it is shut in is what ``kind`` says. Raises SandboxError if the
    program could not be started, or got too little of a processor to judge it.
    """
    how = how or kind()
    with _folder() as place, _user_id() as uid:
        folder, source = place / "work", place / "program.py"
        folder.mkdir(mode=0o700)
        source.write_text(program, encoding="utf-8", errors="replace")
        (place / "input").write_text(stdin, encoding="utf-8", errors="replace")
        if uid is not None:
            place.chmod(0o755)
            os.chown(folder, uid, uid)
        cpu, wall = max(1, math.ceil(seconds)), 2 * seconds + 1
        most = {"AS": MEMORY, "FSIZE": DISK, "NOFILE": OPEN_FILES, "CORE": 0, "NPROC": PROCESSES}
        limits = {f"RLIMIT_{name}": (limit, limit) for name, limit in most.items()}
        settings = {
            "namespaces": how == NAMESPACES,
            "uid": uid,
            "folder": str(folder),
            "home": os.path.realpath(os.path.expanduser("~")),
            "visible": [*_interpreter(), str(place)],
            "disk": DISK,
            "limits": {**limits, "RLIMIT_CPU": (cpu, cpu + 1)},  # at the first it is told to end, at the second ended
            "cpu_seconds": cpu,
            "wall_seconds": wall,
            "longest": LONGEST_WAIT * wall + 5,
            "out_of_time": OUT_OF_CPU_TIME,
            "command": [PYTHON, "-s", str(source)],
        }
        status, cpu_seconds = _launch(settings, place, uid, LONGEST_WAIT * wall)
        output = _read(place / "output", output_bytes).replace(f"{place}/", "")
        errors = _read(place / "errors", output_bytes, from_end=True).replace(f"{place}/", "")
        out_of_time = status == OUT_OF_CPU_TIME or (status == KILLED and cpu_seconds >= cpu)
        return Outcome(output, errors, None if out_of_time else status, cpu_seconds)


@functools.cache
def kind() -> str:
    """Return how programs are shut in here, and warn once of what is lacking; raise SandboxError where they cannot."""
    is_root = os.geteuid() == 0
    reasons = []
    for possible in (NAMESPACES, OWN_USER) if is_root else (NAMESPACES,):
        try:
            outcome = run("print(6 * 7)", seconds=20, how=possible)
        except (SandboxError, OSError) as error:
            reasons.append(f"{possible}: {error}")
            continue
        if outcome.output != "42\n":
            reasons.append(f"{possible}: {outcome.errors.strip()[-200:] or f'status {outcome.status}'}")
            continue
        if possible != NAMESPACES:
            warnings.warn(
                f"code_provider: local runs programs without namespaces, which this kernel refuses ({reasons[0]}): a "
                "program is limited in time, memory and processes, but it reaches the network and may write where all "
                "users may, such as /tmp",
                stacklevel=2,
            )
        return possible
    way_out = (
        "let other users enter the folders of Python (such as chmod o+x /root), or allow namespaces (docker run "
        "--cap-add SYS_ADMIN --security-opt apparmor=unconfined)"
        if is_root
        else "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or use another code_provider"
    )
    raise SandboxError(f"cannot limit programs here ({'; '.join(reasons)}); {way_out}")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    name = tempfile.mkdtemp(prefix="qerl-program-")
    try:
        yield Path(name).resolve()
    finally:
        try:
            shutil.rmtree(name)
        except (OSError, RecursionError):  # folders that are closed to their own user, or too deep for Python to follow
            subprocess.run(["chmod", "-R", "u+rwx", name], stderr=subprocess.DEVNULL)
            subprocess.run(["rm", "-rf", name], stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _user_id() -> Iterator[int | None]:
    """Reserve a user id on this machine if this process is root, by a socket whose name can be taken once."""
    if os.geteuid() != 0:
        yield None
        return
    with socket.socket(socket.AF_UNIX) as reservation:
        for uid in random.SystemRandom().sample(UIDS, len(UIDS)):
            with contextlib.suppress(OSError):
                reservation.bind(f"\0qerl-program-{uid}")
                break
        else:
            raise SandboxError(f"{len(UIDS)} programs run already")
        yield uid


def _interpreter() -> list[str]:
    """Return the folders of the interpreter, also those that a chain of symbolic links leads through, parents first."""
    programs = [PYTHON]
    while os.path.islink(link := programs[-1]):
        programs.append(os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link))))
    folders = {sys.prefix, sys.base_prefix, *(os.path.dirname(os.path.dirname(program)) for program in programs)}
    return sorted(folders | {os.path.realpath(folder) for folder in folders})


def _launch(settings: dict[str, Any], place: Path, uid: int | None, longest: float) -> tuple[int | None, float]:
    """Run the launcher to its program's end, and kill what is left; return status (None: disk full) and CPU seconds.

    Raises SandboxError if the launcher has not come as far as the program, or not to its end in ``longest`` seconds.
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
        has_room = True
        try:
            end, pause = time.monotonic() + longest, 0.002
            # a child that has ended keeps its process id until os.wait4
            look = functools.partial(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            while (in_time := time.monotonic() < end) and has_room and look() is None:
                time.sleep(pause)
                pause = min(1.25 * pause, LONGEST_PAUSE)  # most programs end after some 40 ms
                has_room = settings["namespaces"] or _size(settings["folder"]) <= DISK
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            _, wait_status, usage = os.wait4(process.pid, 0)
            code = process.returncode = os.waitstatus_to_exitcode(wait_status)
            if not settings["namespaces"]:
                # only root runs programs without namespaces; killed at once, none can start another meanwhile
                kill = f"import os; os.setresuid({uid}, {uid}, {uid}); os.kill(-1, {signal.SIGKILL:d})"
                subprocess.run([PYTHON, "-ISc", kill], stderr=subprocess.DEVNULL)
        if not os.read(told, 1):
            raise SandboxError(_read(place / "errors", OUTPUT).strip()[-300:] or f"the launcher ended with {code}")
    if not in_time:
        raise SandboxError(f"the program has not ended in {longest:g} seconds, for other programs took the processors")
    return (code if code >= 0 else 128 - code) if has_room else None, usage.ru_utime + usage.ru_stime


def _size(folder: str) -> int:
    """Return the bytes of a folder that may change meanwhile, at least 4096 for a file or folder in it."""
    total, folders = 0, [folder]
    while folders and total <= DISK:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                total += max(4096, entry.stat(follow_symlinks=False).st_blocks * 512)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return total


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
