"""Start child processes, and end each one together with everything that it has started.

A child leads a session of its own, by which its descendants are found even after their parents have died.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ENGINES_OWN = ("MASTER_PORT", "VLLM_DIST_IDENT")  # variables that only apply to engines of one process
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
PATIENCE = 20.0  # seconds in which a child may end when it is asked to


def inherited() -> dict[str, str]:
    """Return this process's environment without the variables that only apply to its own engines."""
    return {name: value for name, value in os.environ.items() if name not in ENGINES_OWN}


def start(
    line: Sequence[str | Path], log: Path | None = None, environment: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a process in a new session; it is asked to end if this process is killed. Give it to ``end`` afterwards.

    Its output goes into the file ``log``, or where ``options`` (of subprocess.Popen) lead it. ``environment`` is added
    to ``inherited``, unless ``env`` in ``options`` is all of it. A Ctrl-C in the terminal does not reach it.
    """
    with contextlib.ExitStack() as stack:
        if log is not None:
            stream = stack.enter_context(log.open("w"))
            options |= {"stdout": stream, "stderr": stream}
        options = {"env": {**inherited(), **(environment or {})}, **options}
        with_us = functools.partial(end_with, os.getpid())
        return subprocess.Popen(line, start_new_session=True, preexec_fn=with_us, **options)


def run(line: Sequence[str | Path], **options: Any) -> int:
    """Run a process to its end with ``start``'s options, end what it has started, and return its exit code."""
    process = start(line, **options)
    try:
        return process.wait()
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a process, or what it left behind, to end; kill what of its session remains after ``PATIENCE`` seconds."""
    deadline = time.monotonic() + PATIENCE
    for one in [process] if process.poll() is None else _members(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    while (left := _members(process.pid)) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.1)
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def _members(session: int) -> list[psutil.Process]:
    """Return the living processes of a session, zombies left out."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # a process may end while it is looked at
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def end_with(parent: int) -> None:
    """Let the kernel ask this new process to end when the thread that started it is gone; call it in the child.

    A program that was killed then leaves nothing behind that holds files, ports and GPUs. ``parent`` is its process id.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent was gone already, so the kernel will not ask
        os._exit(1)
