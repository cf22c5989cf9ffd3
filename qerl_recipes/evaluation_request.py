"""What may be asked of ``qerl evaluate``: tasks and sampling, checked without importing lighteval or vLLM.

gsm8k, math_500, aime24, aime25     lighteval's definitions, from the Hugging Face hub
amc23                               40 problems of AMC 12, 2023 (math-ai/amc23), asked as lighteval asks AIME
running_sum                         the demo's 512 held-out problems; the whole completion must be right
jsonl:PATH                          a file of {"prompt", "answer"} lines, answers compared as mathematics
jsonl-exact:PATH                    the same, answers compared as text without surrounding spaces
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIGHTEVAL = {"gsm8k": "gsm8k", "math_500": "math_500", "aime24": "aime", "aime25": "aime"}  # task -> module
NAMES = (*LIGHTEVAL, "amc23", "running_sum")
MATH, EXACT = "jsonl:", "jsonl-exact:"


@dataclass(frozen=True)
class Sampling:
    """How to answer, under lighteval's names.

    ``max_new_tokens``: None takes each task's own limit. ``use_chat_template``: None uses the tokenizer's template if
    it has one. A temperature of 0 is greedy.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int | None = None
    seed: int = 0
    use_chat_template: bool | None = None
    system_prompt: str | None = None

    def check(self, num_samples: int) -> None:
        """Raises ValueError for numbers that make no sense."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie above 0 and be at most 1")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
        if num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"num_samples is {num_samples}, but temperature 0 gives the same answer each time; "
                "set temperature (0.6, say) or num_samples=1"
            )


def check(names: Sequence[str]) -> None:
    """Raises ValueError for a task that does not exist, is named twice, or whose file cannot be read."""
    if not names:
        raise ValueError(f"name at least one task: {_known()}")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"task {name} is named twice")
        if name.startswith((MATH, EXACT)):
            read_lines(Path(name.split(":", 1)[1]))
        elif name not in NAMES:
            raise ValueError(f"there is no task {name!r}; choose from {_known()}")


def read_lines(path: Path) -> list[dict[str, str]]:
    """The problems of a local file. Raises ValueError where there are none, or for a line of another shape."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; a local task is written jsonl:PATH")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, answer = row["prompt"], row["answer"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}, line {number}: each line must be {{"prompt": TEXT, "answer": TEXT}} ({error!r})'
            ) from error
        if not isinstance(prompt, str) or not isinstance(answer, str | int | float):
            raise ValueError(f"{path}, line {number}: prompt must be a text, and answer a text or a number")
        rows.append({"prompt": prompt, "answer": str(answer)})
    if not rows:
        raise ValueError(f"{path} holds no problems")
    return rows


def _known() -> str:
    return ", ".join((*NAMES, f"{MATH}PATH", f"{EXACT}PATH"))
