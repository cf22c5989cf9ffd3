"""A server as a child of this process, for as long as it is needed: started, waited for, ended with all it has started.

Where this process is killed, the server is asked to end, too. What it prints goes to a file, whose end is part of the
error where it does not start.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ENGINES_OWN = ("MASTER_PORT", "VLLM_DIST_IDENT")  # variables that hold for the engines of one process alone
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
PATIENCE = 20.0  # seconds that a server may take to end when it is asked to


@dataclass(frozen=True)
class ServerProcess:
    """``url`` is its address, without /v1."""

    url: str
    log: Path
    process: "subprocess.Popen[bytes]"


def inherited() -> dict[str, str]:
    """This process's environment without what holds for its own engines alone."""
    return {name: value for name, value in os.environ.items() if name not in ENGINES_OWN}


def start(line: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """A process in a session of its own, which is asked to end where this one is killed; its output goes to ``log``.

    ``environment`` is added to ``inherited``.
    """
    with log.open("w") as stream:
        return subprocess.Popen(
            line,
            stdout=stream,
            stderr=stream,
            env={**inherited(), **environment},
            start_new_session=True,
            preexec_fn=functools.partial(end_with, os.getpid()),
        )


@contextmanager
def started(
    line: Sequence[str], port: int, log: Path, environment: Mapping[str, str], *, seconds: float = 280
) -> Iterator[ServerProcess]:
    """The server of a command line, ready to answer, until the end of the block.

    ``environment`` is added to this process's. Raises RuntimeError, with the end of ``log``, for a server that ends or
    is not ready after ``seconds``.
    """
    import httpx

    process = start(line, log, environment)
    server = ServerProcess(f"http://127.0.0.1:{port}", log, process)
    try:
        deadline = time.monotonic() + seconds
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                state = "is not ready" if process.returncode is None else f"ended with code {process.returncode}"
                raise RuntimeError(f"the server {state}; the end of its log:\n{log.read_text()[-6000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{server.url}/health").status_code == 200:
                    break
            time.sleep(0.2)
        yield server
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Asks a process that leads a session to end, and kills what is left of the session after a while."""
    deadline = time.monotonic() + PATIENCE
    process.terminate()
    with contextlib.suppress(ProcessLookupError):  # raised once none of them is left
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_with(parent: int) -> None:
    """In a new process: the kernel asks it to end once the thread that started it and waits for it is gone, so that a
    program that was killed leaves nothing behind that holds files, ports and GPUs."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was gone before, and the kernel will not ask
        os._exit(1)
