"""Read JSON files and JSON-lines files; a refusal names the file, the line and the way out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST_SHOWN = 100  # characters of a value in a message


def shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def read_object(file: Path, way_out: str) -> dict[str, Any]:
    """Return the JSON object in a file, {} without one; raise ValueError with ``way_out`` for anything else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); {way_out}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(content).__name__}; {way_out}")
    return content


def numbered(path: Path, unfinished: bool = True) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not blank; a last line may lack its newline if ``unfinished``.

    Raises ValueError for the first line that is not UTF-8.
    """
    # Some editors write a byte order mark, so read utf-8-sig. Avoid splitlines: it splits at U+2028, valid inside JSON.
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        broken = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {broken} is not UTF-8; save the file as UTF-8") from error
    for number, line in enumerate(lines if unfinished else lines[:-1], 1):
        if line.strip():
            yield number, line


def read_lines(
    path: Path, form: str, *, unfinished: bool = True, **options: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object in each line of a file that is not blank, after the line's place for messages ("FILE, line N").

    ``form`` says in messages what a line must be. ``options`` are those of ``json.loads``. A last line without a
    newline is left out unless ``unfinished``. Raises ValueError for a line that is not a JSON object.
    """
    for number, line in numbered(path, unfinished):
        place = f"{path}, line {number}"
        try:
            content = json.loads(line, **options)
        except ValueError as error:
            raise ValueError(f"{place} is no JSON ({error}); each line must be {form}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{place}: each line must be {form}, not {line[:80]}")
        yield place, content
