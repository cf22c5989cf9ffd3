"""A chat template that a user gives, as Jinja text or as a file; and whether it shows the model the problem."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROBE = "4815162342"  # stands in the place of a problem; no template has it, and no filter for letters changes it


def template_text(given: str) -> str:
    """Return a chat template that is given as Jinja text or as the path of a file. Raises ValueError for neither."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:  # a name that is none, an unknown ~user, other letters
        shown = given if len(given) <= 80 else f"{given[:77]}..."
        raise ValueError(
            f"chat_template: {shown!r} is neither Jinja text nor a file with it ({error}); give one of the two"
        ) from error


def problem_turn(turns: Sequence[Mapping[str, Any]]) -> int:
    """Return the place of the message that asks the problem: the last of a user, else the last."""
    return max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=len(turns) - 1)


def blindness(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], options: Mapping[str, Any], template: str | None = None
) -> str | None:
    """Say why a conversation like ``turns`` would not show its problem to the model; None if it would.

    ``template`` stands in place of the tokenizer's, ``options`` are ``chat_template_kwargs``.
    """
    asked, place = [dict(turn) for turn in turns], problem_turn(turns)
    asked[place]["content"] = [{"type": "text", "text": PROBE}] if isinstance(turns[place]["content"], list) else PROBE
    given = {"chat_template": template, "tokenize": False, "add_generation_prompt": True, **options}
    roles = ", ".join(turn["role"] for turn in turns)
    try:
        if PROBE in tokenizer.apply_chat_template(asked, **given):
            return None
    except Exception as error:  # whatever a template raises, of Jinja or its own
        why = f"it cannot render messages of {roles} ({type(error).__name__}: {error})"
    else:
        why = f"what it makes of messages of {roles} does not contain the problem's text"
    return f"chat_template: {why}; correct it, or give another one"
