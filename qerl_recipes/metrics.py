"""``metrics.jsonl``: one JSON object an optimizer step, whatever the logging interval; the report reads it."""

import json
import math
import os
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


class MetricsFile:
    """Appends one line a step; a resumed run first cuts off the steps that it will repeat."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE

    def restart(self, step: int) -> None:
        """Keep the lines of steps up to ``step`` (0: none). The file is replaced in one piece, or not at all.

        A last line that a killed run left unfinished is dropped.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if step and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    break
                if record["step"] <= step:
                    kept.append(line)
        partial = self.path.with_name(f".{FILE}.partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(partial, self.path)

    def append(self, record: dict[str, Any]) -> None:
        """Write one step; numbers that JSON does not have (NaN, infinity) become null."""
        line = json.dumps({name: _finite(value) for name, value in record.items()})
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
