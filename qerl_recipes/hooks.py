"""Offer what recipes name: rewards, data sets, tools, environments, noise schedules and rollout engines.

A plugin is a module (or object) with functions of these names, marked ``@qerl_recipes.hooks.implementation``, and a
setuptools entry point in the group ``qerl``:

    [project.entry-points.qerl]
    my_rewards = "my_package.rewards"

Every function returns a mapping from the names that recipes use to the objects, as QeRL's own do. Two plugins that use
the same name are an error, so that installing a package never changes what a recipe means.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from qerl_recipes.rollout.interface import LendsWeights as LendsWeights
from qerl_recipes.rollout.interface import RolloutEngine as RolloutEngine
from qerl_recipes.rollout.interface import Snapshot as Snapshot
from qerl_recipes.rollout.interface import StartEngine
from qerl_recipes.rollout.interface import TakesTurns as TakesTurns
from qerl_recipes.rollout.interface import Turn as Turn
from qerl_recipes.tasks.answers import answer_block as answer_block  # for rewards; both need nothing but the
from qerl_recipes.tasks.answers import text_of as text_of  # standard library, and TRL is not imported here
from qerl_recipes.tasks.interface import DatasetLoader as DatasetLoader
from qerl_recipes.tasks.interface import EnvironmentFactory as EnvironmentFactory
from qerl_recipes.tasks.interface import Reward as Reward
from qerl_recipes.tasks.interface import RewardFactory as RewardFactory
from qerl_recipes.tasks.interface import ToolFactory as ToolFactory

if TYPE_CHECKING:
    from qerl_recipes.recipe.configs import GRPOConfig

PROJECT = "qerl"
specification = pluggy.HookspecMarker(PROJECT)
implementation = pluggy.HookimplMarker(PROJECT)

NoiseSchedule = Callable[[int, int, float, float, int], float]


class Specifications:
    """Specify the hooks. A plugin implements those that it needs."""

    @specification
    def qerl_rewards(self) -> Mapping[str, RewardFactory]:  # type: ignore[empty-body]
        """Return reward factories by name: ``factory(script) -> reward``.

        ``reward(completions, *, <columns>, **rest) -> list[float | None]`` scores a batch. ``completions`` holds texts
        or, for conversational prompts, lists of messages. Every other parameter without a default (``solution``, say)
        is a column that the data set must have. A score of None leaves a completion out. TRL also passes ``prompts``,
        ``completion_ids``, ``trainer_state``, ``log_extra`` and ``log_metric``.
        """

    @specification
    def qerl_datasets(self) -> Mapping[str, DatasetLoader]:  # type: ignore[empty-body]
        """Return data set loaders by name: ``loader(script) -> (train, held_out or None)``.

        Both are ``datasets.Dataset`` with the columns that rewards read. The column that ``dataset_prompt_column``
        names, ``prompt`` by default, holds a text or a list of messages.
        """

    @specification
    def qerl_tools(self) -> Mapping[str, ToolFactory]:  # type: ignore[empty-body]
        """Return tool factories by name: ``factory(script) -> function``, or a list of functions.

        A tool has types, and a docstring that describes each argument under ``Args:``.
        """

    @specification
    def qerl_environments(self) -> Mapping[str, EnvironmentFactory]:  # type: ignore[empty-body]
        """Return environments by name: ``factory(script) -> class``, which ``environment_kwargs`` are given to.

        ``tasks.environments`` describes the class. It may be a function that makes an environment.
        """

    @specification
    def qerl_noise_schedules(self) -> Mapping[str, NoiseSchedule]:  # type: ignore[empty-body]
        """Return noise schedules by name.

        ``schedule(rollout, rollouts, sigma_start, sigma_end, num_stages) -> sigma`` must be a pure function.
        """

    @specification
    def qerl_rollout_engines(self) -> Mapping[str, StartEngine]:  # type: ignore[empty-body]
        """Return functions that start a rollout engine, by name.

        ``start(base, training, *, rank, dtype, snapshot, accelerator) -> RolloutEngine``: ``StartEngine`` describes
        the parameters, ``RolloutEngine`` the methods that the trainer calls. Tools and environments need ``TakesTurns``
        besides.
        """


# QeRL's own plugin. Each function imports its modules on use, so that registering it stays cheap.
@implementation
def qerl_rewards() -> Mapping[str, RewardFactory]:
    from qerl_recipes.tasks.rewards import FACTORIES

    return FACTORIES


@implementation
def qerl_datasets() -> Mapping[str, DatasetLoader]:
    from qerl_recipes.tasks.sources import LOADERS

    return LOADERS


@implementation
def qerl_tools() -> Mapping[str, ToolFactory]:
    from qerl_recipes.tasks.calculator import calculator
    from qerl_recipes.tasks.code_providers import python_tool

    return {"calculator": lambda script: calculator, "python": python_tool}


@implementation
def qerl_environments() -> Mapping[str, EnvironmentFactory]:
    from qerl_recipes.tasks.higher_lower import HigherLower

    return {"higher_lower": lambda script: HigherLower}


@implementation
def qerl_noise_schedules() -> Mapping[str, NoiseSchedule]:
    from qerl_vllm_plugin.noise import exponential_sigma

    return {"exponential": exponential_sigma}


@implementation
def qerl_rollout_engines() -> Mapping[str, StartEngine]:
    return {"vllm": _start_vllm}


def _start_vllm(base: str, training: "GRPOConfig", **options: Any) -> RolloutEngine:
    from qerl_recipes.recipe.configs import SERVER

    if training.vllm_mode == SERVER:
        from qerl_recipes.rollout.server import ServerRollouts

        return ServerRollouts(base, training, **options)
    from qerl_recipes.rollout.engine import VLLMRollouts

    return VLLMRollouts(base, training, **options)


@functools.cache
def get_plugin_manager() -> pluggy.PluginManager:
    """Return the manager that holds QeRL's own plugin and every installed entry point of the group ``qerl``."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specifications)
    manager.register(sys.modules[__name__], name="builtin")  # this module, also in a checkout that is not installed
    manager.load_setuptools_entrypoints(PROJECT)
    manager.check_pending()
    return manager


