"""A server of ours is ready when it says so, and is never left behind."""

import subprocess
import sys

import pytest
from waiting import runs, until

from qerl_recipes.machine.server_process import started

SERVER = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
PROGRAM = """
import sys, time
from pathlib import Path
from qerl_recipes.machine.server_process import started
with started(sys.argv[3:], int(sys.argv[1]), Path(sys.argv[2]), {}) as server:
    print(server.process.pid, flush=True)
    time.sleep(300)
"""


@pytest.fixture
def healthy(tmp_path, monkeypatch):
    """The folder that is served: a request for /health finds a file there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "health").write_text("")
    return tmp_path


def test_a_server_ends_with_the_block_and_one_that_ends_itself_is_told_with_its_log(healthy, hold_port):
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
