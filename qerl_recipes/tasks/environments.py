"""Find the tools and environments that a recipe names, and refuse what TRL could not use.

An environment is TRL's: a class with ``reset(**row) -> str | None``, whose text is added to the prompt's last message.
Its other public methods are tools. Tools have types and a docstring that describes each argument, from which the chat
template tells the policy of them. ``get_reward() -> float | None`` scores an episode, and is optional.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.generation import PROBE
from qerl_recipes.tasks.environment_process import EnvironmentLost, in_its_own_interpreter
from qerl_recipes.tasks.imported import imported
from qerl_recipes.tasks.interface import Environment, EnvironmentFactory, Tool, ToolFactory
from qerl_recipes.tasks.time_limit import watched
from qerl_vllm_plugin.noise import seed_of

COLUMN = "environment"  # the column that names a row's environment where there are several
NOT_TOOLS = ("reset", "get_reward")
DOCUMENTED = "give it types, and a docstring with a line for each argument under Args:"
SEEDS = 2**31  # numpy and C libraries take no larger seed

Schema = dict[str, Any]


@dataclass(frozen=True)
class Interaction:
    """Hold what completions interact with; ``environments`` makes instances by name, None for the only one."""

    tools: Sequence[Tool] = ()
    environments: "Mapping[str | None, Instances]" = field(default_factory=dict)
    rollout_func: Callable[..., Mapping[str, Any]] | None = None
    lacks_some: bool = False  # an environment of the recipe could not be made

    def arguments(self) -> dict[str, Any]:
        """Return the trainer's arguments of these names, without those that the recipe does not set."""
        factory = self.environments.get(None) or dict(self.environments)
        found = {"tools": self.tools, "environment_factory": factory, "rollout_func": self.rollout_func}
        return {name: value for name, value in found.items() if value}

    def has_calls(self) -> bool:
        """Return True if TRL will render and parse calls of tools."""
        return bool(self.tools or self.environments)

    def resets(self) -> dict[str | None, Callable[..., Any]]:
        return {name: instances.reset for name, instances in self.environments.items()}

    def names(self, rows: Dataset) -> list[str | None]:
        """Return the name of each row's environment, as TRL reads it: one alone has none."""
        if None in self.environments or COLUMN not in rows.column_names:
            return [None] * len(rows)
        return rows[COLUMN][:]  # type: ignore[no-any-return]

    def schemas(self, environment: str | None) -> list[Schema] | None:
        """Return the schemas that TRL gives to the chat template in rows of this environment."""
        instances = self.environments.get(environment)
        tools = [*self.tools, *(() if instances is None else instances.methods)]
        return [get_json_schema(tool) for tool in tools] or None

    def rewards(self) -> list[str]:
        """Return the names under which environments report rewards of their own, one for each class."""
        kinds = {instances.kind for instances in self.environments.values()}
        return sorted(kind.__name__ for kind in kinds if hasattr(kind, "get_reward"))


class Instances:
    """Make the instances of one environment; the first is made at once, to look at, and handed out first."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make, self._first = make, make()
        self.kind, self.reset = type(self._first), self._first.reset
        self.methods = self.methods_of(self._first)
        self._is_first_out = False

    def __call__(self) -> Environment:
        if self._is_first_out:
            return self._make()
        self._is_first_out = True
        return self._first

    def methods_of(self, instance: Environment) -> list[Tool]:
        members = inspect.getmembers(self.kind, inspect.isfunction)
        return [getattr(instance, name) for name, _ in members if name not in NOT_TOOLS and not name.startswith("_")]


def resolve(
    script: ScriptArguments,
    tool_seconds: float | None,
    tools: Mapping[str, ToolFactory],
    environments: Mapping[str, EnvironmentFactory],
    problems: list[str],
) -> Interaction:
    """Return what the recipe's keys name, offered by a plugin or by dotted path; add to ``problems`` what is wrong."""

    def noted(make: Callable[..., Any], *given: Any) -> Any:
        try:
            return make(*given)
        except ValueError as error:
            problems.append(str(error))
            return None

    functions = [tool for name in script.tools for tool in noted(_tools, name, script, tools) or ()]
    named: Mapping[str | None, Any] = {} if script.environments is None else {None: script.environments}
    if isinstance(script.environments, dict):
        named = script.environments
    makers = {name: noted(_maker, name, path, script, tool_seconds, environments) for name, path in named.items()}
    # they have started together
    made = {name: make and noted(_instances, named[name], make) for name, make in makers.items()}
    found = {name: instances for name, instances in made.items() if instances is not None}
    interaction = Interaction(functions, found, noted(_rollout_func, script), lacks_some=len(found) < len(named))
    problems += _schema_problems(interaction)
    return interaction


def _tools(name: str, script: ScriptArguments, offered: Mapping[str, ToolFactory]) -> Sequence[Tool]:
    found = offered[name](script) if name in offered else imported("tools", name, "tools", offered)
    tools = found if isinstance(found, Sequence) else [found]
    for tool in tools:
        if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
            raise ConfigError(f"tools: {name} is not a function but {tool!r}")
    return tools


