"""Test environments that run in an interpreter of their own: real processes, which die and hang."""

import gc
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import acting
import psutil
import pytest
from transformers.utils import get_json_schema
from waiting import until

from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import environment_process
from qerl_recipes.tasks.environment_process import SERVER, EnvironmentLost, in_its_own_interpreter, take_losses
from qerl_recipes.tasks.environments import Instances, resolve


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return an interpreter without packages: that of a virtual environment of its own."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def counters(bare, monkeypatch):
    """Return counters(seconds, **arguments), which returns the instances of acting.Counter in that interpreter."""
    monkeypatch.setenv("PYTHONPATH", str(Path(acting.__file__).parent))
    environment_process._remote_class.cache_clear()  # a new class, which has warned of nothing
    return lambda seconds=20.0, **arguments: Instances(
        in_its_own_interpreter(bare, "acting.Counter", arguments, seconds)
    )


@pytest.fixture
def processes_of():
    """Return processes_of(path), which returns the processes of an environment that this test has started."""
    before = set(psutil.Process().children())

    def of(path):
        started = set(psutil.Process().children()) - before
        return [one for one in started if str(SERVER) in one.cmdline() and path in one.cmdline()]

    return of


def test_an_environment_elsewhere_is_that_of_the_class(counters):
    instances = counters(start=5)
    one, other = instances(), instances()
    assert type(one) is type(other) and type(one).__name__ == "Counter"
    assert one.reset(prompt="p", seed=7, answer=None) == "5=" and other.reset() == "5="
    assert one.add(number=2) == "7" and one.add(3, sign="-") == "4" and other.add(number=1) == "6"
    assert one.later() == [4], "a list stays one"
    assert (one.get_reward(), other.get_reward(), one.seed, one.start) == (4.0, 6.0, 7, 5)
    with pytest.raises(RuntimeError, match=r"^13 is not added$"):
        one.add(number=13)
    assert one.add(number=1) == "5", "an error of the tool's own ends nothing"
    assert one.reset() == "5=" and one.seed == 0
    here, there = Instances(acting.Counter), instances
    assert [get_json_schema(tool) for tool in there.methods] == [get_json_schema(tool) for tool in here.methods]
    assert inspect.signature(there.reset).bind(prompt=1, seed=2)


def test_it_runs_in_the_interpreter_that_the_recipe_names(counters, bare, processes_of):
    instances = counters()
    (process,) = processes_of("acting.Counter")
    assert process.cmdline()[0] == bare and instances() is not None


def test_an_environment_that_dies_ends_its_episode_alone(counters, caplog, processes_of):
    instances = counters()
    one, other = instances(), instances()
    one.reset(), other.reset()
    before = {process.pid for process in processes_of("acting.Counter")}
    died = r"environment Counter: its process has ended \(code 3\) in add; the episode has ended"
    with pytest.raises(EnvironmentLost, match=died):
        one.add(number=14)
    told = died.replace("\\", "") + ". environments_lost counts this and later ones"
    after = {process.pid for process in processes_of("acting.Counter")}
    assert len(before & after) == 1 and len(after) == 2, "another starts before the next reset waits for it"
    with pytest.raises(EnvironmentLost, match=died):
        one.add(number=1)
    assert one.get_reward() is None and other.add(number=1) == "1"
    assert (one.start, other.start) == (None, 0), "a reward function that reads it gives no reward"
    assert one.reset() == "0=" and one.add(number=2) == "2" and one.get_reward() == 2.0
    with pytest.raises(EnvironmentLost):
        other.add(number=14)
    assert [take_losses(each) for each in (one, one, other)] == [1, 0, 1]
    assert [record.message for record in caplog.records] == [told], "once"


def test_losses_outside_of_tools_are_survived_and_counted(counters):
    one = counters()()
    one.reset()
    one.add(number=17)
    assert one.get_reward() is None, "its process ends there"
    one._process.end()
    assert one.reset() == "0=" and take_losses(one) == 2
    with pytest.raises(EnvironmentLost, match=r"environment Counter: its process has ended \(code 4\) in reset$"):
        one.reset(seed=4)
    assert take_losses(one) == 2, "it was tried twice"
    with pytest.raises(ValueError, match=r"environment Counter: reset failed \(TypeError: the seed is x\)"):
        one.reset(seed="x")


