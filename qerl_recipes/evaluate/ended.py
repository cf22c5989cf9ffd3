"""How many answers ended by themselves: at an end of sequence or a stop string, and not at the limit of length.

An accuracy counts an answer that was cut by what it had written, so a policy that never ends may still look good.
"""

from collections.abc import Mapping
from typing import Any

MOST_CUT = 0.1  # the share of cut answers above which an accuracy needs a word beside it


def share(figures: Mapping[str, Any]) -> float | None:
    """Return the share of answers that ended, from one policy's figures; None where an older file does not say it."""
    if "ended" in figures:
        return figures["ended"]
    return 1 - figures["cut"] if "cut" in figures else None


def too_many_cut(evaluation: Mapping[str, Any]) -> list[str]:
    """Name each task of an ``evaluation.json`` of which more than a tenth of a policy's answers were cut."""
    lines = []
    for task, policies in evaluation.get("tasks", {}).items():
        cut = {label: 1 - ended for label, of in policies.items() if (ended := share(of)) is not None}
        if not any(part > MOST_CUT for part in cut.values()):
            continue
        longest, room = (evaluation.get("max_new_tokens") or {}).get(task), evaluation.get("max_model_length")
        is_room = longest is None or (room is not None and longest >= room)
        name, limit = ("max_model_length", room) if is_room else ("max_new_tokens", longest)
        shares = " and ".join(f"{part:.0%} ({label})" for label, part in cut.items())
        lines.append(
            f"{task}: {shares} of the answers were cut at {name}{f'={limit}' if limit else ''}; accuracy counts what "
            f"they had written; raise {name}, or give the share that ended beside the accuracy"
        )
    return lines
