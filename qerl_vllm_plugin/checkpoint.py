"""A checkpoint folder checked before anything is built: its config, its files, their headers.

``inspect_folder`` reads config.json and the headers of all shards (milliseconds for a 32B model); the values of packed
tensors are checked one layer at a time while they are loaded, by ``check_tensors``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl_vllm_plugin.expected_tensors import expected_tensors
from qerl_vllm_plugin.safetensors_header import DOWNLOAD_AGAIN, TensorHeader, read_header
from qerl_vllm_plugin.scheme import GROUP_SIZE, WAY_OUT, CheckpointError, Nvfp4Scheme, read_quantization

__all__ = ["CheckpointError", "CheckpointReport", "Nvfp4Scheme", "check_tensors", "inspect_folder", "read_quantization"]

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
FLOATS = ("BF16", "F16", "F32")
IGNORED_SUFFIX = ".self_attn.rotary_emb.inv_freq"  # old Llama checkpoints store this constant


@dataclass(frozen=True)
class CheckpointReport:
    """What a folder holds; ``scheme`` is None for an unquantized one.

    ``complete`` says whether the architecture is one whose every tensor was compared with config.json; for others only
    the files and the packed tensors were checked.
    """

    folder: Path
    config: Mapping[str, Any]
    scheme: Nvfp4Scheme | None
    tensors: Mapping[str, TensorHeader]
    complete: bool

    @property
    def files(self) -> list[Path]:
        """The shards, sorted."""
        return sorted({tensor.file for tensor in self.tensors.values()})


def inspect_folder(path: str | Path) -> CheckpointReport:
    """Check that a folder is a whole checkpoint: every shard there, not truncated, and in agreement with config.json.

    Raises CheckpointError naming the file or tensor, the limit and the way out.
    """
    folder = Path(path)
    config = _read_json(folder / CONFIG)
    quantization = config.get("quantization_config")
    scheme = read_quantization(quantization) if quantization else None
    tensors = _read_tensors(folder)
    _check_packed(tensors, scheme)
    try:
        expected = expected_tensors(config)
    except KeyError as error:
        raise CheckpointError(f"{folder / CONFIG}: lacks the key {error}; {DOWNLOAD_AGAIN}") from error
    if expected is not None:
        wanted: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
        for name, tensor in expected.items():
            if tensor.optional and name not in tensors:
                continue
            module = name.removesuffix(".weight")
            packed = tensor.linear and scheme is not None and scheme.is_quantized(module)
            wanted |= _packed(module, *tensor.shape) if packed else {name: (FLOATS, tensor.shape)}
        _compare(folder, tensors, wanted)
    return CheckpointReport(folder, config, scheme, tensors, complete=expected is not None)


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
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({error}); {DOWNLOAD_AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, not a JSON object; {DOWNLOAD_AGAIN}")
    return value


def _read_tensors(folder: Path) -> dict[str, TensorHeader]:
    index, single = folder / INDEX, folder / SINGLE
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


def _packed(module: str, N: int, K: int) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """The three tensors of a packed linear layer: accepted dtypes and shape of each."""
    if K % GROUP_SIZE:
        raise CheckpointError(
            f"{module}: {K} columns, not a multiple of {GROUP_SIZE}, cannot be packed; ignore this layer:"
            f" `qerl quantize SOURCE DESTINATION --ignore {module}`"
        )
    return {
        f"{module}.weight_packed": (("U8",), (N, K // 2)),
        f"{module}.weight_scale": (("F8_E4M3",), (N, K // GROUP_SIZE)),
        f"{module}.weight_global_scale": (("F32",), (1,)),
    }


def _check_packed(tensors: Mapping[str, TensorHeader], scheme: Nvfp4Scheme | None) -> None:
    """Packed tensors come in threes that fit together, for the layers that the scheme names: any architecture."""
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "input_global_scale":
            raise CheckpointError(f"{tensor.file}: {name} belongs to W4A4, which is not supported; {WAY_OUT}")
        if suffix not in ("weight_packed", "weight_scale", "weight_global_scale"):
            continue
        if scheme is None:
            raise CheckpointError(
                f"{tensor.file}: {name} is quantized, but {CONFIG} has no quantization_config; {WAY_OUT}"
            )
        if not scheme.is_quantized(module):
            raise CheckpointError(
                f"{tensor.file}: {name} is quantized, but {CONFIG} lists {module} in ignore; {WAY_OUT}"
            )
        packed = tensors.get(f"{module}.weight_packed")
        if packed is None or len(packed.shape) != 2:
            raise CheckpointError(f"{tensor.file}: {name} has no two-dimensional {module}.weight_packed; {WAY_OUT}")
        for partner, want in _packed(module, packed.shape[0], 2 * packed.shape[1]).items():
            _check_one(tensors.get(partner), partner, tensor.file, *want)


def _compare(
    folder: Path,
    tensors: Mapping[str, TensorHeader],
    wanted: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]],
) -> None:
    for name, (dtypes, shape) in wanted.items():
        _check_one(tensors.get(name), name, folder, dtypes, shape)
    extra = [name for name in tensors if name not in wanted and not name.endswith(IGNORED_SUFFIX)]
    if extra:
        raise CheckpointError(
            f"{tensors[extra[0]].file}: tensor {extra[0]} has no place in the model that {CONFIG} describes"
            f" ({len(extra)} such tensors); {DOWNLOAD_AGAIN}"
        )


def _check_one(
    tensor: TensorHeader | None, name: str, place: Path, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    want = f"{' or '.join(dtypes)} {list(shape)}"
    if tensor is None:
        raise CheckpointError(
            f"{place}: tensor {name} ({want}) is missing, though {CONFIG} asks for it; {DOWNLOAD_AGAIN}"
        )
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, but {CONFIG} asks for {want};"
            f" {DOWNLOAD_AGAIN}"
        )
