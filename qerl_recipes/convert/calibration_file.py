"""Read the texts on which GPTQ and AWQ are calibrated: JSON lines with a key "text" and, if known, "input_ids"."""

import json
from pathlib import Path
from typing import Any

from qerl_recipes.files.json_lines import numbered

SAMPLES = 256  # texts, as in the calibration set of the QeRL paper
LENGTH = 2048  # most tokens of a text, as in the paper


def read(path: Path, samples: int | None, tokenizer: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Read the first ``samples`` texts (None: up to 256) -> (rows of token ids, counts).

    A line's "input_ids" are its tokens; ``tokenizer`` makes them where that key is missing. Empty texts are dropped,
    and the others cut to 2048 tokens. The counts are ``texts`` and ``tokens`` in the rows, lines in the file (``of``),
    the limit (``longest``) and the number of ``cut`` texts.

    Raise ValueError, naming file and line, if a line holds no text, or "input_ids" that are not the tokens of its text.
    Also raise it if the file has fewer texts than ``samples``, or only empty ones.
    """
    lines = list(numbered(path))
    if samples is not None and samples > len(lines):
        raise ValueError(f"calibration_samples is {samples}, and {path} has {len(lines)} texts; lower it")
    token_rows = [_tokens(line, f"{path}: line {number}", tokenizer) for number, line in lines[: samples or SAMPLES]]
    if not any(token_rows):
        raise ValueError(f'{path}: holds no text; write a JSON object with a key "text" in each line')
    rows = [row[:LENGTH] for row in token_rows if row]
    counts = {"texts": len(rows), "of": len(lines), "tokens": sum(map(len, rows)), "longest": LENGTH}
    return rows, {**counts, "cut": sum(len(row) > LENGTH for row in token_rows)}


def _tokens(line: str, place: str, tokenizer: Any) -> list[int]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f'{place} must be a JSON object with a text under the key "text", not {line[:80]}')
    if "input_ids" not in record:
        return list(tokenizer(record["text"])["input_ids"])
    ids = record["input_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"{place}: input_ids must be a list of whole numbers; remove the key, or give them")
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != record["text"]:
        raise ValueError(
            f"{place}: input_ids are not the tokens of the text in this model; make the file with this model, or "
            "remove the key"
        )
    return ids
