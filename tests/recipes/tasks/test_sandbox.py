"""Run hostile programs as real processes, in each way in which a machine may shut them in.

Where the tests run as root, other users' runs start in a process with the rights of nobody.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from qerl_recipes.tasks import sandbox
from qerl_recipes.tasks.sandbox import NAMESPACES, OWN_USER, SandboxError

SYSTEM_PYTHON = "/usr/bin/python3"  # every user may run it
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
# Run the program of the standard input, and print its outcome. This needs no package.
DRIVER = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("sandbox", sys.argv[1])
sandbox = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sandbox)
try:
    print(json.dumps(sandbox.run(sys.stdin.read(), seconds=float(sys.argv[3]), output_bytes=1000, how=sys.argv[2])))
except sandbox.SandboxError as error:
    print(json.dumps(["", str(error), "not started", 0]))
"""
ALARM = 1_000_000_000 + os.getpid()  # seconds, of sleeps that are recognized as this process's by this number

HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "endless loop": "while True: pass",
    "sleep": f"import time; time.sleep({ALARM})",
    "10 GB of memory": "x = bytearray(10**10)",
    "1 GB of output": "import sys\nfor _ in range(1000): sys.stdout.write('x' * 10**6)",
    "closed output": "import os; os.close(1); os.close(2)",
    "orphan": f"import subprocess as s; s.Popen(['sleep', '{ALARM}'], start_new_session=True); print('left')",
    "hidden orphan": (
        f"import subprocess as s; s.Popen(['/bin/sleep', '{ALARM}'], start_new_session=True, env={{}}, cwd='/')"
    ),
    "killed parent and group": (
        "import os\n"
        f"os.fork() or (os.setsid(), os.execvp('sleep', ['sleep', '{ALARM}']))\n"
        "for victim in (os.getppid(), -os.getpgrp()):\n"
        "    try: os.kill(victim, 9)\n"
        "    except OSError as error: print(error)"
    ),
    "full disk": "for i in range(1000):\n    with open(str(i), 'wb') as file: file.write(b'x' * 10**6)",
    "other process": (
        "from pathlib import Path\n"
        "for file in Path('/proc').glob('[0-9]*/environ'):\n"
        "    try: text = file.read_text(errors='replace')\n"
        "    except OSError: continue\n"
        "    if 'PATH' in text and 'PYTHONHASHSEED=0' not in text: print(file)"
    ),
    "environment": "import os; print(sorted(os.environ), os.getcwd(), os.listdir())",
    "socket": "import socket; socket.create_connection(('127.0.0.1', PORT), 5)",
    "other file": (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "for _ in range(2):\n"
        "    libc.mount(None, b'/', None, 0x1020, None)\n"  # writable again
        "    libc.unshare(0x10020000)\n"  # as root of namespaces of its own
        "open('ELSEWHERE', 'w').write('x')"
    ),
}
OUT_OF_TIME, KILLED = None, 137
VERDICTS = {
    "fork bomb": {OUT_OF_TIME},
    "endless loop": {OUT_OF_TIME},
    "sleep": {OUT_OF_TIME},
    "10 GB of memory": {1},
    "1 GB of output": {1, 120},
    "closed output": {0},
    "orphan": {0},
    "hidden orphan": {0},
    "killed parent and group": {KILLED},
    "full disk": {1, OUT_OF_TIME},
    "other process": {0},
    "environment": {0},
    "socket": {1},
    "other file": {1},
}
ALLOWED = {OWN_USER: {"socket", "other file"}}  # without namespaces these succeed, as the warning says


def ways():
    """Return (kind, prefix of the command) for each way that this machine has of shutting programs in."""
    if os.geteuid() != 0:
        return {"namespaces": (NAMESPACES, [])}
    ways = {"namespaces, root": (NAMESPACES, []), "own user": (OWN_USER, [])}
    if shutil.which("setpriv"):
        ways["namespaces, nobody"] = NAMESPACES, AS_NOBODY
    return ways


CASES = [(name, way) for name in HOSTILE for way in ways()]


@pytest.fixture(autouse=True)
def limits_work_here(request):
    """Skip the tests that use this interpreter where no program of it can be limited."""
    if {"outcomes", "make_folder", "working"} & set(request.fixturenames):
        return
    try:
        sandbox.kind()
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def make_folder():
    """Return make_folder(), which makes a folder that every user may enter; pytest's own are for one user."""
    with contextlib.ExitStack() as stack:

        def make():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qerl-hostile-", dir="/tmp")))
            folder.chmod(0o755)
            return folder

        yield make


