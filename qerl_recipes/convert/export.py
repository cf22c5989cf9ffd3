"""``qerl export``: write a trained adapter as a self-contained folder, or merge it into its base.

A merged policy differs from the trained one by rounding each weight to BF16 once more.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from qerl_kernels.nvfp4 import dequantize

from qerl_recipes.convert.shards import Entry, copy_other_files, naming_target, write_config, write_shards
from qerl_recipes.files import card as model_card
from qerl_recipes.files import run_state
from qerl_recipes.files.adapter import CONFIG, NORMS, TEMPLATE, TENSORS, AdapterFolder, open_adapter
from qerl_recipes.files.base_model import local_folder, written_name
from qerl_recipes.files.whole_folder import whole_folder
from qerl_recipes.recipe.keys import ENGINE_RANKS, WITHOUT_ADAPTER
from qerl_recipes.tasks.sources import hub_ids
from qerl_vllm_plugin.adapter.check import AdapterError, CheckedAdapter, Target, check
from qerl_vllm_plugin.weights.checkpoint import CheckpointReport, check_tensors, inspect_folder
from qerl_vllm_plugin.weights.formats import COMPRESSED
from qerl_vllm_plugin.wire.safetensors_file import DTYPES, read_tensor

Tensors = Mapping[str, torch.Tensor]
README = "README.md"


def export(
    adapter: str | Path,
    destination: str | Path,
    *,
    base: str | None = None,
    merge: bool = False,
    overwrite: bool = False,
    name: str | None = None,
) -> Path:
    """Write the adapter folder ``adapter`` to ``destination``, whole or not at all, and return the destination.

    ``base`` is the base's present folder or model id, by default the one trained on. ``name`` is the adapter's in the
    card's commands. Raise ValueError for an adapter that is damaged, or not of this base, and for ``merge`` of NF4 or
    with a ``name``; FileExistsError for a destination that is not empty, unless ``overwrite``.
    """
    if merge and name is not None:
        raise ValueError(f"name {name!r} is of an adapter, and a merged checkpoint has none; remove --name or --merge")
    saved = open_adapter(adapter)
    tensors, norms = saved.read()
    base_name = base or saved.base
    if base_name is None:
        raise ValueError(f"{adapter} does not say which base it was trained on; name it with --base")
    source = written_name(base_name)
    if merge:
        return _merge(saved, tensors, norms, source, Path(destination), overwrite)
    target = Path(destination).absolute()
    base_hash = saved.state.get("base_hash")
    if base is not None or base_hash is None:
        base_hash = run_state.base_hash(local_folder(source))
        saved.check_base(base_hash)
    arm = saved.quantization or "bf16"
    card = model_card.render(
        source,
        base_hash,
        saved.config,
        trained_norms=bool(norms),
        quantization=arm,
        versions=run_state.versions(),
        datasets=hub_ids(saved.recipe),
        name=name or "policy",
        folder=target,
    )
    state = {"base": source, "base_hash": base_hash, "quantization": arm, "train_norms": bool(norms)}
    state["recipe"] = saved.recipe  # evaluation makes its prompts the same way
    config = {**saved.config, "base_model_name_or_path": source, "inference_mode": True}
    with whole_folder(target, overwrite=overwrite, proof=CONFIG) as folder, naming_target(target):
        for file in (TENSORS, NORMS, TEMPLATE):
            if (saved.path / file).is_file():
                shutil.copyfile(saved.path / file, folder / file)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / run_state.STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        (folder / README).write_text(card, encoding="utf-8")
    return Path(destination)


def _merge(
    saved: AdapterFolder, tensors: Tensors, norms: Tensors, source: str, destination: Path, overwrite: bool
) -> Path:
    if saved.quantization == "nf4":
        raise ValueError(
            f"{saved.path} was trained on NF4 weights, which are not merged; serve it unmerged: "
            f"vllm serve {source} --quantization bitsandbytes --enable-lora"
        )
    folder = local_folder(source)
    base_hash = run_state.base_hash(folder)
    saved.check_base(base_hash)
    report = inspect_folder(folder)
    try:
        checked = check(tensors, saved.config, _linears(report), ENGINE_RANKS[-1])
        for name, weight in norms.items():
            tensor = report.tensors.get(name)
            if tensor is None or tensor.shape != tuple(weight.shape):
                shape = "no such tensor" if tensor is None else f"shape {list(tensor.shape)}"
                raise AdapterError(f"trained norm {name} {list(weight.shape)}: the base has {shape}")
    except AdapterError as error:
        raise ValueError(f"{saved.path} does not fit {source}: {error}") from error
    target = destination.absolute()
    with whole_folder(target, overwrite=overwrite) as partial, naming_target(target):
        if report.scheme is None and saved.quantization == "qerl_nvfp4":
            # the adapter was trained on quantized weights: added to the BF16 ones, it would be another policy
            from qerl_recipes.convert.quantize import quantize_checkpoint

            quantize_checkpoint(folder, partial / "packed", quiet=True)
            _write_merged(inspect_folder(partial / "packed"), checked, norms, partial)
            shutil.rmtree(partial / "packed")
        else:
            _write_merged(report, checked, norms, partial)
        card = model_card.render(
            source,
            base_hash,
            saved.config,
            trained_norms=bool(norms),
            quantization=saved.quantization or "bf16",
            datasets=hub_ids(saved.recipe),
            folder=target,
            merged=saved.sha256(),
        )
        (partial / README).write_text(card, encoding="utf-8")
    return destination


def _linears(report: CheckpointReport) -> dict[str, Target]:
    """Return the linear layers of a checkpoint that an adapter may change, by module name."""
    layers = {}
    for name, tensor in report.tensors.items():
        module, _, kind = name.rpartition(".")
        is_matrix = len(tensor.shape) == 2 and module.rpartition(".")[2] not in WITHOUT_ADAPTER
        if is_matrix and kind in ("weight", COMPRESSED.codes):
            columns = tensor.shape[1] * (2 if kind == COMPRESSED.codes else 1)
            layers[module] = Target(module, 0, columns, tensor.shape[0])
    return layers


def _write_merged(report: CheckpointReport, adapter: CheckedAdapter, norms: Tensors, folder: Path) -> None:
    """Write w = bf16(code * block scale / divisor + alpha / r * B A), summed in fp32, in the base's shards."""

    def tensor(entry: Entry) -> torch.Tensor:
        if entry.name in norms:
            return norms[entry.name].to(torch.bfloat16)
        module = entry.name.removesuffix(".weight")
        if entry.name in report.tensors:
            w = read_tensor(report.tensors[entry.name])
        else:
            parts = (read_tensor(report.tensors[f"{module}.{part}"]) for part in COMPRESSED.packed_names)
            codes, block_scales, divisor = parts
            check_tensors(module, codes, block_scales, divisor)
            w = dequantize(codes, block_scales).float() / divisor
        if module in adapter.pairs:
            a, b = adapter.pairs[module]
            w = w.float() + adapter.scaling * (b.float() @ a.float())
        return w.to(entry.dtype)

    shards: dict[str, list[Entry]] = {file.name: [] for file in report.files}
    for name, header in report.tensors.items():
        module, _, kind = name.rpartition(".")
        dtype, shape = DTYPES[header.dtype], header.shape
        if kind in (COMPRESSED.block_scales, COMPRESSED.tensor_scale):
            continue
        if kind == COMPRESSED.codes:
            name, dtype, shape = f"{module}.weight", torch.bfloat16, (shape[0], 2 * shape[1])
        elif header.dtype in ("F16", "F32") or name in norms:
            dtype = torch.bfloat16
        shards[header.file.name].append(Entry(name, dtype, shape))
    write_shards(folder, shards, tensor, "merging")
    write_config(folder, report.config, None)
    copy_other_files(report.folder, folder)
