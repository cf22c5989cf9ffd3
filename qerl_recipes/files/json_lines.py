"""Files of JSON lines that people write, line by line."""

from collections.abc import Iterator
from pathlib import Path


def numbered(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, each with its number in the file, from 1 on."""
    # utf-8-sig: some editors put a mark first; split: splitlines would cut a text at U+2028, which JSON leaves as it is
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            yield number, line
