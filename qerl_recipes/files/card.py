"""Write the README.md of a saved adapter or merged checkpoint, which says its base and how to serve it.

``adapter_card.jinja`` and ``merged_card.jinja`` beside this module are the templates.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from qerl_recipes.files.adapter import NORMS, engine_rank

WEIGHTS = {"qerl_nvfp4": "NVFP4 (4-bit), frozen", "bf16": "BF16, frozen", "nf4": "NF4 (bitsandbytes, 4-bit), frozen"}
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)


def render(
    base: str,
    base_hash: str,
    adapter_config: Mapping[str, Any],
    *,
    trained_norms: bool,
    quantization: str = "qerl_nvfp4",
    versions: Mapping[str, str] | None = None,
    datasets: Sequence[str] = (),
    name: str = "policy",
    folder: str | Path,
    revision: str | None = None,
    is_rounded: bool = False,
    merged: str | None = None,
) -> str:
    """Return the model card of an adapter as Markdown, with the hub's metadata on top.

    ``base`` is the absolute folder or model id that was trained on, ``datasets`` are ids of the hub, and ``folder`` is
    the adapter's absolute folder, or its repository on the hub. ``is_rounded`` says that ``base_hash`` is of the folder
    that ``qerl quantize`` made of ``base``. ``merged`` is the adapter's hash if the card is of a checkpoint into which
    it is merged. Only the commands contain paths, and on the hub none of this machine.
    """
    of_branch = [] if revision in (None, "main") else ["--revision", str(revision)]
    is_elsewhere = Path(base).is_absolute() and not Path(folder).is_absolute()
    targets, rank = adapter_config.get("target_modules"), adapter_config.get("r", 16)
    return TEMPLATES.get_template("adapter_card.jinja" if merged is None else "merged_card.jinja").render(
        metadata=_metadata(base, datasets),
        base=short(base),
        is_elsewhere=is_elsewhere,
        is_rounded=is_rounded,
        base_hash=base_hash,
        weights=WEIGHTS.get(quantization, quantization),
        is_nvfp4=quantization == "qerl_nvfp4",
        rank=rank,
        alpha=adapter_config.get("lora_alpha"),
        modules=targets if isinstance(targets, str) else ", ".join(sorted(targets or [])),
        trained_norms=trained_norms,
        norms=NORMS,
        versions=sorted((versions or {}).items()),
        serve=shlex.join(["vllm", "serve", short(base) if is_elsewhere else base, *of_branch]),
        allowed_rank=engine_rank(rank),
        lora=shlex.quote(f"{name}={folder}"),
        adapter_hash=merged,
        folder=shlex.quote(str(folder)),
    )


def short(base: str) -> str:
    """Return the model id, or only the name of a folder: its path is private to this machine."""
    return Path(base).name if Path(base).is_absolute() else base


def _metadata(base: str, datasets: Sequence[str]) -> str:
    """Return the hub's metadata of base, data and task; only the hub's own models and data sets can be named."""
    lines = [] if Path(base).is_absolute() else [f"base_model: {base}"]
    lines += [f"datasets: [{', '.join(datasets)}]"] if datasets else []
    return "".join(f"{line}\n" for line in [*lines, "pipeline_tag: text-generation"])
