"""Import what a recipe names by a path: rewards, tools, environments."""

import importlib
import operator
import os
import sys
from collections.abc import Iterable
from typing import Any

from qerl_recipes.recipe.file import ConfigError


def imported(key: str, path: str, kind: str = "", names: Iterable[str] = ()) -> Any:
    """Return the object at ``path`` (``package.module.name`` or ``package.module:name``), or raise ConfigError."""
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if not module or not name:
        known = f"one of the {kind}: {', '.join(sorted(names))}; plugins can add to them" if kind else "a path"
        raise ConfigError(f"{key}: {path!r} is not {known}; one of your own goes by its path, such as my_package.name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # a module of one's own may raise anything
        where = "; its module must be in the working directory or on PYTHONPATH"
        is_missing = isinstance(error, ModuleNotFoundError)
        raise ConfigError(
            f"{key}: {path} cannot be imported ({type(error).__name__}: {error}){where if is_missing else ''}"
        ) from error
