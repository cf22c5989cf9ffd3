"""The README.md of every saved adapter: which base it belongs to, and how to serve it."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NORMS_FILE = "norms.safetensors"


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
    """The card, Markdown with the hub's metadata on top.

    ``base`` is the absolute folder or model id that was trained on, ``base_hash`` its ``checkpoints.base_hash``,
    ``adapter_config`` the content of adapter_config.json, ``quantization`` the arm (qerl_nvfp4, bf16 or nf4),
    ``versions`` package -> version, ``folder`` the absolute one where the adapter lies: the commands name both, and are
    to work wherever they are typed.
    """
    targets = adapter_config.get("target_modules")
    named = targets if isinstance(targets, str) else ", ".join(sorted(targets or []))
    rank = adapter_config.get("r", 16)
    model, lora = shlex.quote(base), shlex.quote(f"{name}={folder}")
    lines = [
        "---",
        f"base_model: {base}",
        "library_name: peft",
        "tags: [lora, grpo, qerl]",
        "---",
        "",
        "# LoRA adapter trained with QeRL",
        "",
        "| | |",
        "|---|---|",
        f"| base model | `{base}` |",
        f"| base SHA-256 | `{base_hash}` (config.json and 64 samples a file) |",
        f"| weights in training | {DESCRIPTION.get(quantization, quantization)} |",
        f"| rank, alpha | {rank}, {adapter_config.get('lora_alpha')} |",
        f"| modules | {named} |",
        f"| trained norms | {'yes, in ' + NORMS_FILE if trained_norms else 'no'} |",
    ]
    lines += [f"| {package} | {version} |" for package, version in sorted((versions or {}).items())]
    lines += [
        "",
        "## Serve it",
        "",
        *(_without_norms() if trained_norms else []),
        "With stock vLLM:",
        "",
        "```bash",
        f"vllm serve {model} --enable-lora --max-lora-rank {engine_rank(rank)} --lora-modules {lora}",
        "```",
        "",
    ]
    if quantization == "qerl_nvfp4":
        lines += ["On the 4-bit weights it was trained on, with QeRL's plugin installed:", "", "```bash"]
        lines += [
            f"vllm serve {model} --quantization qerl_nvfp4 --enable-lora --max-lora-rank {engine_rank(rank)}"
            f" --lora-modules {lora}",
            "```",
            "",
        ]
    return "\n".join(lines)


def _without_norms() -> list[str]:
    return [
        f"**This adapter's norms were trained too.** They lie in `{NORMS_FILE}` and do not travel in a LoRA request: "
        "the commands below serve the base's norms, which is another policy than the one that was trained. "
        "`qerl evaluate` and `Policy.swap_folder` apply both; `qerl export --merge` writes a checkpoint with both.",
        "",
    ]


DESCRIPTION = {
    "qerl_nvfp4": "NVFP4 (4-bit), frozen",
    "bf16": "BF16, frozen",
    "nf4": "NF4 (bitsandbytes, 4-bit), frozen",
}
# vLLM's --max-lora-rank takes one of these
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def engine_rank(rank: int) -> int:
    """The smallest ``max_lora_rank`` of vLLM that holds an adapter of ``rank``. Raises ValueError above 512."""
    for allowed in ENGINE_RANKS:
        if rank <= allowed:
            return allowed
    raise ValueError(f"an adapter of rank {rank} cannot be served: vLLM holds at most rank {ENGINE_RANKS[-1]}")
