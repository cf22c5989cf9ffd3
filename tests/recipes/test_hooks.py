import subprocess
import sys

import pluggy
import pytest

from qerl_recipes import hooks
from qerl_recipes.hooks import Specifications, collect, implementation
from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks.rewards import required_columns, resolve

THIRD_PARTY = """
from qerl_recipes.hooks import implementation

def shout(completions, volume, **columns):
    return [volume[i] * text.isupper() for i, text in enumerate(completions)]

@implementation
def qerl_rewards():
    return {"shout": lambda script: shout}
"""


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """Install a package with an entry point in the group qerl, and let a fresh plugin manager find it."""
    (tmp_path / "shouting_rewards.py").write_text(THIRD_PARTY)
    metadata = tmp_path / "shouting_rewards-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting-rewards\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[qerl]\nshouting = shouting_rewards\n")
    monkeypatch.syspath_prepend(tmp_path)
    hooks.get_plugin_manager.cache_clear()
    yield
    hooks.get_plugin_manager.cache_clear()
    sys.modules.pop("shouting_rewards", None)


def test_an_installed_plugin_adds_a_reward_that_recipes_can_name(third_party):
    reward = resolve("shout", ScriptArguments(), collect("qerl_rewards"))
    assert reward(completions=["HO", "ho"], volume=[2.0, 2.0]) == [2.0, 0.0]
    assert required_columns(reward) == {"volume"}


def test_a_plugin_can_read_completions_without_importing_trl():
    code = (
        "import sys\n"
        "from qerl_recipes.hooks import answer_block, text_of\n"
        "print(answer_block(text_of([{'role': 'assistant', 'content': '<answer>4</answer>'}])))\n"
        "print(sorted({'trl', 'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4\n[]\n"


def test_the_same_name_is_unknown_without_the_plugin():
    with pytest.raises(ConfigError, match="'shout' is not one of the rewards: accuracy, binary_code"):
        resolve("shout", ScriptArguments(), collect("qerl_rewards"))


def manager_of(**plugins):
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(Specifications)
    for name, offered in plugins.items():

        class Plugin:
            @implementation
            def qerl_noise_schedules(self, offered=offered):
                return offered

        manager.register(Plugin(), name=name)
    return manager


def test_two_plugins_with_one_name_are_an_error_that_names_both():
    manager = manager_of(first={"flat": min}, second={"flat": max})
    with pytest.raises(ValueError, match=r"plugins (first and second|second and first) both define 'flat'"):
        collect("qerl_noise_schedules", manager)


def test_a_plugin_that_returns_no_mapping_is_named():
    with pytest.raises(ValueError, match="plugin broken: qerl_noise_schedules must return a mapping"):
        collect("qerl_noise_schedules", manager_of(broken=["flat"]))


def test_the_built_in_names_are_there():
    assert set(collect("qerl_noise_schedules")) == {"exponential"}
    assert set(collect("qerl_rollout_engines")) == {"vllm"}
    assert {"calculator", "python"} <= set(collect("qerl_tools"))
    assert {"higher_lower"} <= set(collect("qerl_environments"))
    assert {"reasoning_gym", "gsm8k", "bigmath", "dapo_math_17k", "running_sum"} <= set(collect("qerl_datasets"))
    open_r1 = {"accuracy", "format", "tag_count", "reasoning_steps", "cosine", "length", "repetition_penalty"}
    assert open_r1 | {"soft_overlong_punishment", "code_format", "reasoning_gym"} <= set(collect("qerl_rewards"))
