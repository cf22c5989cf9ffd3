"""Check a checkpoint folder before anything is built: its config, its files and their headers.

``inspect_folder`` reads config.json and the headers of all shards, which takes milliseconds for a 32B model.
``check_tensors`` checks the values of packed tensors one layer at a time, while they are loaded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl_vllm_plugin.weights.expected import CONFIG, cache_scales, check_one, check_quantized, expected_tensors
from qerl_vllm_plugin.weights.formats import (
    FP8,
    GROUP_SIZE,
    NVFP4,
    OWN_FILE,
    SCALAR,
    WAY_OUT,
    Nvfp4Scheme,
    Want,
    read_quantization,
)
from qerl_vllm_plugin.wire.safetensors_file import DOWNLOAD_AGAIN, CheckpointError, TensorHeader, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARDED = "model-rank-*-part-*.safetensors"
FLOATS = ("BF16", "F16", "F32")
IGNORED_SUFFIX = ".self_attn.rotary_emb.inv_freq"  # old Llama checkpoints store this constant


@dataclass(frozen=True)
class CheckpointReport:
    """Report what ``inspect_folder`` found in a folder; ``scheme`` is None for an unquantized checkpoint.

    ``complete`` is true for an architecture whose every tensor was compared with config.json. For others only the files
    and the quantized tensors were checked.
    """

    folder: Path
    config: Mapping[str, Any]
    scheme: Nvfp4Scheme | None
    tensors: Mapping[str, TensorHeader]
    complete: bool

    @property
    def files(self) -> list[Path]:
        """Return the paths of the shards, sorted."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    def layers_as(self, kind: str | None) -> list[str]:
        """Return the layers stored as ``kind``; for None those with an unquantized matrix, embeddings included."""
        codes = self.scheme.format.codes if self.scheme is not None and kind == NVFP4 else "weight"
        stored = {NVFP4: ("U8",), FP8: ("F8_E4M3",), None: FLOATS}[kind]
        matrices = [name for name, t in self.tensors.items() if len(t.shape) == 2 and t.dtype in stored]
        return [name.removesuffix(f".{codes}") for name in matrices if name.endswith(f".{codes}")]


def inspect_folder(path: str | Path, *, weight_only: bool = False) -> CheckpointReport:
    """Check that a folder is a whole checkpoint: no shard is missing or truncated, and all agree with config.json.

    ``weight_only`` also accepts checkpoints that hold more than packed weights (see read_quantization).
    Raises CheckpointError naming the file or tensor, the limit and the way out.
    """
    folder = Path(path)
    config = _read_json(folder / CONFIG)
    try:
        return _inspect(folder, config, weight_only)
    except (TypeError, AttributeError, ArithmeticError, LookupError) as error:  # such as a list for a number
        raise CheckpointError(
            f"{folder / CONFIG}: a value is of another kind than in the config.json of a model ({error});"
            f" {DOWNLOAD_AGAIN}"
        ) from error


def check_overrides(overrides: Any) -> None:
    """Raise ValueError for --hf-overrides that say how a checkpoint is quantized."""
    parts = [overrides, overrides.get("text_config")] if isinstance(overrides, Mapping) else []
    if any(isinstance(part, Mapping) and "quantization_config" in part for part in parts):
        raise ValueError(
            "--hf-overrides: quantization_config says how the bytes of the checkpoint are to be read, and nothing else "
            "would fit them; leave it out, and put another format into NVFP4 with `qerl quantize SOURCE DESTINATION`"
        )


def _inspect(folder: Path, config: dict[str, Any], weight_only: bool) -> CheckpointReport:
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not quantization and (folder / OWN_FILE).is_file():
        quantization = _read_json(folder / OWN_FILE)
    scheme = read_quantization(quantization, weight_only=weight_only) if quantization else None
    tensors = _read_tensors(folder)
    check_quantized(tensors, scheme)
    try:
        expected = expected_tensors(config)
    except KeyError as error:
        raise CheckpointError(f"{folder / CONFIG}: lacks the key {error}; {DOWNLOAD_AGAIN}") from error
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}; {DOWNLOAD_AGAIN}") from error
    if expected is not None:
        wanted: dict[str, Want] = {}
        for name, tensor in expected.items():
            if tensor.optional and name not in tensors:
                continue
            module = name.removesuffix(".weight")
            if tensor.linear and scheme is not None and scheme.kind(module) is not None:
                N, K = tensor.shape
                wanted |= scheme.tensors(module, N, K)
            else:
                wanted[name] = Want(FLOATS, (tensor.shape,))
        if scheme is not None and scheme.kv_cache:
            wanted |= _cache_scales_of_all_layers(tensors, config["num_hidden_layers"])
        _compare(folder, tensors, wanted)
    return CheckpointReport(folder, config, scheme, tensors, complete=expected is not None)


def _cache_scales_of_all_layers(tensors: Mapping[str, TensorHeader], layers: int) -> dict[str, Want]:
    """Return the wanted k and v scales of every layer, named in the style of the scales in the checkpoint."""
    first = min(cache_scales(tensors))
    place = "{x}_proj.{x}_scale" if "_proj." in first else "{x}_scale"
    names = [f"model.layers.{layer}.self_attn.{place.format(x=x)}" for layer in range(layers) for x in "kv"]
    return {name: Want(FLOATS, SCALAR) for name in names}


