"""``qerl train --help``: every key of a recipe, with its default and the first sentence of what it is for."""

import argparse
import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from qerl_recipes.config_keys import REFUSED, TOPICS

USAGE = "qerl train --config RECIPE.yaml [--KEY VALUE ...]"
DESCRIPTION = "Every key of a recipe is also a flag, which wins over the recipe."
OWNERS = {"QeRL": "QeRL"} | {name: f"TRL's {name}" for name in ("GRPOConfig", "ModelConfig", "ScriptArguments")}
MOST_CHOICES = 8  # transformers has fifty optimizers
SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!vs)[.!?]\s+(?=[A-Z`(])")


def text(parser: Any) -> str:
    """The help of a ``RecipeParser``: QeRL's keys by topic, then TRL's, then those with which nothing can be done.

    Defaults are those of ``parser``, hence a recipe's own where it has been read.
    """
    actions = {action.dest: action for action in reversed(parser._actions)}  # of --key and --no_key the first
    page = argparse.ArgumentParser(
        usage=USAGE,
        description=DESCRIPTION,
        add_help=False,
        formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=34),
    )
    owners = _owners(parser.dataclass_types)
    for owner, name in OWNERS.items():
        for topic, keys in TOPICS.items():
            if own := [actions[key] for key in keys if owners.get(key) == owner]:
                _add(page, f"{name}, {topic}", own)
    _add(page, "accepted with their default, and what to do instead of another", [actions[key] for key in REFUSED])
    return page.format_help()


def _owners(dataclass_types: Iterable[Any]) -> dict[str, str]:
    """Key -> the dataclass of TRL that brings it, or QeRL for what our own adds."""
    found = {}
    for dataclass in dataclass_types:
        theirs = {field.name for field in dataclasses.fields(dataclass.__base__)}
        for field in dataclasses.fields(dataclass):
            found[field.name] = dataclass.__name__ if field.name in theirs else "QeRL"
    return found


def _add(page: argparse.ArgumentParser, title: str, actions: Iterable[argparse.Action]) -> None:
    group = page.add_argument_group(title)
    for action in actions:
        group.add_argument(f"--{action.dest}", default=action.default, metavar="", help=_summary(action))


def _summary(action: argparse.Action) -> str:
    """The first sentence of a key's help and its choices, where they are few; of a refused key the way out."""
    if action.dest in REFUSED:
        return REFUSED[action.dest].way_out.replace("%", "%%") + "."
    sentence = SENTENCE_END.split(" ".join((action.help or "").split()))[0].rstrip(".") + "."
    if action.choices is not None and len(choices := list(action.choices)) <= MOST_CHOICES:
        sentence += f" One of {', '.join(map(str, choices))}."
    return sentence
