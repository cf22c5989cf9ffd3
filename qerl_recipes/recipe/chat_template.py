"""Read the chat template that a user gives, and check that it shows the model the problem."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROBE = "4815162342"  # replaces the problem; no template contains it, and no filter such as upper changes it


def template_text(source: str) -> str:
    """Return the Jinja text of a chat template.

    ``source`` is that text itself or the path of a file. Raises ValueError where it is neither.
    """
    if "{{" in source or "{%" in source:
        return source
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:  # an impossible file name, an unknown ~user, no UTF-8
        excerpt = source if len(source) <= 80 else f"{source[:77]}..."
        raise ValueError(
            f"chat_template: {excerpt!r} is neither Jinja text nor a file with it ({error}); give one of the two"
        ) from error


def problem_turn(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the message that asks the problem.

    It is the user's last message, or the last message if no user speaks.
    """
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)


def blindness(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], template: str | None = None
) -> str | None:
    """Explain why conversations like ``messages`` would not show the problem to the model; return None if they would.

    The conversation is rendered with a probe text in place of its problem. ``template`` replaces the tokenizer's own
    chat template. ``options`` are the recipe's ``chat_template_kwargs``.
    """
    probed, index = [dict(message) for message in messages], problem_turn(messages)
    probed[index]["content"] = (
        [{"type": "text", "text": PROBE}] if isinstance(messages[index]["content"], list) else PROBE
    )
    rendering = {"chat_template": template, "tokenize": False, "add_generation_prompt": True, **options}
    roles = ", ".join(message["role"] for message in messages)
    try:
        if PROBE in tokenizer.apply_chat_template(probed, **rendering):
            return None
    except Exception as error:  # Jinja's errors, or those that the template itself raises
        reason = f"it cannot render messages of {roles} ({type(error).__name__}: {error})"
    else:
        reason = f"what it makes of messages of {roles} does not contain the problem's text"
    return f"chat_template: {reason}; correct it, or give another one"
