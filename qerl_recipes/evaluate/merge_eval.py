"""Measure how much of an adapter's gain survives the merge: ``qerl export --merge --evaluate TASK``.

Four policies answer the same problems, prompted as in training. Two are the base, and the base with its adapter, in the
weight format of the training. The others are the merged checkpoint in BF16, and the same quantized again to NVFP4 with
new block scales. A merge rounds every weight once more; when rounded to 4 bits, a small adapter may vanish.
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qerl_recipes.evaluate.run import evaluate
from qerl_recipes.files.adapter import open_adapter
from qerl_recipes.files.whole_folder import write_text

RESULT = "survival.json"
PROMPTS = ("system_prompt", "use_chat_template", "chat_template", "chat_template_kwargs", "generation_kwargs")


def measure(
    adapter: str | Path,
    merged: str | Path,
    task: str,
    *,
    base: str | None = None,
    max_samples: int | None = None,
    **options: Any,
) -> None:
    """Evaluate the four policies, print a table and write ``merged/survival.json``; raise as ``evaluate``.

    Of a merged policy the record says which share of the adapter's gain over the base ``survives``; None without one.
    ``base`` is where the adapter's is now. What ``options`` of ``evaluate`` leave open is as in training.
    """
    folder, base_path = Path(merged), str(base or open_adapter(adapter).base)
    options = {"max_samples": max_samples, "quiet": True, **options}
    unmerged = evaluate(base_path, str(adapter), [task], output_dir=folder / "survival/adapter", **options)
    # The merged checkpoint has no adapter folder that records the training's prompts.
    options |= {key: unmerged["sampling"][key] for key in PROMPTS}
    options |= {key: unmerged[key] for key in ("max_model_length", "dtype")}
    options["max_new_tokens"] = unmerged["max_new_tokens"][task]
    of = unmerged["tasks"][task]
    start, gain = of["base"]["accuracy"], of["adapter"]["accuracy"] - of["base"]["accuracy"]
    policies: list[dict[str, Any]] = [
        {"policy": label, **_judged(of[label]), "survives": None} for label in ("base", "adapter")
    ]
    for arm, name in (("bf16", "merged, BF16"), ("qerl_nvfp4", "merged, NVFP4 again")):
        place = {"output_dir": folder / "survival" / arm, "quantization": arm}
        figures = evaluate(str(folder), None, [task], **place, **options)["tasks"][task]["base"]
        survives = (figures["accuracy"] - start) / gain if gain > 0 else None
        policies.append({"policy": name, **_judged(figures), "survives": survives})
    record = {"task": task, "n": of["base"]["n"], "arm": unmerged["quantization"], "policies": policies}
    write_text(folder / RESULT, json.dumps(record, indent=2) + "\n")
    view = Table(title=f"{task}, {record['n']} problems; base and adapter in {record['arm']}", title_justify="left")
    view.add_column("policy")
    for column in ("accuracy", "95 % interval", "ended", "of the adapter's gain"):
        view.add_column(column, justify="right", overflow="fold")
    for policy in policies:
        name, share, (low, high), ended, survives = policy.values()
        kept = "" if name in of else "no gain" if survives is None else f"{survives:.0%}"
        view.add_row(name, f"{share:.1%}", f"{low:.1%} to {high:.1%}", f"{ended:.0%}", kept)
    Console().print(view)


def _judged(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: figures[key] for key in ("accuracy", "ci95", "ended")}
