"""The rooms of the recipe pack know each other in one direction, and all of them are installed."""

import re
from collections import defaultdict
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
PACK = ROOT / "qerl_recipes"


def imports() -> dict[str, set[str]]:
    """Room -> the rooms whose modules it imports, lazily or not; files beside the rooms are left out."""
    found = defaultdict(set)
    for file in PACK.glob("*/*.py"):
        for name in re.findall(r"(?:from|import) qerl_recipes\.(\w+)", file.read_text()):
            if name != file.parent.name and (PACK / name).is_dir():
                found[file.parent.name].add(name)
    return found


def test_no_chain_of_imports_leads_back_to_the_room_it_starts_from() -> None:
    known = imports()
    assert known["train"] >= {"model", "rollout"}  # the reading of imports works

    def reached(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"a circle of rooms: {' <- '.join((*path, room))}"
        for other in known[room]:
            reached(other, (*path, room))

    for room in list(known):
        reached(room, ())


def test_every_room_is_installed_and_says_what_it_holds() -> None:
    rooms = {file.parent for file in PACK.glob("*/*.py")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {f"qerl_recipes.{room.name}" for room in rooms} <= set(packages)
    for room in rooms:
        assert (room / "__init__.py").read_text().startswith('"""')
