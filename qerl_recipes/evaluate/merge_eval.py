"""Implements ``qerl export --merge --evaluate TASK``: measures how much of an adapter's gain survives the merge.

Four policies answer the same problems, prompted as in training. Two are the base, and the base with its adapter, in the
weight format of the training. The others are the merged checkpoint in BF16, and the same quantized again to NVFP4 with
new block scales. A merge rounds every weight once more; when rounded to 4 bits, a small adapter may vanish.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qerl_recipes.evaluate.figures import ended_share
from qerl_recipes.evaluate.run import evaluate
from qerl_recipes.files.adapter import open_adapter
from qerl_recipes.files.whole_folder import write_text

RESULT = "survival.json"
PROMPTS = ("system_prompt", "use_chat_template", "chat_template", "chat_template_kwargs", "generation_kwargs")


@dataclass(frozen=True)
class PolicyAccuracy:
    """The accuracy of one policy with its 95 % interval, and the share of answers that ended by themselves.

    ``survives`` is a merged policy's gain over the base, divided by the adapter's gain if there is one.
    """

    policy: str
    accuracy: float
    ci95: list[float]
    ended: float | None
    survives: float | None = None


def measure(
    adapter: str | Path,
    merged: str | Path,
    task: str,
    *,
    base: str | None = None,
    max_samples: int | None = None,
    **options: Any,
) -> list[PolicyAccuracy]:
    """Evaluate the four policies, print a table and write ``merged/survival.json``.

    Returns base, adapter, merged in BF16 and merged in NVFP4. ``base`` is where the adapter's is now. ``options`` are
    those of ``evaluate``; what they leave open is as in training, for the merged checkpoint too. Raises as
    ``evaluate``.
    """
    folder, base_path = Path(merged), str(base or open_adapter(adapter).base)
    options = {"max_samples": max_samples, "quiet": True, **options}
    unmerged = evaluate(base_path, str(adapter), [task], output_dir=folder / "survival/adapter", **options)
    # The merged checkpoint has no adapter folder that records the training's prompts.
    options |= {key: unmerged["sampling"][key] for key in PROMPTS}
    options |= {key: unmerged[key] for key in ("max_model_length", "dtype")}
    options["max_new_tokens"] = unmerged["max_new_tokens"][task]
    policies = [_accuracy(label, unmerged["tasks"][task][label]) for label in ("base", "adapter")]
    start, gain = policies[0].accuracy, policies[1].accuracy - policies[0].accuracy
    for arm, name in (("bf16", "merged, BF16"), ("qerl_nvfp4", "merged, NVFP4 again")):
        place = {"output_dir": folder / "survival" / arm, "quantization": arm}
        figures = evaluate(str(folder), None, [task], **place, **options)["tasks"][task]["base"]
        policies.append(_accuracy(name, figures, (figures["accuracy"] - start) / gain if gain > 0 else None))
    record = {"task": task, "n": unmerged["tasks"][task]["base"]["n"], "arm": unmerged["quantization"]}
    content = {**record, "policies": [asdict(policy) for policy in policies]}
    write_text(folder / RESULT, json.dumps(content, indent=2) + "\n")
    Console().print(_table(policies, f"{task}, {record['n']} problems; base and adapter in {record['arm']}"))
    return policies


def _accuracy(name: str, figures: dict[str, Any], survives: float | None = None) -> PolicyAccuracy:
    return PolicyAccuracy(name, figures["accuracy"], figures["ci95"], ended_share(figures), survives)


def _table(policies: list[PolicyAccuracy], title: str) -> Table:
    """Return the four policies as a table for the terminal."""
    view = Table(title=title, title_justify="left")
    view.add_column("policy")
    for column in ("accuracy", "95 % interval", "ended", "of the adapter's gain"):
        view.add_column(column, justify="right", overflow="fold")
    for policy in policies:
        low, high = policy.ci95
        is_merged = policy.policy not in ("base", "adapter")
        survives = "" if not is_merged else "no gain" if policy.survives is None else f"{policy.survives:.0%}"
        ended = "" if policy.ended is None else f"{policy.ended:.0%}"
        view.add_row(policy.policy, f"{policy.accuracy:.1%}", f"{low:.1%} to {high:.1%}", ended, survives)
    return view
