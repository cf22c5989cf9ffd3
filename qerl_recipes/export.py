"""``qerl export``: a trained adapter as a folder that stands by itself, or merged into its base.

Without ``merge``: what PEFT and stock vLLM read (adapter_model.safetensors, adapter_config.json), norms.safetensors
where norms were trained, a card, and which base it belongs to. With ``merge``: an ordinary BF16 checkpoint.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from qerl_recipes import checkpoints, merge_weights, model_card
from qerl_recipes.base_model import local_folder, written_name
from qerl_recipes.evaluate import check_adapter
from qerl_recipes.whole_folder import whole_folder
from qerl_vllm_plugin.adapter import AdapterError, check
from qerl_vllm_plugin.checkpoint import inspect_folder

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class Saved:
    """An adapter folder in memory. ``quantization`` is the arm it was trained on, None where nothing says."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    norms: dict[str, torch.Tensor]
    base: str | None
    base_hash: str | None
    quantization: str | None


def export(
    adapter: str | Path,
    destination: str | Path,
    *,
    base: str | None = None,
    merge: bool = False,
    overwrite: bool = False,
    name: str = "policy",
) -> Path:
    """Write the adapter folder ``adapter`` to ``destination``, whole or not at all -> the destination.

    ``base`` is where the base lies now (folder or model id); by default what the adapter was trained on. ``merge``
    writes base + adapter (+ trained norms, rounded to BF16) as one BF16 checkpoint, one tensor at a time. ``name`` is
    the adapter's name in the card's commands.

    Raises ValueError for an adapter that is damaged, does not fit the base or belongs to another one, and
    FileExistsError for a destination that is not empty, unless ``overwrite``.
    """
    saved = read(Path(adapter))
    named = base or saved.base
    if named is None:
        raise ValueError(f"{adapter} does not say which base it was trained on; name it with --base")
    source = written_name(named)
    if merge:
        return _merge(saved, Path(adapter), source, Path(destination), overwrite)
    if base is None and saved.base_hash is not None:
        base_hash = saved.base_hash
    else:
        base_hash = checkpoints.base_hash(local_folder(source))
        check_adapter(adapter, base_hash)
    arm = saved.quantization or "bf16"
    card = model_card.render(
        source,
        base_hash,
        saved.config,
        trained_norms=bool(saved.norms),
        quantization=arm,
        versions=checkpoints.versions(),
        name=name,
        folder=Path(destination).absolute(),
    )
    belongs = {"base": source, "base_hash": base_hash, "quantization": arm, "train_norms": bool(saved.norms)}
    config = {**saved.config, "base_model_name_or_path": source, "inference_mode": True}
    with whole_folder(destination, overwrite=overwrite, proof=CONFIG) as folder:
        shutil.copyfile(Path(adapter) / TENSORS, folder / TENSORS)
        if saved.norms:
            shutil.copyfile(Path(adapter) / model_card.NORMS_FILE, folder / model_card.NORMS_FILE)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / checkpoints.STATE_FILE).write_text(json.dumps(belongs, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card, encoding="utf-8")
    return Path(destination)


def read(folder: Path) -> Saved:
    """A saved adapter with all its values finite. Raises ValueError if it is missing or damaged."""
    for file in (CONFIG, TENSORS):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} is no adapter: it has no {file}; name a folder that qerl train has saved")
    norms_file, state_file = folder / model_card.NORMS_FILE, folder / checkpoints.STATE_FILE
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        state = json.loads(state_file.read_text(encoding="utf-8")) if state_file.is_file() else {}
        tensors = load_file(folder / TENSORS)
        norms = load_file(norms_file) if norms_file.is_file() else {}
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder} is damaged: {error}; save the adapter again") from error
    for tensor_name, tensor in {**tensors, **norms}.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{folder}: {tensor_name} holds NaN or infinite values; export an earlier checkpoint")
    if not tensors:
        raise ValueError(f"{folder / TENSORS} holds no tensors; save the adapter again")
    named = state.get("base") or config.get("base_model_name_or_path")
    return Saved(tensors, config, norms, named, state.get("base_hash"), state.get("quantization"))


def _merge(saved: Saved, adapter: Path, source: str, destination: Path, overwrite: bool) -> Path:
    if saved.quantization == "nf4":
        raise ValueError(
            f"{adapter} was trained on NF4 weights, which are not merged; serve it unmerged: "
            f"vllm serve {source} --quantization bitsandbytes --enable-lora"
        )
    folder = local_folder(source)
    check_adapter(adapter, checkpoints.base_hash(folder))
    report = inspect_folder(folder)
    try:
        checked = check(saved.tensors, saved.config, merge_weights.targets(report), model_card.ENGINE_RANKS[-1])
        merge_weights.check_norms(report, saved.norms)
    except AdapterError as error:
        raise ValueError(f"{adapter} does not fit {source}: {error}") from error
    with whole_folder(destination, overwrite=overwrite) as partial:
        if report.scheme is None and saved.quantization == "qerl_nvfp4":
            # the adapter was trained on the quantized weights: on the BF16 ones it would be another policy
            from qerl_recipes.quantize import quantize_checkpoint

            quantize_checkpoint(folder, partial / "packed")
            merge_weights.write(inspect_folder(partial / "packed"), checked, saved.norms, partial)
            shutil.rmtree(partial / "packed")
        else:
            merge_weights.write(report, checked, saved.norms, partial)
    return destination
