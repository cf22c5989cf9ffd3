"""Write ``metrics.jsonl``, which the report reads: one JSON object a line, in the order in which things happened.

    {"step": 7, "loss": 0.01, "reward": 0.4, "rewards/accuracy/mean": 0.3, ...}
    {"step": 7, "eval/problems": 512, "eval/reward": 0.45, "eval/rewards/accuracy/mean": 0.35, ...}

Each optimizer step has a line of the first kind, whatever the logging interval. Each evaluation on held-out problems
(``eval_strategy``) has a line of the second kind. Its ``step`` is the number of steps done; 0 is before the first
(``eval_on_start``). Its other keys are ``eval/`` and the key that training uses.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from qerl_recipes.files.whole_folder import write_text

FILE = "metrics.jsonl"
EVALUATION = "eval/"  # begins every key but step in an evaluation's line


class MetricsFile:
    """The file ``metrics.jsonl`` in ``folder``; a resumed run first cuts off the steps that it will repeat."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE

    def restart(self, step: int) -> None:
        """Keep the lines of steps up to ``step`` (0: none); the file is replaced in one piece, or not at all.

        A line that is not whole, as a killed run may leave, is dropped with all that follow it.
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
        """Append one record as a line; numbers that JSON does not have (NaN, infinity) become null."""
        line = json.dumps({name: _finite(value) for name, value in record.items()})
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