def _maker(
    name: str | None,
    path: Any,
    script: ScriptArguments,
    tool_seconds: float | None,
    offered: Mapping[str, EnvironmentFactory],
) -> Callable[[], Environment]:
    """Return what makes one environment, in an interpreter that has been started."""
    options: Any = script.environment_kwargs or {}
    arguments: Any = options if name is None else options.get(name, {})
    if not isinstance(path, str) or not isinstance(arguments, dict):
        key, value = ("environments", path) if not isinstance(path, str) else ("environment_kwargs", arguments)
        raise ConfigError(
            f"{key}: {name} has {value!r}; write {{NAME: my_package.MyEnvironment}} and {{NAME: {{...}}}}"
        )
    if script.environment_python is not None:
        return in_its_own_interpreter(script.environment_python, path, arguments, tool_seconds)
    kind = offered[path](script) if path in offered else imported("environments", path, "environments", offered)
    if not callable(kind):
        raise ConfigError(f"environments: {path} is not a class but {kind!r}")
    return lambda: watched(kind(**arguments), path, tool_seconds)


def _instances(path: str, make: Callable[[], Environment]) -> Instances:
    try:
        instances = Instances(make)
    except ConfigError:
        raise
    except Exception as error:  # whatever its constructor raises, or that it has no reset
        raise ConfigError(f"environments: {path} cannot be made ({type(error).__name__}: {error})") from error
    if not inspect.isroutine(instances.reset) or inspect.iscoroutinefunction(instances.reset):
        raise ConfigError(f"environments: reset of {path} is no plain method, which TRL calls before each episode")
    return instances


def _rollout_func(script: ScriptArguments) -> Callable[..., Mapping[str, Any]] | None:
    if script.rollout_func is None:
        return None
    function = imported("rollout_func", script.rollout_func)
    try:
        inspect.signature(function).bind([], None)
    except (TypeError, ValueError) as error:
        name = script.rollout_func
        raise ConfigError(f"rollout_func: {name} does not take (prompts, trainer), which TRL gives it") from error
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"rollout_func: {script.rollout_func} is async, and TRL does not await it")
    return function


def _schema_problems(interaction: Interaction) -> Iterator[str]:
    """Yield a line for each tool that TRL could not describe, and for each name that two tools share."""
    of_environments = [method for instances in interaction.environments.values() for method in instances.methods]
    for tool in [*interaction.tools, *of_environments]:
        try:
            get_json_schema(tool)
        except Exception as error:  # transformers' own errors, and NameError for a type that is not there
            key, or_else = ("environments", ", or begin its name with _") if inspect.ismethod(tool) else ("tools", "")
            yield f"{key}: {tool.__qualname__}: {error}; {DOCUMENTED}{or_else}"
    for name, instances in interaction.environments.items() or {None: None}.items():
        methods = [] if instances is None else instances.methods
        names = [tool.__name__ for tool in (*interaction.tools, *methods)]
        if twice := sorted({tool for tool in names if names.count(tool) > 1}):
            where = "" if instances is None else f" with environment {name or instances.kind.__name__}"
            yield f"tools: {', '.join(twice)} is the name of several{where}; each needs a name of its own"
    kinds = {instances.kind for instances in interaction.environments.values()}
    rewards = interaction.rewards()
    if twice := sorted({name for name in rewards if rewards.count(name) > 1}):
        yield (
            f"environments: {', '.join(twice)} is the name of {len(kinds)} classes, whose rewards would be mixed; "
            "rename one of them"
        )


def row_problems(interaction: Interaction, split: str, columns: Sequence[str], names: Iterable[Any]) -> Iterator[str]:
    """Yield a line for each thing in ``columns`` and each row's ``names`` that environments cannot take."""
    if not interaction.environments or interaction.lacks_some:
        return
    if None not in interaction.environments:
        known = ", ".join(sorted(map(str, interaction.environments)))
        if COLUMN not in columns:
            yield f"environments: the {split} data have no column {COLUMN}, which names one of {known} in each row"
        elif others := sorted({str(name) for name in names if name not in interaction.environments}):
            yield f"environments: the column {COLUMN} of the {split} data names {', '.join(others)}, not one of {known}"
    columns = given(columns, interaction.environments)
    takes = {}
    for name, instances in interaction.environments.items():
        where = f"environments: reset of {name or instances.kind.__name__}"
        is_seeded = accepts(instances.reset, {*columns, "seed"})
        if is_seeded or accepts(instances.reset, columns):
            takes[where] = is_seeded
        else:
            taken = ", ".join(inspect.signature(instances.reset).parameters) or "none"
            yield f"{where} gets the columns {', '.join(columns)}, and takes {taken}; write reset(self, **row)"
    if len(set(takes.values())) > 1:
        without = next(where for where, is_seeded in takes.items() if not is_seeded)
        yield f"{without} takes no seed, and that of another environment does; let all take it, or none"


def given(columns: Iterable[str], environments: Iterable[str | None]) -> list[str]:
    """Return the columns that ``reset`` gets of a row: all but the one that names one of several environments."""
    return [column for column in columns if column != COLUMN or None in environments]


