"""Read the chat template that a user gives, and check that it shows the model the problem."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROBE = "4815162342"  # replaces the problem; no template contains it, and no filter such as upper changes it


def template_text(given: str) -> str:
    """Return the Jinja text of a chat template.

    ``given`` is that text itself or the path of a file. Raises ValueError where it is neither.
    """
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:  # an impossible file name, an unknown ~user, no UTF-8
        shown = given if len(given) <= 80 else f"{given[:77]}..."
        raise ValueError(
            f"chat_template: {shown!r} is neither Jinja text nor a file with it ({error}); give one of the two"
        ) from error


def problem_turn(turns: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the message that asks the problem.

    It is the user's last message, or the last message if no user speaks.
    """
    return max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=len(turns) - 1)


def blindness(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], options: Mapping[str, Any], template: str | None = None
) -> str | None:
    """Explain why conversations like ``turns`` would not show the problem to the model; return None if they would.

    The conversation is rendered with a probe text in place of its problem. ``template`` replaces the tokenizer's own
    chat template. ``options`` are the recipe's ``chat_template_kwargs``.
    """
    asked, place = [dict(turn) for turn in turns], problem_turn(turns)
    asked[place]["content"] = [{"type": "text", "text": PROBE}] if isinstance(turns[place]["content"], list) else PROBE
    given = {"chat_template": template, "tokenize": False, "add_generation_prompt": True, **options}
    roles = ", ".join(turn["role"] for turn in turns)
    try:
        if PROBE in tokenizer.apply_chat_template(asked, **given):
            return None
    except Exception as error:  # Jinja's errors, or those that the template itself raises
        why = f"it cannot render messages of {roles} ({type(error).__name__}: {error})"
    else:
        why = f"what it makes of messages of {roles} does not contain the problem's text"
    return f"chat_template: {why}; correct it, or give another one"
