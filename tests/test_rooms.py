"""Test that each package's folders ("rooms") import each other in one direction only, and that all of them are
installed.
"""

import ast
import functools
import graphlib
from collections import defaultdict
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = ("qerl_vllm_plugin", "qerl_recipes")
# Each room imports only from those before it. A file beside the rooms is a room of its own.
ORDER = {
    "qerl_vllm_plugin": (
        *("noise", "wire", "options", "compat", "norms", "adapter", "weights", "worker"),
        *("client", "quantization", "policy", "scheduler", "server", "verl"),
    ),
    "qerl_recipes": (
        *("recipe", "machine", "files", "model", "memory", "tasks", "rollout", "hooks"),
        *("evaluate", "verl", "convert", "train", "study", "bench", "demo", "cli"),
    ),
}
# These pairs of a room and a room that it imports go against the order.
UPWARDS = {"qerl_vllm_plugin": set(), "qerl_recipes": {("tasks", "hooks")}}  # for the command tasks.held_out
# These pairs of a module and a module that it imports close circles inside a room. Remove each pair together with its
# circle.
CIRCLES = {
    "qerl_vllm_plugin": {("worker.change", "worker.policy")},
    "qerl_recipes": {("recipe.generation", "recipe.configs")},
}


@functools.cache
def statements(package: str) -> dict[tuple[str, ...], list[ast.ImportFrom]]:
    """Map each module, as the parts of its path, to all its ``from ... import`` statements, lazy ones included."""
    files = {file.relative_to(ROOT / package).with_suffix("").parts: file for file in (ROOT / package).rglob("*.py")}
    trees = {parts: ast.walk(ast.parse(file.read_text())) for parts, file in files.items()}
    return {parts: [node for node in tree if isinstance(node, ast.ImportFrom)] for parts, tree in trees.items()}


def imports(package: str) -> dict[str, set[str]]:
    """Map each room to the rooms whose modules it imports, lazily or not."""
    found: dict[str, set[str]] = defaultdict(set)
    for (room, *_), nodes in statements(package).items():
        for node in nodes if room != "__init__" else ():
            if (node.module or "").split(".")[0] == package:
                below = node.module.split(".")[1:]
                others = below[:1] or [alias.name for alias in node.names if alias.name.islower()]
                found[room].update(other for other in others if other != room)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_chain_of_imports_leads_back_to_the_room_it_starts_from(package: str) -> None:
    found, is_room = imports(package), lambda name: (ROOT / package / name).is_dir()
    known = {room: set(filter(is_room, others)) for room, others in found.items() if is_room(room)}

    def reached(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"a circle of rooms: {' <- '.join((*path, room))}"
        for other in known.get(room, ()):
            reached(other, (*path, room))

    for room in list(known):
        reached(room, ())


def modules(package: str) -> dict[str, set[str]]:
    """Map each module to the modules of the same room that it imports: lazily, for types only, or directly."""
    known = {parts: nodes for parts, nodes in statements(package).items() if len(parts) > 1 and parts[-1] != "__init__"}
    names = {".".join(parts): nodes for parts, nodes in known.items()}
    found: dict[str, set[str]] = {}
    for name, nodes in names.items():
        others = [(node.module, f"{node.module}.{alias.name}") for node in nodes for alias in node.names]
        below = {other.removeprefix(f"{package}.") for pair in others for other in pair if other}
        room = name.split(".")[0]
        found[name] = {other for other in below & names.keys() if other.split(".")[0] == room}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_of_modules_is_inside_a_room(package: str) -> None:
    found = modules(package)
    assert "train.loss" in modules("qerl_recipes")["train.trainer"], "the reading of imports works"
    for module, other in CIRCLES[package]:
        assert other in found.get(module, ()), f"strike {module} -> {other} from CIRCLES: it is no longer there"
        found[module].remove(other)
    graphlib.TopologicalSorter(found).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", PACKAGES)
def test_the_rooms_stand_in_their_order(package: str) -> None:
    known, order = imports(package), ORDER[package]
    assert imports("qerl_vllm_plugin")["server"] >= {"worker", "wire"}  # checks that reading imports works
    upwards = {(room, other) for room in known for other in known[room] if order.index(other) > order.index(room)}
    assert upwards == UPWARDS[package]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_installed_and_says_what_it_holds(package: str) -> None:
    rooms = {file.parent for file in (ROOT / package).glob("*/*.py")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {f"{package}.{room.name}" for room in rooms} <= set(packages)
    for room in rooms:
        assert (room / "__init__.py").read_text().startswith('"""')