def takes_seed(columns: Iterable[str], resets: Mapping[str | None, Callable[..., Any]]) -> bool:
    """Return True if the environments, whose ``resets`` these are, take a seed that the ``columns`` do not have."""
    columns = given(columns, resets)
    return bool(resets) and "seed" not in columns and all(accepts(one, [*columns, "seed"]) for one in resets.values())


def accepts(function: Callable[..., Any], names: Iterable[str]) -> bool:
    """Return True if ``function`` can be called with arguments of these names."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError:
        return False
    return True


class Starts:
    """Give the rows of a group the column ``seed``, so that their environments start alike, in a resumed run too."""

    def __init__(self, run_seed: int) -> None:
        self._run_seed = run_seed
        self.open(0)

    def open(self, rollout: int | str) -> None:
        """Start the seeds of this rollout anew; that of an evaluation is "evaluation"."""
        self._rollout, self._call = rollout, 0

    def seeded(
        self, rows: list[dict[str, Any]], resets: Mapping[str | None, Callable[..., Any]], first: int, group: int
    ) -> list[dict[str, Any]]:
        """Return the next batch's rows, numbered from ``first`` over all ranks, with a seed for each ``group`` of them.

        The rows are returned as they are if they have a seed, or if one of the environments' ``resets`` takes none.
        """
        if not takes_seed(rows[0], resets):
            return rows
        key = (self._run_seed, "environment", self._rollout, self._call)
        self._call += 1
        return [{**row, "seed": seed_of(*key, (first + i) // group) % SEEDS} for i, row in enumerate(rows)]


def refuse_failing_resets(interaction: Interaction, rows: Dataset, run_seed: int) -> None:
    """Reset each environment with the first of its ``rows``; raise ConfigError if one fails."""
    names, starts = interaction.names(rows), Starts(run_seed)
    for name, instances in interaction.environments.items():
        if name not in names:
            continue
        (row,) = starts.seeded([rows[names.index(name)]], interaction.resets(), 0, 1)
        try:
            instances.reset(**{column: row[column] for column in given(row, interaction.environments)})
        except (EnvironmentLost, ValueError) as error:
            raise ConfigError(f"with the first row: {error}") from error


def rendering(tokenizer: PreTrainedTokenizerBase, templates: Any, interaction: Interaction) -> Mapping[str, Any]:
    """Return the options with which TRL renders prompts; raise ConfigError where calls cannot be rendered or found.

    ``templates`` is a GRPOConfig or an Evaluation.
    """
    options = templates.chat_template_kwargs or {}
    if not interaction.has_calls():
        return options
    from trl import chat_template_utils as of_trl

    if not of_trl.supports_tool_calling(tokenizer):
        raise ConfigError(
            "tools, environments: the model's chat template does not render calls of tools and their answers; give one "
            "that does as chat_template (with a response_template that finds the calls), or use another model"
        )
    if getattr(tokenizer, "response_template", None) is None:
        try:
            of_trl.add_response_schema(tokenizer)
        except ValueError as error:
            raise ConfigError(
                "tools, environments: TRL does not know how calls are written in this chat template; give a "
                "response_template, as transformers describes it under response parsing"
            ) from error
    if of_trl.is_chat_template_prefix_preserving(tokenizer):
        template = None
    else:
        try:
            template = of_trl.get_training_chat_template(tokenizer)
        except ValueError as error:
            raise ConfigError(
                "tools, environments: the chat template renders earlier turns in another way when a tool has "
                "answered, and TRL has no replacement for it; give one that does not as chat_template"
            ) from error
    if templates.response_template is not None:
        for environment in interaction.environments or [None]:
            for schema in interaction.schemas(environment) or ():
                _check_found(tokenizer, schema, {**options, "chat_template": template})
    return {**options, "chat_template": template}


def _check_found(tokenizer: PreTrainedTokenizerBase, schema: Schema, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``response_template`` does not find a call that the chat template has rendered."""
    function = schema["function"]
    kinds = {name: parameter.get("type") for name, parameter in function["parameters"]["properties"].items()}
    values = {"string": PROBE, "integer": int(PROBE)}  # others depend on how a template writes them
    arguments = {name: values[kind] for name, kind in kinds.items() if kind in values}
    call = {"name": function["name"], "arguments": arguments}
    if len(arguments) < len(kinds):
        return
    asked = [{"role": "user", "content": PROBE}]
    answered = [*asked, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}]
    options = {"tools": [schema], "tokenize": False, **options}
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template(answered, **options)
    if not whole.startswith(prompt):
        return
    try:
        parsed = tokenizer.parse_response(whole[len(prompt) :], prefix=prompt, tools=[schema])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"response_template: {error}") from error
    if [found.get("function") for found in parsed.get("tool_calls") or ()] != [call]:
        raise ConfigError(
            f"response_template finds {parsed.get('tool_calls')} in {whole[len(prompt) :]!r}, with which the chat "
            f"template writes a call of {call['name']}; it should find {call}"
        )
