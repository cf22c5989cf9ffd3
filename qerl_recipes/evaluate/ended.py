"""Reports how many answers ended by themselves, at an end-of-sequence token or a stop string.

The others were cut at the length limit. Accuracy judges a cut answer by the text so far, so a policy that never ends
may still look good.
"""

from collections.abc import Mapping
from typing import Any

MOST_CUT = 0.1  # a larger share of cut answers is reported beside the accuracy


def share(figures: Mapping[str, Any]) -> float | None:
    """Return the share of answers that ended by themselves, or None if an older file does not record it.

    ``figures`` are the results of one policy on one task.
    """
    if "ended" in figures:
        return figures["ended"]
    return 1 - figures["cut"] if "cut" in figures else None


def too_many_cut(evaluation: Mapping[str, Any]) -> list[str]:
    """Return one line for each task on which more than a tenth of a policy's answers were cut.

    ``evaluation`` is the content of ``evaluation.json``. Each line names the length limit to raise.
    """
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
