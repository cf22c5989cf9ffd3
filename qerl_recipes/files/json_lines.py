"""Read JSON-lines files that people write."""

from collections.abc import Iterator
from pathlib import Path


def numbered(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not blank, each with its number in the file, counted from 1."""
    # Some editors write a byte order mark, so read utf-8-sig. Avoid splitlines: it splits at U+2028, valid inside JSON.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            yield number, line
