"""Test the rewards that run programs.

e2b and morph are stand-ins for their clients, and Piston a stand-in server: they run the scripts that they get in
plain processes.
"""

import contextlib
import http.server
import json
import subprocess
import sys
import threading
import time
import types

import pytest
from datasets import Dataset
from waiting import PATIENCE

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import code_providers, sandbox
from qerl_recipes.tasks.rewards import FACTORIES, answer_problems, resolve

ADD = "print(sum(map(int, input().split())))"
TESTS = {"language": "python", "test_cases": [{"input": f"1 {i}", "output": str(1 + i)} for i in range(2)]}
PROGRAMS = {
    ADD: 1.0,
    "print(1)": 0.5,
    "print(int(input().split()[1]) + 1)": 1.0,
    f"a = 1\n{ADD.replace('input()', 'input() if a else 0')}\nraise SystemExit(1)": 0.0,
    "1 +": 0.0,
}


def reward(name, **settings):
    return resolve(name, ScriptArguments(**settings), FACTORIES)


def answer(program, language="python"):
    return [
        {"role": "assistant", "content": f"First a try: ```python\nprint()\n```\nso\n```{language}\n{program}\n```"}
    ]


def judged(name="code", programs=tuple(PROGRAMS), info=TESTS, passed=None, **settings):
    completions = [answer(program) for program in programs]
    infos = [info] * len(completions)
    return reward(name, **settings)(completions=completions, prompts=infos, verification_info=infos, **(passed or {}))


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Run what the rewards send, as Piston does, unless the server has answers or failures."""

    def do_POST(self):
        self.server.requests.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        status, content = self.server.reply(*self.server.requests[-1])
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *arguments):
        pass


def evaluated(script):
    """Return what a notebook shows as the result of a script."""
    lines = script.strip().splitlines()
    line = [sys.executable, "-c", "\n".join([*lines[:-1], f"print({lines[-1]})"])]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


def run_as_piston(path, request):
    assert path == "/api/v2/execute" and (request["language"], request["version"]) == ("python", "*")
    line = [sys.executable, "-c", request["files"][0]["content"]]
    try:
        ended = subprocess.run(
            line, input=request["stdin"], capture_output=True, text=True, timeout=request["run_timeout"] / 1000
        )
    except subprocess.TimeoutExpired:
        return 200, {"run": {"stdout": "", "stderr": "", "code": None, "signal": "SIGKILL"}}
    return 200, {"run": {"stdout": ended.stdout, "stderr": ended.stderr, "code": ended.returncode, "signal": None}}


@pytest.fixture
def server(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        server.requests = []
        server.address = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("PISTON_ENDPOINTS", f"http://{server.address}/api/v2")
        monkeypatch.setattr(code_providers, "PAUSE", 0.0)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def clients(monkeypatch):
    """Stand in for the clients of e2b and morph, and return the machines that they have started."""
    machines = []

    class Machine:
        def __init__(self, **options):
            self.options, self.ended = options, False
            machines.append(self)

        create = new = classmethod(lambda cls, **options: cls(**options))

        def run_code(self, script, language, timeout):
            assert language == "python" and timeout < 60
            return types.SimpleNamespace(text=evaluated(script), error=None)

        def close(self):
            pass

        def shutdown(self):
            self.ended = True

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.ended = True

    stand_ins = {
        "e2b_code_interpreter": {"Sandbox": Machine},
        "morphcloud": {},
        "morphcloud.api": {"MorphCloudClient": lambda api_key: api_key},
        "morphcloud.sandbox": {"Sandbox": Machine},
    }
    for name, content in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))
    monkeypatch.setenv("E2B_API_KEY", "e2b key")
    monkeypatch.setenv("MORPH_API_KEY", "morph key")
    return machines


def settings_of(provider, server):
    """Return the recipe keys of a provider."""
    if provider == "local":
        try:
            sandbox.kind()
        except sandbox.SandboxError as error:
            pytest.skip(str(error))
    server.reply = run_as_piston
    return {"code_provider": provider}


PROVIDERS = ("local", "e2b", "morph", "piston")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_provider_gives_the_share_of_passed_tests(provider, server, clients):
    assert judged(**settings_of(provider, server)) == list(PROGRAMS.values())
    if provider in ("e2b", "morph"):
        assert len(clients) == len(PROGRAMS) and all(machine.ended for machine in clients)
        assert provider == "e2b" or clients[0].options["client"] == "morph key"
    else:
        assert not clients


@pytest.mark.parametrize("provider", ["local", "piston"])
def test_a_test_that_takes_too_long_ends_the_judging_with_0(provider, server, clients, monkeypatch):
    monkeypatch.setattr(code_providers, "SECONDS", 1.0)
    program = f"import time\nline = input()\nwhile line == '1 1': pass\n{ADD.replace('input()', 'line')}"
    begin = time.monotonic()
    assert judged(programs=[program] * 2, info=json.dumps(TESTS), **settings_of(provider, server)) == [0.0, 0.0]
    assert time.monotonic() - begin < code_providers.TOTAL_SECONDS


@pytest.mark.parametrize(("taken", "share"), [(1.0, 1.0), (1.1, 0.0)])
def test_the_time_of_all_tests_is_what_their_runs_report(taken, share):
    """Check that no other clock counts: on a loaded machine it would change the verdict."""
    tests = [("", "")] * 4
    assert code_providers.share_of_passed(lambda *run: (0, "", taken), ADD, tests, 5.0, 3.2) == share


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("  1 \r\n2", "1\n2  \n", True),
        ("1", "1\n2", False),  # the first line alone
        ("1\n2\n3", "1\n2", False),
        ("1 2", "12", False),
    ],
)
def test_outputs_are_compared_line_by_line(written, expected, same):
    assert code_providers.same_output(written, expected) == same


def test_a_completion_without_a_program_gets_0(server):
    settings = settings_of("piston", server)
    texts = ["no code", "```cpp\nint main() {}\n```", "```python\nprint(1)", "```python\n```"]
    assert reward("code", **settings)(completions=texts, verification_info=[TESTS] * 4) == [0.0] * 4
    assert server.requests == []


def fail(path, request):
    return 500, {"message": "out of order"}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_provider_that_fails_gives_none_counted_and_said_once(provider, server, clients, monkeypatch):
    name, settings = "binary_code", settings_of(provider, server)
    judge = reward(name, **settings)
    server.reply = fail
    monkeypatch.setitem(globals(), "evaluated", lambda script: "Killed")
    monkeypatch.setattr(sandbox, "_launch", lambda *arguments: (_ for _ in ()).throw(sandbox.SandboxError("no fork")))
    completions, counted = [answer(ADD), [{"role": "assistant", "content": "none"}]], []
    given = {"verification_info": [TESTS] * 2, "log_metric": lambda *metric: counted.append(metric)}
    message = (
        rf"reward {name}: 1 of 2 programs could not be judged and have no reward, the first because of \w+Error: .+"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        assert judge(completions=completions, **given) == [None, 0.0]
        assert judge(completions=completions, **given) == [None, 0.0]
    assert len([warning for warning in caught if "could not be judged" in str(warning.message)]) == 1
    assert counted == [(f"rewards/{name}/unjudged", 0.5)] * 2
    assert len(server.requests) == {"piston": 6}.get(provider, 0)


@pytest.mark.parametrize("most", ["0", "many"])
def test_a_number_of_requests_that_is_none_is_refused(most, server, monkeypatch):
    monkeypatch.setenv("PISTON_MAX_REQUESTS_PER_ENDPOINT", most)
    with pytest.raises(ConfigError, match=f"PISTON_MAX_REQUESTS_PER_ENDPOINT must be a number of .* not '{most}'"):
        reward("code", code_provider="piston")


def test_piston_is_asked_again_when_it_is_overloaded(server):
    settings, replies = settings_of("piston", server), iter([fail, fail])

    def reply(path, request):
        return next(replies, run_as_piston)(path, request)

    server.reply = reply
    assert judged(programs=[ADD], **settings) == [1.0]


@pytest.mark.parametrize("provider", ["piston", "local"])
def test_as_many_programs_run_at_a_time_as_the_key_says(provider, server, monkeypatch):
    monkeypatch.setenv("PISTON_MAX_REQUESTS_PER_ENDPOINT", "8")
    settings, waiting = settings_of(provider, server), threading.Barrier(3)

    def meet(*arguments, **options):
        with contextlib.suppress(threading.BrokenBarrierError):
            waiting.wait(PATIENCE)
        return (200, {"run": {"stdout": "1", "stderr": "", "code": 0, "signal": None}})

    server.reply = meet
    monkeypatch.setattr(sandbox, "run", lambda *a, **o: meet() and sandbox.Outcome("1", "", 0, 0.1))
    info = {"language": "python", "test_cases": [{"input": "", "output": "1"}]}
    assert judged(programs=[ADD] * 3, info=info, parallel_code_exec_per_proc=3, **settings) == [1.0] * 3
    assert not waiting.broken, "all three have met"


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (TESTS, None),
        (json.dumps(TESTS), None),
        ({"language": "cpp", "test_cases": TESTS["test_cases"]}, "the language is 'cpp', and only python is run"),
        ({"language": "python", "test_cases": []}, 'there are no tests; write {"language": "python", "test_'),
        ("not JSON", "Expecting value"),
        ({"test_cases": [{"input": "1", "output": "2", "type": "function_call"}]}, "only stdin_stdout is run"),
        ({"test_cases": [{"input": "1", "output": None}]}, "a test must have the texts input and output"),
    ],
)
def test_data_whose_tests_cannot_be_run_are_refused(info, message):
    rows = Dataset.from_list([{"prompt": "p", "verification_info": info}] * 3)
    lines = list(answer_problems("binary_code", rows, "training"))
    assert len(lines) == (message is not None)
    if message is not None:
        assert message in lines[0] and "in 3 of the 3 rows of the training data, the first of them row 1" in lines[0]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("code", {}, "code_provider: e2b needs a package: pip install e2b-code-interpreter; or use code_provider: loc"),
        ("binary_code", {}, "code_provider: e2b needs a package: pip install e2b-code-interpreter"),
        ("code", {"code_provider": "morph"}, r"pip install 'morphcloud<0\.1\.80'; or use code_provider: local"),
        ("code", {"code_provider": "piston"}, "code_provider: piston needs the environment variable PISTON_ENDPOINTS"),
        ("code", {"code_provider": "docker"}, "code_provider cannot be 'docker'; it is one of e2b, local, morph, pis"),
        ("code", {"parallel_code_exec_per_proc": 0}, "parallel_code_exec_per_proc must be at least 1, not 0"),
        ("cf_code", {}, "reward_funcs: cf_code is not built in, for it needs Piston servers .*; use code, with tests"),
        ("ioi_code", {}, "reward_funcs: ioi_code is not built in, .* or a function of your own by its path"),
    ],
)
def test_a_provider_that_is_not_here_is_refused(name, settings, message, monkeypatch):
    for package in ("e2b_code_interpreter", "morphcloud"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delenv("PISTON_ENDPOINTS", raising=False)
    with pytest.raises(ConfigError, match=message):
        reward(name, **settings)


def test_a_provider_without_its_key_or_limits_is_refused(clients, monkeypatch):
    for provider in ("e2b", "morph"):
        monkeypatch.delenv(f"{provider.upper()}_API_KEY")
        with pytest.raises(ConfigError, match=f"{provider} needs the environment variable {provider.upper()}_API_KEY"):
            reward("code", code_provider=provider)

    def kind():
        raise sandbox.SandboxError("cannot limit programs here")

    monkeypatch.setattr(sandbox, "kind", kind)
    for make in (FACTORIES["code"], code_providers.python_tool):
        with pytest.raises(ConfigError, match="code_provider: local cannot limit programs here"):
            make(ScriptArguments(code_provider="local"))


def test_the_tool_python_runs_here_only_where_a_recipe_says_so(monkeypatch):
    monkeypatch.setattr(sandbox, "kind", lambda: sandbox.OWN_USER)
    assert code_providers.python_tool(ScriptArguments(code_provider="local")) is sandbox.python
    with pytest.raises(ConfigError, match="not with code_provider: e2b; use code_provider: local"):
        code_providers.python_tool(ScriptArguments())


@pytest.mark.parametrize("text", [None, "Killed", "nan", "2"])
def test_a_script_that_gives_no_share_is_no_verdict(text):
    with pytest.raises(code_providers.ProviderError, match="gave no share of passed tests but"):
        code_providers._elsewhere(lambda script: text)(ADD, [])
    assert code_providers._elsewhere(lambda script: "a warning\n1e-05\n")(ADD, []) == 1e-5
