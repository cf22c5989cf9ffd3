"""The file of texts that GPTQ and AWQ are calibrated on: JSON lines with a key "text", whose tokens may stand there."""

import json
from pathlib import Path
from typing import Any

from qerl_recipes.files.json_lines import numbered

SAMPLES = 256  # texts, as in the paper's calibration set
LENGTH = 2048  # tokens of a text, likewise


def read(path: Path, samples: int | None, tokenizer: Any) -> tuple[list[list[int]], dict[str, int]]:
    """The tokens of the first ``samples`` texts (None: up to 256) -> (rows of token ids, what they are).

    A line's "input_ids" are its tokens, where it has them, else ``tokenizer`` makes them. What they are: how many
    ``texts``, ``of`` how many there, with how many ``tokens``, and how many were ``cut`` at the ``longest``. Raises
    ValueError, naming file and line, for what is no text, for tokens that are not those of their text, and for fewer
    texts than ``samples``.
    """
    lines = list(numbered(path))
    if samples is not None and samples > len(lines):
        raise ValueError(f"calibration_samples is {samples}, and {path} has {len(lines)} texts; lower it")
    whole = [_tokens(line, f"{path}: line {number}", tokenizer) for number, line in lines[: samples or SAMPLES]]
    if not any(whole):
        raise ValueError(f'{path}: holds no text; write a JSON object with a key "text" in each line')
    rows = [row[:LENGTH] for row in whole if row]
    used = {"texts": len(rows), "of": len(lines), "tokens": sum(map(len, rows)), "longest": LENGTH}
    return rows, {**used, "cut": sum(len(row) > LENGTH for row in whole)}


def _tokens(line: str, place: str, tokenizer: Any) -> list[int]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise ValueError(f'{place} must be a JSON object with a text under the key "text", not {line[:80]}')
    if "input_ids" not in found:
        return list(tokenizer(found["text"])["input_ids"])
    ids = found["input_ids"]
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ValueError(f"{place}: input_ids must be a list of whole numbers; remove the key, or give them")
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != found["text"]:
        raise ValueError(
            f"{place}: input_ids are not the tokens of the text in this model; make the file with this model, or "
            "remove the key"
        )
    return ids