def test_an_environment_that_hangs_is_stopped(counters, processes_of):
    one = counters(seconds=2.0)()
    one.reset()
    (process,) = processes_of("acting.Counter")
    began = time.monotonic()
    with pytest.raises(EnvironmentLost, match=r"its process did not answer in 2 s in add"):
        one.add(number=15)
    assert time.monotonic() - began < 60 and process not in processes_of("acting.Counter")
    assert one.reset() == "0="


def test_what_an_environment_has_started_ends_with_it(counters):
    def start():
        one = counters()()
        one.reset()
        child = psutil.Process(int(one.add(number=16)))
        assert child.name() == "sleep"
        return child

    child = start()
    # slipcover may have walked over all frames meanwhile, which leaves a cycle that holds their locals
    getattr(gc, "everything", gc.collect)()
    assert until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 30)


def test_one_that_dies_between_episodes_is_begun_anew(counters, processes_of):
    one = counters()()
    (process,) = processes_of("acting.Counter")
    process.kill()
    process.wait()
    assert one.reset() == "0=" and one.add(number=1) == "1"


MEETING = """
import os, time
from pathlib import Path

class Game:
    def __init__(self):
        Path(str(os.getpid())).touch()
        end = time.monotonic() + 60
        while len([file for file in Path().iterdir() if file.name.isdigit()]) < 2:
            if time.monotonic() > end:
                raise TimeoutError("nobody else has started")
            time.sleep(0.01)

    def reset(self, **row):
        return None

    def get_reward(self):
        return 1.0
"""


def test_interpreters_of_one_class_start_together(bare, tmp_path, monkeypatch):
    (tmp_path / "meeting.py").write_text(MEETING)
    monkeypatch.chdir(tmp_path)
    named = json.dumps({"a": "meeting.Game", "b": "meeting.Game"})
    flags = ["--use_cpu", "true", "--bf16", "false", "--environments", named, "--environment_python", bare]
    problems = []
    interaction = resolve(parse(flags)[0], 20.0, {}, {}, problems)
    assert not problems and interaction.rewards() == ["Game"]
    assert len({instances.kind for instances in interaction.environments.values()}) == 1


def test_a_stopped_call_does_not_answer_the_next_one(counters):
    class Stopped(BaseException):
        pass

    def stop(*arguments):
        raise Stopped("it took too long")

    one = counters()()
    one.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one._process, "_answer", stop)
        with pytest.raises(Stopped):
            one.add(number=5)
    with pytest.raises(EnvironmentLost, match="Counter: it took too long in add; the episode has ended"):
        one.add(number=1)
    assert one.reset() == "0=" and one.add(number=1) == "1"


@pytest.mark.parametrize(
    ("python", "path", "message"),
    [
        ("/no/such/python", "acting.Counter", "environment_python: /no/such/python is no program; name an interp"),
        (None, "higher_lower", "environments: higher_lower is a name in the trainer's own interpreter; with"),
        (None, "acting.Wordle", "environments: acting.Wordle in .*: AttributeError: module 'acting' has no attr"),
        (None, "acting.Moody", "environments: acting.Moody in .*: OSError: the game is closed"),
        (None, "no_such_module.Game", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("/bin/true", "acting.Counter", r"its process has ended \(code 0\)"),
    ],
)
def test_what_cannot_be_made_elsewhere_is_refused(python, path, message, bare, monkeypatch, processes_of):
    monkeypatch.setenv("PYTHONPATH", str(Path(acting.__file__).parent))
    with pytest.raises(ConfigError, match=message):
        in_its_own_interpreter(python or bare, path, {}, 5.0)()
    assert not processes_of(path)


def test_no_process_is_left_when_the_trainer_is_killed(bare, tmp_path):
    program = (
        "import os, sys\n"
        "from qerl_recipes.tasks.environment_process import in_its_own_interpreter\n"
        f"one = in_its_own_interpreter({bare!r}, 'acting.Counter', {{}}, 60.0)()\n"
        "one.reset()\n"
        "print(one._process._process.pid, flush=True)\n"
        "one.add(number=15)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(acting.__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as run:
        child = psutil.Process(int(run.stdout.readline()))
        assert json.loads(child.cmdline()[-1]) == {}
        run.kill()
    assert until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 10)
