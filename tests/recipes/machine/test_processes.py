"""Test that a child process ends with everything it started, and that a server counts as ready only when it says so."""

import signal
import subprocess
import sys

import pytest
from waiting import runs, until

from qerl_recipes.machine import processes
from qerl_recipes.machine.serve import started

SERVER = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
PROGRAM = """
import sys, time
from pathlib import Path
from qerl_recipes.machine.serve import started
with started(sys.argv[3:], int(sys.argv[1]), Path(sys.argv[2]), {}) as server:
    print(server.process.pid, flush=True)
    time.sleep(300)
"""
# This program starts a process that ignores SIGTERM and is orphaned at once.
PARENT = """
import subprocess, sys, time
child = "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
middle = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child + '; time.sleep(300)'!r}]); "
subprocess.run([sys.executable, "-c", middle + "print(p.pid, flush=True)"])
{then}
"""


@pytest.fixture
def healthy(tmp_path, monkeypatch):
    """Make the folder that is served; a request for /health finds a file there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "health").write_text("")
    return tmp_path


@pytest.mark.parametrize("then", ["time.sleep(300)", "raise SystemExit(3)"], ids=["at work", "has crashed"])
def test_a_child_ends_with_orphans_that_ignore_the_request(then, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 1.0)
    log = tmp_path / "log"
    child = processes.start([sys.executable, "-c", PARENT.replace("{then}", then)], log)
    words = until(lambda: (said := log.read_text().split()) and len(said) == 2 and said)
    orphan = max(int(word) for word in words)
    assert runs(orphan)
    processes.end(child)
    assert until(lambda: not runs(orphan)) and child.returncode in (3, -signal.SIGTERM)


def test_a_server_ends_with_its_block_or_is_told_with_its_log(healthy, hold_port):
    port = hold_port()
    with started([*SERVER, str(port)], port, healthy / "log", {}) as server:
        assert server.process.poll() is None
    assert server.process.returncode is not None
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 3.*no such model"):
        with started([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], port, healthy / "log", {}):
            pass


def test_a_server_ends_with_a_program_that_was_killed(healthy, hold_port):
    port = hold_port()
    line = [sys.executable, "-c", PROGRAM, str(port), str(healthy / "log"), *SERVER, str(port)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        server = int(program.stdout.readline())
        assert runs(server)
        program.kill()
    assert until(lambda: not runs(server))


def test_a_program_killed_while_it_starts_a_process_leaves_none(tmp_path):
    """Kill the program before the new process can ask the kernel to end it with its parent."""
    script = (
        "import os, signal, sys, time; from pathlib import Path; from types import SimpleNamespace\n"
        "from qerl_recipes.machine import processes\n"
        "libc, parent = processes.LIBC, os.getpid()\n"
        "def prctl(*arguments):\n"
        f"    Path({str(tmp_path / 'started')!r}).write_text(str(os.getpid()))\n"
        "    os.kill(parent, signal.SIGKILL)\n"
        "    while os.getppid() == parent: time.sleep(0.01)\n"
        "    libc.prctl(*arguments)\n"
        "processes.LIBC = SimpleNamespace(prctl=prctl)\n"
        f"processes.start([sys.executable, '-c', 'import time; time.sleep(300)'], Path({str(tmp_path / 'log')!r}))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    started = int((tmp_path / "started").read_text())
    assert until(lambda: not runs(started))
