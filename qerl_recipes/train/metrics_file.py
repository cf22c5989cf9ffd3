"""``metrics.jsonl``: one JSON object a line, in the order in which things happened; the report reads it.

    {"step": 7, "loss": 0.01, "reward": 0.4, "rewards/accuracy/mean": 0.3, ...}
    {"step": 7, "eval/problems": 512, "eval/reward": 0.45, "eval/rewards/accuracy/mean": 0.35, ...}

A line of the first kind for each optimizer step, whatever the logging interval. One of the second after each evaluation
on held-out problems (``eval_strategy``): all its keys but ``step``, the steps done, begin with ``eval/`` and go on as
those of training do. Step 0 is before the first (``eval_on_start``).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from qerl_recipes.files.whole_folder import write_text

FILE = "metrics.jsonl"
EVALUATION = "eval/"  # begins every key but step in a line of an evaluation


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
        write_text(self.path, "".join(f"{line}\n" for line in kept))

    def append(self, record: Mapping[str, object]) -> None:
        """Write one step; numbers that JSON does not have (NaN, infinity) become null."""
        line = json.dumps({name: _finite(value) for name, value in record.items()})
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