def collect(hook: str, manager: pluggy.PluginManager | None = None) -> dict[str, Any]:
    """Return what plugins offer through one hook, by name; raise ValueError for a name used twice, or no mapping."""
    manager = manager or get_plugin_manager()
    offers: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for call in getattr(manager.hook, hook).get_hookimpls():
        offered = call.function()
        if not isinstance(offered, Mapping):
            raise ValueError(f"plugin {call.plugin_name}: {hook} must return a mapping of names, not {offered!r}")
        for name, offer in offered.items():
            if name in owner:
                raise ValueError(
                    f"{hook}: plugins {owner[name]} and {call.plugin_name} both define {name!r}; rename one of them"
                )
            offers[name], owner[name] = offer, call.plugin_name
    return offers


def find(hook: str, name: str, manager: pluggy.PluginManager | None = None) -> Any:
    """Return what a plugin offers through ``hook`` as ``name``; raise ValueError with the known names if none does."""
    offers = collect(hook, manager)
    if name not in offers:
        kind = hook.removeprefix("qerl_").replace("_", " ")
        raise ValueError(f"{name!r} is not one of the {kind}: {', '.join(sorted(offers))}; plugins can add to them")
    return offers[name]


def unknown_names(training: "GRPOConfig") -> Iterator[str]:
    """Yield a line for a noise schedule and for a rollout engine that the recipe names and no plugin offers."""
    named = {"qerl_rollout_engines": "rollout_engine"}
    if training.noise_mode != "none":
        named = {"qerl_noise_schedules": "noise_schedule", **named}
    for hook, key in named.items():
        try:
            find(hook, getattr(training, key))
        except ValueError as error:
            yield f"{key}: {error}"
