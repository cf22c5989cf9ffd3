"""Write the README.md of a saved adapter or merged checkpoint, which says its base and how to serve it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_recipes.files.adapter import NORMS, engine_rank

WEIGHTS = {"qerl_nvfp4": "NVFP4 (4-bit), frozen", "bf16": "BF16, frozen", "nf4": "NF4 (bitsandbytes, 4-bit), frozen"}
ADAPTER = """\
---
{metadata}library_name: peft
tags: [lora, trl, grpo, vllm, qerl]
---

# LoRA adapter trained with QeRL

| | |
|---|---|
| base model | `{base}`{rounded} |
| base SHA-256 | `{base_hash}` (config.json and 64 samples a file) |
| weights in training | {weights} |
| rank, alpha | {rank}, {alpha} |
| modules | {modules} |
| trained norms | {norms} |
{versions}
## Serve it

{without_norms}{elsewhere}With stock vLLM{another_policy}:

```bash
{serve} --enable-lora --max-lora-rank {allowed_rank} --lora-modules {lora}
```
{on_nvfp4}"""
WITHOUT_NORMS = f"""\
**This adapter's norms were trained too.** They lie in `{NORMS}` and do not travel in a LoRA request: the commands \
below serve the base's norms, which is another policy than the one that was trained. `qerl evaluate` and \
`Policy.swap_folder` apply both; `qerl export --merge` writes a checkpoint with both.

"""
ELSEWHERE = """\
`{base}` stands for a folder that is not on the hub: name your copy of it.

"""
ON_NVFP4 = """
PEFT and transformers, too, compute in BF16, and want a base of BF16 weights: on a folder that `qerl quantize` wrote \
they find no layers, so name the model that it was made from.

On the 4-bit weights it was trained on, with QeRL's plugin installed:

```bash
{serve} --quantization qerl_nvfp4 --enable-lora --max-lora-rank {allowed_rank} --lora-modules {lora}
```
"""
MERGED = """\
---
{metadata}base_model_relation: finetune
library_name: transformers
tags: [trl, grpo, vllm, qerl]
---

# Model trained with QeRL, adapter merged

`{base}` with a LoRA adapter{norms} merged into its weights, in BF16. The merge rounds each weight to BF16 once more, \
so that this is almost, and not bit for bit, the policy that was trained.

| | |
|---|---|
| base SHA-256 | `{base_hash}` (config.json and 64 samples a file) |
| adapter SHA-256 | `{adapter_hash}` |
| weights in training | {weights} |

```bash
vllm serve {folder}
```
"""


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
) -> str:
    """Return the model card of an adapter as Markdown, with the hub's metadata on top.

    ``base`` is the absolute folder or model id that was trained on, ``datasets`` are ids of the hub, and ``folder`` is
    the adapter's absolute folder, or its repository on the hub. ``is_rounded`` says that ``base_hash`` is of the folder
    that ``qerl quantize`` made of ``base``. Only the commands contain paths, and on the hub none of this machine.
    """
    of_branch = [] if revision in (None, "main") else ["--revision", str(revision)]
    is_elsewhere = Path(base).is_absolute() and not Path(folder).is_absolute()
    targets, rank = adapter_config.get("target_modules"), adapter_config.get("r", 16)
    is_nvfp4 = quantization == "qerl_nvfp4"
    commands = {
        "serve": shlex.join(["vllm", "serve", short(base) if is_elsewhere else base, *of_branch]),
        "allowed_rank": engine_rank(rank),
        "lora": shlex.quote(f"{name}={folder}"),
    }
    return ADAPTER.format(
        metadata=_metadata(base, datasets),
        base=short(base),
        rounded=", of which `qerl quantize` made the folder with this hash" if is_rounded else "",
        base_hash=base_hash,
        weights=WEIGHTS.get(quantization, quantization),
        rank=rank,
        alpha=adapter_config.get("lora_alpha"),
        modules=targets if isinstance(targets, str) else ", ".join(sorted(targets or [])),
        norms=f"yes, in {NORMS}" if trained_norms else "no",
        versions="".join(f"| {package} | {version} |\n" for package, version in sorted((versions or {}).items())),
        without_norms=WITHOUT_NORMS if trained_norms else "",
        elsewhere=ELSEWHERE.format(base=short(base)) if is_elsewhere else "",
        another_policy=" (from a BF16 base: in BF16, another policy than was trained)" if is_nvfp4 else "",
        on_nvfp4=ON_NVFP4.format(**commands) if is_nvfp4 else "",
        **commands,
    )


def render_merged(
    base: str,
    base_hash: str,
    adapter_hash: str,
    *,
    trained_norms: bool,
    quantization: str,
    datasets: Sequence[str] = (),
    folder: str | Path,
) -> str:
    """Return the model card of a checkpoint with a merged adapter; ``folder`` is its absolute path."""
    return MERGED.format(
        metadata=_metadata(base, datasets),
        base=short(base),
        base_hash=base_hash,
        adapter_hash=adapter_hash,
        norms=" and its trained norms" if trained_norms else "",
        weights=WEIGHTS.get(quantization, quantization),
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
