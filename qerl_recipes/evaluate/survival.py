"""Implements ``qerl export --merge --measure TASK``: measures how much of an adapter's gain survives the merge.

Four policies answer the same problems, prompted as in training. Two are the base, and the base with its adapter, in the
weight format of the training. The others are the merged checkpoint in BF16, and the same quantized again to NVFP4 with
new block scales. A merge rounds every weight once more; when rounded to 4 bits, a small adapter may vanish.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qerl_recipes.evaluate.ended import share
from qerl_recipes.evaluate.run import evaluate
from qerl_recipes.files.adapter import open_adapter
from qerl_recipes.files.whole_folder import write_text

RESULT = "survival.json"
AS_ASKED = ("system_prompt", "chat_template", "chat_template_kwargs", "generation_kwargs")


@dataclass(frozen=True)
class Policy:
    """The accuracy of one policy with its 95 % interval.

    ``survives`` is its gain over the base, divided by the adapter's gain. It is None for base and adapter, and if the
    adapter has gained nothing. ``ended`` is the share of answers that ended by themselves.
    """

    name: str
    accuracy: float
    ci95: tuple[float, float]
    survives: float | None = None
    ended: float | None = None


def measure(
    adapter: str | Path,
    merged: str | Path,
    task: str,
    *,
    base: str | None = None,
    max_samples: int | None = None,
    **options: Any,
) -> list[Policy]:
    """Evaluate the four policies, print a table and write ``merged/survival.json``.

    Returns base, adapter, merged in BF16 and merged in NVFP4, in this order. ``base`` says where the adapter's base is
    now; by default it is the one named in the adapter folder. ``options`` are those of ``evaluate``. Options left open
    are as in the adapter's training, for the merged checkpoint too. Raises ValueError as ``evaluate`` does.
    """
    saved, folder = open_adapter(adapter), Path(merged)
    base_path = str(base or saved.base)
    common = {"max_samples": max_samples, "quiet": True, **options}
    unmerged = evaluate(base_path, str(adapter), [task], output_dir=folder / "survival/adapter", **common)
    # The merged checkpoint has no adapter folder that records the training's prompts.
    as_unmerged = {key: unmerged["sampling"][key] for key in AS_ASKED}
    as_unmerged |= {
        "max_new_tokens": unmerged["max_new_tokens"][task],
        "use_chat_template": unmerged["sampling"]["use_chat_template"],
    }
    as_unmerged |= {"max_model_length": unmerged["max_model_length"], "dtype": unmerged["dtype"]}
    policies = [_policy(unmerged, task, "base"), _policy(unmerged, task, "adapter")]
    gain = policies[1].accuracy - policies[0].accuracy
    for arm, name in (("bf16", "merged, BF16"), ("qerl_nvfp4", "merged, NVFP4 again")):
        of_merged = evaluate(
            str(folder),
            None,
            [task],
            output_dir=folder / "survival" / arm,
            quantization=arm,
            **{**common, **as_unmerged},
        )
        accuracy = of_merged["tasks"][task]["base"]["accuracy"]
        survives = (accuracy - policies[0].accuracy) / gain if gain > 0 else None
        policies.append(_policy(of_merged, task, "base", name, survives))
    content = [
        {"policy": p.name, "accuracy": p.accuracy, "ci95": p.ci95, "ended": p.ended, "survives": p.survives}
        for p in policies
    ]
    record = {
        "task": task,
        "n": unmerged["tasks"][task]["base"]["n"],
        "arm": unmerged["quantization"],
        "policies": content,
    }
    write_text(folder / RESULT, json.dumps(record, indent=2) + "\n")
    Console().print(table(policies, task, record["n"], unmerged["quantization"]))
    return policies


def _policy(
    result: dict[str, Any], task: str, label: str, name: str | None = None, survives: float | None = None
) -> Policy:
    figures = result["tasks"][task][label]
    return Policy(
        name or label, figures["accuracy"], (figures["ci95"][0], figures["ci95"][1]), survives, share(figures)
    )


def table(policies: list[Policy], task: str, problems: int, arm: str) -> Table:
    """Return the four policies as a table for the terminal."""
    view = Table(title=f"{task}, {problems} problems; base and adapter in {arm}", title_justify="left")
    view.add_column("policy")
    for column in ("accuracy", "95 % interval", "ended", "of the adapter's gain"):
        view.add_column(column, justify="right", overflow="fold")
    for policy in policies:
        low, high = policy.ci95
        is_merged = policy.name not in ("base", "adapter")
        survives = "" if not is_merged else "no gain" if policy.survives is None else f"{policy.survives:.0%}"
        ended = "" if policy.ended is None else f"{policy.ended:.0%}"
        view.add_row(policy.name, f"{policy.accuracy:.1%}", f"{low:.1%} to {high:.1%}", ended, survives)
    return view