def weights_taken(report: CheckpointReport, cache_scales: str) -> str:
    """Return a line for the user that says what is used of a checkpoint with more than packed weights, and what not.

    ``cache_scales`` completes the sentence "the scales of the FP8 KV cache ...".
    """
    assert report.scheme is not None
    packed, fp8, dense = (report.layers_as(kind) for kind in (NVFP4, FP8, None))
    text = f"weights only of {report.folder}: {len(packed)} layers in NVFP4, {len(fp8)} FP8 layers expanded to BF16, "
    text += f"{len(dense)} matrices left in BF16 ({', '.join(dense[:3])}{', ...' if len(dense) > 3 else ''})"
    if report.scheme.activations:
        text += "; activation scales are dropped, activations stay in 16 bits"
    return text + (f"; the scales of the FP8 KV cache {cache_scales}" if report.scheme.kv_cache else "")


def check_tensors(name: str, codes: torch.Tensor, block_scales: torch.Tensor, divisor: torch.Tensor) -> None:
    """Check the values of one packed layer before it is used.

    ``codes: (N, K/2)`` uint8, ``block_scales: (N, K/16)`` float8_e4m3fn, ``divisor: (1,)`` or ``()`` float32.
    Raises CheckpointError if they do not fit together, a block scale is NaN or negative, or the divisor (or its
    reciprocal, the tensor scale) is not a positive finite number.
    """
    if codes.dtype != torch.uint8 or block_scales.dtype != torch.float8_e4m3fn or divisor.dtype != torch.float32:
        raise CheckpointError(
            f"{name}: codes, block scales and tensor scale are {codes.dtype}, {block_scales.dtype} and {divisor.dtype},"
            f" not uint8, float8_e4m3fn and float32; {WAY_OUT}"
        )
    N, half = codes.shape
    if 2 * half % GROUP_SIZE or block_scales.shape != (N, 2 * half // GROUP_SIZE) or divisor.numel() != 1:
        raise CheckpointError(
            f"{name}: codes {tuple(codes.shape)}, block scales {tuple(block_scales.shape)} and tensor scale"
            f" {tuple(divisor.shape)} do not fit; they must be (N, K/2), (N, K/{GROUP_SIZE}) and (1,); {WAY_OUT}"
        )
    bad = block_scales.view(torch.uint8) > 0x7E  # 0x7E is 448, 0x7F is NaN, and from 0x80 on the sign is set
    if bad.any():
        row, block = bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{name}.weight_scale: {int(bad.sum())} block scales are NaN or negative, the first at row {row}, block"
            f" {block}; a block scale must lie in 0 to 448; {WAY_OUT}"
        )
    scale = float(divisor)
    if not (0 < scale < float("inf") and bool(torch.isfinite(1 / divisor).all())):
        raise CheckpointError(
            f"{name}.weight_global_scale: {scale} is not a usable tensor scale: it and its reciprocal must be positive"
            f" finite float32 numbers; {WAY_OUT}"
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file; a checkpoint folder holds a {file.name}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error}); {DOWNLOAD_AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, not a JSON object; {DOWNLOAD_AGAIN}")
    return value


def _read_tensors(folder: Path) -> dict[str, TensorHeader]:
    index, single = folder / INDEX, folder / SINGLE
    if saved := sorted(folder.glob(SHARDED)):
        raise CheckpointError(
            f"{saved[0]}: what vLLM's save_sharded_state writes is the memory of one engine, and no checkpoint; serve "
            "the checkpoint that it was made from, and keep such files in a folder of their own"
        )
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(
                f"{folder}: holds neither {SINGLE} nor {INDEX}; qerl_nvfp4 reads safetensors only: save the model with"
                " transformers' save_pretrained, or download its safetensors files"
            )
        return read_header(single)
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index}: its weight_map does not give a file for each tensor; {DOWNLOAD_AGAIN}")
    if single.is_file() and SINGLE not in places.values():
        raise CheckpointError(f"{folder}: holds both {SINGLE} and {INDEX}; delete the one that is not meant")
    tensors: dict[str, TensorHeader] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise CheckpointError(f"{folder / file}: this shard is named in {INDEX} but missing; {DOWNLOAD_AGAIN}")
        tensors |= {name: t for name, t in read_header(folder / file).items() if places.get(name, file) == file}
    if difference := sorted(places.keys() ^ tensors.keys()):
        name = difference[0]
        reason = f"is not in {places[name]}" if name in places else f"of {tensors[name].file.name} is not in the index"
        raise CheckpointError(f"{index}: tensor {name} {reason} ({len(difference)} such); {DOWNLOAD_AGAIN}")
    return tensors


def _compare(folder: Path, tensors: Mapping[str, TensorHeader], wanted: Mapping[str, Want]) -> None:
    for name, want in wanted.items():
        check_one(tensors.get(name), name, folder, want)
    extra = [name for name in tensors if name not in wanted and not name.endswith(IGNORED_SUFFIX)]
    if extra:
        raise CheckpointError(
            f"{tensors[extra[0]].file}: tensor {extra[0]} has no place in the model that {CONFIG} describes"
            f" ({len(extra)} such tensors); {DOWNLOAD_AGAIN}"
        )
