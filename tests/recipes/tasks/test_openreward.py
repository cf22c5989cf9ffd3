"""Test environments that an openreward server offers, by TRL's OpenRewardSpec, which runs unchanged.

openreward is not in requirements-cpu.lock: `pip install openreward` first, in an environment of one's own.
"""

import contextlib
import sys

import httpx
import pytest
from waiting import PATIENCE, until

from qerl_recipes.machine import processes
from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.tasks import environments

pytest.importorskip("openreward")

SERVED = '''
import sys

from openreward.environments import Environment, Server, TextBlock, ToolOutput, tool
from pydantic import BaseModel


class Number(BaseModel):
    number: int


class Guess(Environment):
    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split):
        return [{"wanted": 4}, {"wanted": 3}]

    def get_prompt(self):
        return [TextBlock(type="text", text=str(self.task_spec["wanted"]))]

    @tool
    async def guess(self, params: Number) -> ToolOutput:
        """Guess a number."""
        is_right = params.number == self.task_spec["wanted"]
        return ToolOutput(blocks=[TextBlock(type="text", text="heard")], reward=float(is_right), finished=is_right)


Server([Guess]).run(host="127.0.0.1", port=int(sys.argv[1]))
'''


@pytest.mark.integration
def test_a_recipe_names_an_openreward_server(tmp_path, monkeypatch, hold_port):
    """Check what `qerl train` does before a run, and two episodes that do not see each other."""
    (tmp_path / "served.py").write_text(SERVED)
    url = f"http://127.0.0.1:{(port := hold_port())}"
    module = (
        f"from trl.experimental.openreward import OpenRewardSpec\nspec = OpenRewardSpec({url!r}, env_name='guess')\n"
    )
    (tmp_path / "offered.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("OPENREWARD_SESSION_URL", "OPENREWARD_API_URL"):
        monkeypatch.setenv(name, url)
    monkeypatch.setenv("OPENREWARD_API_KEY", "none")
    server = processes.start([sys.executable, str(tmp_path / "served.py"), str(port)], tmp_path / "log")
    try:
        assert until(lambda: answers(url), 100), (tmp_path / "log").read_text()
        problems = []
        script = ScriptArguments(environments="offered:spec.environment_factory")
        interaction, spec = environments.resolve(script, PATIENCE, {}, {}, problems), sys.modules["offered"].spec
        rows = spec.train_dataset
        assert problems == list(environments.row_problems(interaction, "train", rows.column_names, [])) == []
        assert [schema["function"]["name"] for schema in interaction.schemas(None)] == ["guess"]
        environments.refuse_failing_resets(interaction, rows, 0)
        make = interaction.environments[None]
        both = make(), make()
        assert [one.reset(**row, seed=1) for one, row in zip(both, rows, strict=True)] == ["4", "3"]
        assert [one.guess(number=4) for one in both] == ["heard", "heard"]
        assert spec.reward_funcs(environments=both) == [1.0, 0.0]
        for one in both:
            one._close()
    finally:
        processes.end(server)


def answers(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=PATIENCE).is_success