@pytest.fixture(scope="module")
def outcomes(make_folder):
    """Run every hostile program in every way, side by side -> {(name, way): outcome}, what is left, the folder."""
    place = make_folder()
    for file in ("sandbox.py", "sandbox_launcher.py"):
        shutil.copy(Path(sandbox.__file__).with_name(file), place)
    for name in ("scratch", "elsewhere"):
        (place / name).mkdir()
        (place / name).chmod(0o777)
    server = socket.create_server(("127.0.0.1", 0))

    def outcome(case):
        name, way = case
        kind, prefix = ways()[way]
        program = HOSTILE[name].replace("PORT", str(server.getsockname()[1]))
        program = program.replace("ELSEWHERE", f"{place}/elsewhere/{way}")
        seconds = "0.5" if VERDICTS[name] == {OUT_OF_TIME} else "10"
        line = [*prefix, SYSTEM_PYTHON, "-c", DRIVER, f"{place}/sandbox.py", kind, seconds]
        environment = {**os.environ, "TMPDIR": f"{place}/scratch", "A_TOKEN": "hf_secret"}
        ended = subprocess.run(line, input=program, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, (case, ended.stderr)
        return sandbox.Outcome(*json.loads(ended.stdout))

    with server, ThreadPoolExecutor(6) as pool:
        found = dict(zip(CASES, pool.map(outcome, CASES), strict=True))
    left, end = [b""], time.monotonic() + 10
    while left and time.monotonic() < end:  # what was killed takes a moment to be gone on a busy machine
        lines = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines.append(file.read_bytes())
        left = [line for line in lines if str(place).encode() in line or str(ALARM).encode() in line]
    return found, left + list((place / "scratch").iterdir()), place


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_hostile_program_ends_with_a_verdict(name, way, outcomes):
    kind = ways()[way][0]
    outcome = outcomes[0][name, way]
    if "not started" in outcome and kind == NAMESPACES:
        pytest.skip(f"this kernel has no namespaces for us: {outcome.errors}")
    if "not started" in outcome and "Operation not permitted" in outcome.errors:
        pytest.skip(f"this machine gives programs no user id: {outcome.errors}")
    assert len(outcome.output) <= 1000 and len(outcome.errors) <= 1000
    if name in ALLOWED.get(kind, ()):
        assert outcome.status == 0
        return
    if OUT_OF_TIME in VERDICTS[name] and "took the processors" in outcome.errors:
        return  # the outer limit has ended it on a machine that others load
    assert outcome.status in VERDICTS[name], outcome
    if name == "other process":
        assert outcome.output == ""
    if name == "environment":
        assert "TOKEN" not in outcome.output and "PROXY" not in outcome.output.upper()
        assert outcome.output.endswith(" work []\n")


def test_hostile_programs_leave_nothing_behind(outcomes):
    _, left, place = outcomes
    assert not left
    assert {file.name for file in (place / "elsewhere").iterdir()} <= {"own user"}


def test_a_home_folder_is_hidden_but_for_its_interpreter(make_folder):
    """Check it with an interpreter that is a symbolic link away, as installers of Python leave it."""
    home = make_folder()
    (home / "real/bin").mkdir(parents=True)
    (home / "real/bin/python").symlink_to(SYSTEM_PYTHON)
    (home / "link").symlink_to("real")
    (home / "venv/bin").mkdir(parents=True)
    (home / "venv/bin/python").symlink_to(home / "link/bin/python")
    (home / "token").write_text("hf_secret")
    program = f"import os, sys; print(sorted(os.listdir({str(home)!r})), sys.version_info >= (3,))"
    line = [home / "venv/bin/python", "-c", DRIVER, sandbox.__file__, NAMESPACES, "10"]
    ended = subprocess.run(line, input=program, env={"HOME": str(home)}, capture_output=True, text=True)
    output, errors, status, _ = json.loads(ended.stdout)
    if status == "not started":
        pytest.skip(f"this kernel has no namespaces for us: {errors}")
    assert (output, errors) == ("['link', 'real', 'venv'] True\n", ""), ended.stderr


def test_a_program_reads_its_input_and_says_how_it_ended():
    assert sandbox.run("print(int(input()) + 1)", "41", seconds=5)[:3] == ("42\n", "", 0)
    outcome = sandbox.run("import sys; print('so far'); sys.exit('no')", seconds=5)
    assert outcome[:3] == ("so far\n", "no\n", 1)
    assert sandbox.run("import os; os.abort()", seconds=5).status == 128 + 6
    assert sandbox.run("import numpy; print(numpy.ones(3).sum())", seconds=5).output == "3.0\n"


def test_output_is_cut_where_it_begins_and_errors_where_they_end():
    program = "import sys; print('é' * 9 + 'end'); sys.exit('x' * 99 + 'end')"
    outcome = sandbox.run(program, seconds=5, output_bytes=8)
    assert outcome.output == "éééé" and outcome.errors == "xxxxend\n"


def test_two_runs_of_a_program_give_the_same_text():
    """Check what differs between processes elsewhere: the order of a set, and the folder in a traceback."""
    program = "import os; print({str(i) for i in range(50)}, os.getcwd(), os.environ); 1 / 0"
    first, second = (sandbox.run(program, seconds=5) for _ in range(2))
    assert first[:3] == second[:3] and "ZeroDivisionError" in first.errors and 'File "program.py"' in first.errors


def test_seconds_and_bytes_are_limited(monkeypatch):
    loop = "import time\nwhile time.process_time() < 1.2: pass\nprint('done')"
    assert sandbox.run(loop, seconds=1).status is None
    assert sandbox.run(loop, seconds=4).output == "done\n"
    take = "x = bytearray(1 << 28); print('done')"
    assert sandbox.run(take, seconds=5).output == "done\n"
    monkeypatch.setattr(sandbox, "MEMORY", 1 << 28)
    assert "MemoryError" in sandbox.run(take, seconds=5).errors


def launched(command, folder, **settings):
    """Run the launcher without namespaces, as sandbox.run does."""
    settings |= {"namespaces": False, "uid": None, "folder": str(folder), "limits": {}, "started": 1}
    settings |= {"command": command, "cpu_seconds": 9, "out_of_time": sandbox.OUT_OF_CPU_TIME}
    line = [sys.executable, "-IS", str(sandbox.LAUNCHER), json.dumps(settings)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, start_new_session=True)


@pytest.mark.parametrize("limits", [(0, 60), (60, 0)])
def test_a_launcher_ends_its_program_on_its_own(limits, tmp_path):
    """Check the time that the program runs or sleeps, and all time: its starter may have died."""
    wall, longest = limits
    ended = launched(["/bin/sleep", str(ALARM)], tmp_path, wall_seconds=wall, longest=longest)
    assert ended.returncode == sandbox.OUT_OF_CPU_TIME


def test_a_program_that_gets_no_processor_is_no_verdict(monkeypatch):
    monkeypatch.setattr(sandbox, "LONGEST_WAIT", 0.1)
    with pytest.raises(SandboxError, match=r"has not ended in .* seconds, for other"):
        sandbox.run("import time; time.sleep(9)", seconds=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives programs user ids")
def test_programs_at_the_same_time_have_user_ids_of_their_own(monkeypatch):
    monkeypatch.setattr(sandbox, "UIDS", range(60706, 60708))
    with sandbox._user_id() as first, sandbox._user_id() as second:
        assert {first, second} == {60706, 60707}
        with pytest.raises(SandboxError, match="2 programs run already"), sandbox._user_id():
            pass


def test_cpu_time_of_all_processes_is_limited_together():
    """Check processes that would each stay below the limit, for a program that sleeps meanwhile."""
    burn = "import time, os\nos.fork()\nos.fork()\nwhile time.process_time() < 1.5: pass\ntime.sleep(1)"
    assert sandbox.run(burn, seconds=4).status is None


def test_what_has_not_started_is_no_verdict(monkeypatch):
    kind = sandbox.kind()
    monkeypatch.setattr(sandbox, "PYTHON", "/bin/false")
    with pytest.raises(SandboxError, match="the launcher ended with 1"):
        sandbox.run("print(1)", seconds=1, how=kind)


@pytest.mark.parametrize(
    ("user", "working", "message"),
    [
        (0, {OWN_USER}, "it reaches the network and may write where all users may"),
        (
            0,
            set(),
            "let other users enter the folders of Python .*, or allow namespaces",
        ),
        (1000, {OWN_USER}, "allow user namespaces .*, or use another code_provider"),
    ],
)
def test_what_a_kernel_lacks_is_named_or_refused(user, working, message, monkeypatch):
    def run(program, seconds, how):
        if how in working:
            return sandbox.Outcome("42\n", "", 0, 0.1)
        raise SandboxError(f"no {how} here")

    monkeypatch.setattr(sandbox, "run", run)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if user == 0 and working:
        with pytest.warns(UserWarning, match=f"kernel refuses .namespaces: no namespaces here.*{message}"):
            assert {sandbox.kind.__wrapped__()} == working
    else:
        with pytest.raises(SandboxError, match=f"no namespaces here.*{message}"):
            sandbox.kind.__wrapped__()


def test_python_is_a_tool_whose_text_is_bounded():
    assert sandbox.python("print(6 * 7)") == "42"
    assert sandbox.python("") == ""
    assert sandbox.python("print(1)\n1 / 0").endswith("ZeroDivisionError: division by zero\n(exit status 1)")
    assert len(sandbox.python("import sys; print('x' * 10**6); sys.exit('y' * 10**6)")) < 5000
    schema = get_json_schema(sandbox.python)["function"]
    assert schema["name"] == "python" and list(schema["parameters"]["properties"]) == ["code"]


def test_python_says_that_the_time_ran_out(monkeypatch):
    monkeypatch.setattr(sandbox, "TOOL_SECONDS", 0.9)
    assert sandbox.python("print('so far', flush=True)\nwhile True: pass") == "so far\n(the program ran out of time)"


def test_an_interpreter_that_others_may_not_read_is_named(tmp_path):
    (tmp_path / "python").write_text("")
    ended = launched([str(tmp_path / "python")], tmp_path, wall_seconds=9, longest=9)
    assert ended.returncode == 127 and f"{tmp_path}/python cannot be run: PermissionError" in ended.stderr
