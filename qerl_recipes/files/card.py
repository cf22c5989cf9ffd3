"""Write the README.md of a saved adapter or merged checkpoint, which says its base and how to serve it."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_recipes.files.adapter import NORMS, engine_rank


def render(
    base: str,
    base_hash: str,
    adapter_config: Mapping[str, Any],
    *,
    trained_norms: bool,
    quantization: str = "qerl_nvfp4",
    versions: Mapping[str, str] | None = None,
    name: str = "policy",
    folder: str | Path,
) -> str:
    """Return the model card of an adapter as Markdown, with the hub's metadata on top.

    ``base`` is the absolute folder or model id that was trained on, ``base_hash`` its ``base_hash()``.
    ``adapter_config`` is the content of adapter_config.json. ``quantization`` is the base-weight format (qerl_nvfp4,
    bf16 or nf4), ``versions`` maps package -> version, and ``folder`` is the adapter's absolute folder.

    Only the commands contain the paths of ``base`` and ``folder``, so that they work from any directory.
    """
    targets = adapter_config.get("target_modules")
    named = targets if isinstance(targets, str) else ", ".join(sorted(targets or []))
    rank = adapter_config.get("r", 16)
    model, lora = shlex.quote(base), shlex.quote(f"{name}={folder}")
    lines = [
        "---",
        *_base_model(base),
        "library_name: peft",
        "tags: [lora, grpo, qerl]",
        "---",
        "",
        "# LoRA adapter trained with QeRL",
        "",
        "| | |",
        "|---|---|",
        f"| base model | `{_short(base)}` |",
        f"| base SHA-256 | `{base_hash}` (config.json and 64 samples a file) |",
        f"| weights in training | {DESCRIPTION.get(quantization, quantization)} |",
        f"| rank, alpha | {rank}, {adapter_config.get('lora_alpha')} |",
        f"| modules | {named} |",
        f"| trained norms | {'yes, in ' + NORMS if trained_norms else 'no'} |",
    ]
    lines += [f"| {package} | {version} |" for package, version in sorted((versions or {}).items())]
    lines += [
        "",
        "## Serve it",
        "",
        *(_without_norms() if trained_norms else []),
        "With stock vLLM"
        + (" (from a BF16 base: in BF16, another policy than was trained):" if quantization == "qerl_nvfp4" else ":"),
        "",
        "```bash",
        f"vllm serve {model} --enable-lora --max-lora-rank {engine_rank(rank)} --lora-modules {lora}",
        "```",
        "",
    ]
    if quantization == "qerl_nvfp4":
        lines += [
            "PEFT and transformers, too, compute in BF16, and want a base of BF16 weights: on a folder that "
            "`qerl quantize` wrote they find no layers, so name the model that it was made from.",
            "",
        ]
        lines += ["On the 4-bit weights it was trained on, with QeRL's plugin installed:", "", "```bash"]
        lines += [
            f"vllm serve {model} --quantization qerl_nvfp4 --enable-lora --max-lora-rank {engine_rank(rank)}"
            f" --lora-modules {lora}",
            "```",
            "",
        ]
    return "\n".join(lines)


def render_merged(
    base: str, base_hash: str, adapter_hash: str, *, trained_norms: bool, quantization: str, folder: str | Path
) -> str:
    """Return the model card of a checkpoint with a merged adapter; ``folder`` is its absolute path."""
    norms = " and its trained norms" if trained_norms else ""
    lines = [
        "---",
        *_base_model(base),
        "base_model_relation: finetune",
        "tags: [grpo, qerl]",
        "---",
        "",
        "# Model trained with QeRL, adapter merged",
        "",
        f"`{_short(base)}` with a LoRA adapter{norms} merged into its weights, in BF16. The merge rounds each weight "
        "to BF16 once more, so that this is almost, and not bit for bit, the policy that was trained.",
        "",
        "| | |",
        "|---|---|",
        f"| base SHA-256 | `{base_hash}` (config.json and 64 samples a file) |",
        f"| adapter SHA-256 | `{adapter_hash}` |",
        f"| weights in training | {DESCRIPTION.get(quantization, quantization)} |",
        "",
        "```bash",
        f"vllm serve {shlex.quote(str(folder))}",
        "```",
        "",
    ]
    return "\n".join(lines)


def _short(base: str) -> str:
    """Return the model id, or only the name of a folder: its path is private to this machine."""
    return Path(base).name if Path(base).is_absolute() else base


def _base_model(base: str) -> list[str]:
    """Return the hub's metadata line for the base; it can name only models of the hub."""
    return [] if Path(base).is_absolute() else [f"base_model: {base}"]


def _without_norms() -> list[str]:
    return [
        f"**This adapter's norms were trained too.** They lie in `{NORMS}` and do not travel in a LoRA request: "
        "the commands below serve the base's norms, which is another policy than the one that was trained. "
        "`qerl evaluate` and `Policy.swap_folder` apply both; `qerl export --merge` writes a checkpoint with both.",
        "",
    ]


DESCRIPTION = {
    "qerl_nvfp4": "NVFP4 (4-bit), frozen",
    "bf16": "BF16, frozen",
    "nf4": "NF4 (bitsandbytes, 4-bit), frozen",
}
