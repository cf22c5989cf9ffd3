"""Run a server as a child process: start it, wait until it is ready, and end it with all processes it has started.

If this process is killed, the server is asked to end too. Its output goes to a file, whose end becomes part of the
error if it does not start.
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

ENGINES_OWN = ("MASTER_PORT", "VLLM_DIST_IDENT")  # variables that only apply to engines of one process
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
PATIENCE = 20.0  # seconds in which a server may end when asked to


@dataclass(frozen=True)
class ServerProcess:
    """Describe a running server; ``url`` is its address without /v1."""

    url: str
    log: Path
    process: "subprocess.Popen[bytes]"


def inherited() -> dict[str, str]:
    """Return this process's environment without the variables that only apply to its own engines."""
    return {name: value for name, value in os.environ.items() if name not in ENGINES_OWN}


def start(line: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a process in a new session, with its output in ``log``; it is asked to end if this process is killed.

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
    """Start a server, wait until it is ready to answer, and yield it; end it when the block ends.

    ``environment`` is added to ``inherited``. Raises RuntimeError, with the end of ``log``, for a server that ends or
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
    """Ask a process that leads a session to end, and wait for it.

    Kill what is left of its process group after ``PATIENCE`` seconds.
    """
    deadline = time.monotonic() + PATIENCE
    process.terminate()
    with contextlib.suppress(ProcessLookupError):  # raised when no process is left
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_with(parent: int) -> None:
    """Let the kernel ask this new process to end when the thread that started it is gone.

    A program that was killed then leaves nothing behind that holds files, ports and GPUs. Call it in the child;
    ``parent`` is the starter's process id.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent was gone already, so the kernel will not ask
        os._exit(1)
