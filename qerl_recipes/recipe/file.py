"""Read a recipe's YAML file and flags into a parser, and format the parser's help.

Every key must be known: an unknown one is an error.
"""

import argparse
import copy
import dataclasses
import difflib
import functools
import itertools
import json
import re
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from trl import TrlParser

from qerl_recipes import SHIPPED
from qerl_recipes.recipe.keys import (
    BELONGS_ELSEWHERE,
    FORMER_KEYS,
    REFUSED,
    RENAMED,
    TOPICS,
    WITHOUT_EFFECT,
    current_value,
    refused,
    with_current_names,
)
from qerl_vllm_plugin.wire.address import HIDDEN, hidden

USAGE = "qerl train --config RECIPE.yaml [--KEY VALUE ...]"
DESCRIPTION = (
    "Every key of a recipe is also a flag, which wins over the recipe. "
    "A recipe's keys win over those of the recipe that its key extends names."
)
MOST_CHOICES = 8  # the help omits longer lists: transformers has fifty optimizers
SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!vs)[.!?]\s+(?=[A-Z`(])")


class ConfigError(ValueError):
    """Report a recipe or flag that cannot be used, with the way out; addresses show neither user nor password."""

    def __init__(self, text: str) -> None:
        super().__init__(hidden(text))


def key(default: Any, help: str, **metadata: Any) -> Any:
    """Return the field of a recipe key in a dataclass; each object gets its own copy of a list."""
    metadata["help"] = help
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class UniqueKeyLoader(yaml.SafeLoader):
    """Load safe YAML; raise YAMLError, with key and line, for a key that occurs twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # <<: *other
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                line = key_node.start_mark.line + 1
                raise yaml.YAMLError(f"{key} stands twice (line {line}); keep one of them")
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


class RecipeParser(TrlParser):
    """Extend TRL's parser by a help page of ours, and by what ``read_flags`` and ``defaults_from_yaml`` ask it."""

    def format_help(self) -> str:
        return help_text(self)

    def keys(self) -> set[str]:
        return {action.dest for action in self._actions if action.dest != "help"}

    def may_be_none(self) -> set[str]:
        hints = [hint for dataclass in self.dataclass_types for hint in get_type_hints(dataclass).items()]
        return {name for name, hint in hints if type(None) in get_args(hint)}


def read_yaml(path: str | Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the mapping in a recipe file, over that of the file which its key ``extends`` names, if it has one.

    The path in ``extends`` is relative to the recipe. Raises ConfigError for a file that cannot be read or holds no
    mapping, for a key that occurs twice in a file, and for files that extend each other.
    """
    own, above = _read_one(Path(path)), (*above, Path(path).resolve())
    parent = own.pop("extends", None)
    if parent is None:
        return own
    if not isinstance(parent, str):
        raise ConfigError(f"recipe {path}: extends must be the path of one recipe, not {parent!r}")
    below = (above[-1].parent / parent).resolve()
    if below in above:
        raise ConfigError(f"recipe {above[0]} extends itself: {' -> '.join(map(str, (*above, below)))}")
    return {**read_yaml(below, above), **own}


def _read_one(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        shipped = SHIPPED.parent / path
        way_out = f"; QeRL's own is {shipped}" if shipped.is_file() else ""
        raise ConfigError(f"recipe {path} cannot be read: {error}{way_out}") from error
    try:
        content = copy.deepcopy(_parsed(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"recipe {path} must be a YAML mapping of keys to values")
    return up_to_date(content, f"recipe {path}")


def up_to_date(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return keys and values of ``where`` under today's names; warn of former ones, raise ConfigError for both."""
    for key, value in content.items():
        if key in FORMER_KEYS:
            _warn_of_former(where, key, FORMER_KEYS[key])
            if FORMER_KEYS[key] in content:
                raise ConfigError(f"{where}: {key} and {FORMER_KEYS[key]} are the same key; keep one of them")
        if (current := current_value(key, value)) is not value:
            _warn_of_former(where, f"{key}: {value}", f"{key}: {current}")
    return with_current_names(content)


def _warn_of_former(where: str, former: str, current: str) -> None:
    text = f"{where}: {former} is called {current} now; its old name works for one more release"
    warnings.warn(text, FutureWarning, stacklevel=4)


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> Any:
    """Parse YAML, which takes far longer than reading it; a study asks for the same text once a run."""
    return yaml.load(text, Loader=UniqueKeyLoader)


def flags(recipe: Mapping[str, Any]) -> list[str]:
    """Return keys of a recipe as flags of ``qerl train``."""
    line: list[str] = []
    for name, value in recipe.items():
        values = value if isinstance(value, list) else [value]
        line += [f"--{name}", *(one if isinstance(one, str) else json.dumps(one) for one in values)]
    return line


def unknown(key: str, valid: Iterable[str], where: str) -> ConfigError:
    """Return the error for an unknown key, which names the closest known one."""
    if key in BELONGS_ELSEWHERE:
        return ConfigError(f"{where}: {key} is not a key of a recipe; {BELONGS_ELSEWHERE[key]}")
    close = difflib.get_close_matches(key, [*valid, *RENAMED], n=1, cutoff=0.6)
    return ConfigError(f"{where}: unknown key {key}" + (f"; did you mean {close[0]}?" if close else ""))


def _drop(key: str, value: object, where: str) -> str | None:
    """Warn that a key has no effect, or return the refusal of a value that asks for something else."""
    dropped = WITHOUT_EFFECT[key]
    allowed = dropped.allowed and {str(one).lower() for one in dropped.allowed}  # a flag's value is always text
    if allowed and str(value).lower() not in allowed:
        return refused(key, dropped, value)
    warnings.warn(f"{where}: {key} has no effect: {dropped.way_out}", stacklevel=3)
    return None


def _is_share(value: Any) -> bool:
    try:
        return 0 <= float(value) < 1
    except (TypeError, ValueError):
        return False


def _rename(key: str, value: Any, where: str) -> tuple[str, Any]:
    if key == "warmup_ratio" and not _is_share(value):
        raise ConfigError(f"{where}: warmup_ratio is a share of all steps, at least 0 and below 1, not {value}")
    if key == "dataset_configs":
        if not isinstance(value, list) or len(value) != 1:
            raise ConfigError(f"{where}: dataset_configs must name one configuration; write several into one file")
        value = value[0]
    return RENAMED[key], value


def defaults_from_yaml(parser: RecipeParser, content: Mapping[str, Any], where: str) -> dict[str, str | None]:
    """Make the values of a recipe, or of flags, the defaults of ``parser``.

    Returns, for each key of WITHOUT_EFFECT among them, its refusal, or None if it merely has no effect. Raises
    ConfigError for an unknown key, a key that occurs under two names, or a value of the wrong type.
    """
    valid, defaults = parser.keys(), {}
    dropped: dict[str, str | None] = {}
    for key, value in content.items():
        name = key
        if key in WITHOUT_EFFECT:
            dropped[key] = _drop(key, value, where)
            continue
        if key in RENAMED:
            name, value = _rename(key, value, where)
        if name not in valid:
            raise unknown(key, valid, where)
        if name in defaults:
            raise ConfigError(f"{where}: {key} and {name} are the same key; keep one of them")
        defaults[name] = value
    actions = {action.dest: action for action in reversed(parser._actions) if action.dest in defaults}
    may_be_none = parser.may_be_none()
    for name, value in defaults.items():
        if value is None and name not in may_be_none:
            raise ConfigError(f"{where}: {name} has no value; give it one, or remove it for the default")
        defaults[name] = _checked(parser, actions[name], value, where)
    parser.set_defaults_with_config(**defaults)
    return dropped


def _checked(parser: RecipeParser, action: argparse.Action, value: object, where: str) -> Any:
    """Convert a value of YAML or of a flag as the parser converts text: YAML reads 1e-5 as text and ``no`` as false."""
    takes_list = action.nargs == "+"
    if value is None or (isinstance(value, dict) and action.type is str and not takes_list):
        return value
    if isinstance(value, list) and action.dest == "report_to":  # transformers accepts a name or a list of names
        return value
    if isinstance(value, bool) and action.dest == "scale_rewards":  # TRL accepts true and false besides the names
        return value
    if isinstance(value, dict) or (isinstance(value, list) and not takes_list):
        raise ConfigError(f"{where}: {action.dest} cannot be a {type(value).__name__}: {value!r}")
    if isinstance(value, bool) and action.choices and "no" in action.choices:
        value = "yes" if value else "no"  # YAML 1.1 reads a bare no as false
    items = value if isinstance(value, list) else [value]
    try:
        converted = [parser._get_value(action, str(item)) for item in items]
        for item in converted:
            parser._check_value(action, item)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{where}: {action.dest}: {error.message}") from error
    return converted if takes_list else converted[0]


def read_flags(parser: RecipeParser, flags: Sequence[str]) -> dict[str, Any]:
    """Return flags as keys of a recipe, ``config`` among them, with words as values; raise ConfigError for others."""
    where, left = "command line", list(flags)
    content: dict[str, Any] = {}
    while left:
        option, equals, text = (word := left.pop(0)).partition("=")
        if not option.startswith("--"):
            raise ConfigError(f"{where}: {word} belongs to no flag")
        key = option[2:].replace("-", "_")
        action, dropped = parser._option_string_actions.get(f"--{key}"), WITHOUT_EFFECT.get(key)
        takes_list = key == "dataset_configs" or (
            action.nargs == "+" if action else dropped and dropped.allowed == ([],)
        )
        words = [text] if equals else list(itertools.takewhile(lambda word: not word.startswith("--"), left))
        if not takes_list and dropped is None:
            words = words[:1]
        left = left if equals else left[len(words) :]
        is_for_text = action is not None and action.type is str and action.choices is None
        if is_for_text and words in (["None"], ["null"]) and key in parser.may_be_none():
            way_out = f"for none write {key}: null in the recipe"
            raise ConfigError(f"{where}: {option} {words[0]} would be that word; {way_out}")
        if not words and (key == "config" or (action is not None and action.nargs != "?")):
            raise ConfigError(f"{where}: {option} needs a value")
        if key == "config" in content:
            raise ConfigError("--config may be given once; put both recipes into one file")
        content[key] = words if takes_list else " ".join(words) if words else True
    return up_to_date(content, where)


def help_text(parser: RecipeParser) -> str:
    """Format the help of a parser, with its defaults: the keys by topic, then the refused ones."""
    actions = {action.dest: action for action in reversed(parser._actions)}  # --key, not --no_key
    page = argparse.ArgumentParser(
        usage=USAGE,
        description=DESCRIPTION,
        add_help=False,
        formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=34),
    )
    for topic, keys in TOPICS.items():
        _add(page, topic, [actions[key] for key in keys])
    _add(page, "accepted with their default, and what to do instead of another", [actions[key] for key in REFUSED])
    return page.format_help()


def _add(page: argparse.ArgumentParser, title: str, actions: Iterable[argparse.Action]) -> None:
    group = page.add_argument_group(title)
    for action in actions:
        default = hidden(action.default) if isinstance(action.default, str) else action.default
        if action.dest == "hub_token" and default is not None:
            default = HIDDEN
        group.add_argument(f"--{action.dest}", default=default, metavar="", help=_summary(action))


def _summary(action: argparse.Action) -> str:
    """Return the first sentence of a key's help and its choices if they are few; of a refused key the way out."""
    if action.dest in REFUSED:
        return REFUSED[action.dest].way_out.replace("%", "%%") + "."
    sentence = SENTENCE_END.split(" ".join((action.help or "").split()))[0].rstrip(".") + "."
    if action.choices is not None and len(choices := list(action.choices)) <= MOST_CHOICES:
        sentence += f" One of {', '.join(map(str, choices))}."
    return sentence
