"""Write the language model of a vision-language checkpoint as a checkpoint of its own: ``qerl text-model``.

No weight changes, and NVFP4 weights stay NVFP4. Tensors get the names that the text model has in transformers;
adapters, noise and trained norms use these names, too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_recipes.convert.quantize import quantization_config
from qerl_recipes.convert.shards import Entry, copy_other_files, write_shards
from qerl_recipes.files.base_model import local_folder
from qerl_recipes.files.whole_folder import whole_folder
from qerl_recipes.model.families import on_meta
from qerl_vllm_plugin.weights.checkpoint import CONFIG, CheckpointReport, inspect_folder
from qerl_vllm_plugin.weights.families import LANGUAGE_MODELS
from qerl_vllm_plugin.weights.formats import COMPRESSED, NVFP4
from qerl_vllm_plugin.wire.safetensors_file import DTYPES, CheckpointError, read_tensor

# prefixes in vision-language checkpoints, which depend on the version of transformers -> those of a text model
RENAMED = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
LEFT_OUT = ("visual", "vision_tower", "multi_modal_projector", "mtp")
OF_IMAGES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def write_text_model(source: str | Path, destination: str | Path, *, overwrite: bool = False) -> Path:
    """Write the language model of ``source``, a folder or a model id, to ``destination``, and return the destination.

    Raise CheckpointError for a checkpoint that is damaged, of an unknown family or layout, or quantized other than to
    NVFP4 weights alone, and FileExistsError for a destination that is not empty, unless ``overwrite``.
    """
    folder, target = local_folder(source), Path(destination)
    report = inspect_folder(folder)
    kind = LANGUAGE_MODELS.get(str(report.config.get("model_type")))
    if kind is None:
        raise CheckpointError(
            f"{folder}: model_type {report.config.get('model_type')!r} has no language model that is known here; known "
            f"are {', '.join(LANGUAGE_MODELS)}"
        )
    names = _text_names(report)
    config = _text_config(folder, kind, tied=HEAD not in names.values())
    _check_text_model(report, names, config)
    if report.scheme is not None:
        dense = {names[f"{name}.weight"] for name in report.layers_as(None) if f"{name}.weight" in names}
        ignore = sorted(name.removesuffix(".weight") for name in (dense | {HEAD}) - {EMBEDDING})
        config = {**config, "quantization_config": quantization_config(ignore)}
    sources = {new: report.tensors[old] for old, new in names.items()}
    shards: dict[str, list[Entry]] = {}
    for new, tensor in sources.items():
        shards.setdefault(tensor.file.name, []).append(Entry(new, DTYPES[tensor.dtype], tensor.shape))
    with whole_folder(target, overwrite=overwrite) as partial:
        write_shards(partial, shards, lambda entry: read_tensor(sources[entry.name]), "writing")
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_other_files(folder, partial)
        for name in OF_IMAGES:
            (partial / name).unlink(missing_ok=True)
    return target


def _text_names(report: CheckpointReport) -> dict[str, str]:
    """Map the language model's names to the text model's; raise CheckpointError for a part that is not known."""
    renamed = {}
    for name in report.tensors:
        new = next((to + name.removeprefix(old) for old, to in RENAMED.items() if name.startswith(old)), name)
        if new.startswith(TEXT):
            renamed[name] = new
        elif not set(LEFT_OUT) & set(name.split(".")[:2]):
            raise CheckpointError(
                f"{report.folder}: {name} is neither of the language model nor of {', '.join(LEFT_OUT)}; this "
                "checkpoint's layout is not known here"
            )
    return renamed


def _text_config(folder: Path, kind: str, *, tied: bool) -> dict[str, Any]:
    """Return the config.json of the text model, as transformers derives it from that of the whole model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = AutoConfig.from_pretrained(folder)
    values = {key: value for key, value in whole.get_text_config().to_dict().items() if key != "model_type"}
    # mrope has a position each for time, height and width; in a text all three are the same number
    rope = values.get("rope_parameters") or {}
    values["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    if rope.get("type") == "mrope":
        values["rope_parameters"]["type"] = "default"
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[key] = values.get(key) if values.get(key) is not None else getattr(whole, key, None)
    built = AutoConfig.for_model(kind, **{**values, "tie_word_embeddings": tied, "dtype": whole.dtype})
    built.architectures = [AutoModelForCausalLM._model_mapping[type(built)].__name__]
    return built.to_diff_dict()


def _check_text_model(report: CheckpointReport, names: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if names or shapes are not those of transformers' text model."""
    expected = {name: tuple(parameter.shape) for name, parameter in on_meta(config).named_parameters()}
    shapes = _shapes(report, names)
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            shape, target = shapes.get(name, "none: it is missing"), expected.get(name, "no such tensor")
            raise CheckpointError(
                f"{report.folder}: {name} has shape {shape} and {config['model_type']} {target}; this checkpoint's "
                "layout is not known here"
            )


def _shapes(report: CheckpointReport, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes by the text model's names; a packed layer has the shape of its BF16 weight."""
    packed = set(report.layers_as(NVFP4))
    shapes: dict[str, tuple[int, ...]] = {}
    for old, new in names.items():
        module, _, suffix = old.rpartition(".")
        shape = tuple(report.tensors[old].shape)
        if module in packed and suffix == COMPRESSED.codes:
            shapes[f"{new.removesuffix(suffix)}weight"] = (shape[0], 2 * shape[1])
        elif module not in packed or suffix not in (COMPRESSED.block_scales, COMPRESSED.tensor_scale):
            shapes[new] = shape
    return shapes
