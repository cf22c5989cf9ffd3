"""Read and write the header of a safetensors file without touching the tensors, and read one tensor at a time.

The format (https://huggingface.co/docs/safetensors): 8 bytes of little-endian header length, a JSON header, then the
tensors without holes. The safetensors library maps a file whole. Here one tensor is read into memory of its own, so
that a program's peak memory is the tensor and not the file.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Tensors = Mapping[str, torch.Tensor]  # by name, as a file has them
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DOWNLOAD_AGAIN = "download or quantize the checkpoint again"


class CheckpointError(ValueError):
    """Report that a checkpoint cannot be used; the message names the thing, the limit and the way out."""


@dataclass(frozen=True)
class TensorHeader:
    """Describe one tensor of a file: its ``nbytes`` bytes begin ``offset`` bytes after the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Read the header of a safetensors file, and return its tensors by name.

    Raises CheckpointError for a damaged header, for a dtype that is not in ``DTYPES``, and for a header that describes
    more or fewer bytes than the file has.
    """
    size = file.stat().st_size
    if size < 8:
        raise CheckpointError(f"{file}: {size} bytes, too short for a safetensors file; {DOWNLOAD_AGAIN}")
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{file}: its header claims {length} bytes; the file has {size}, a header at most {MAX_HEADER_BYTES}."
                f" The file is damaged or truncated: {DOWNLOAD_AGAIN}"
            )
        text = stream.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(file, name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: its safetensors header cannot be read ({error}); {DOWNLOAD_AGAIN}") from error
    _check_coverage(file, tensors, 8 + length, size)
    return tensors


def _tensor(file: Path, name: str, entry: Any, start: int) -> TensorHeader:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (begin, end, *shape)):
        raise CheckpointError(
            f"{file}: tensor {name} of {entry['dtype']} has shape {str(list(shape))[:80]} at bytes"
            f" {str([begin, end])[:80]}; these are whole numbers of 63 bits; {DOWNLOAD_AGAIN}"
        )
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {entry['dtype']}; supported are {', '.join(DTYPES)}")
    expected = prod(shape) * DTYPES[entry["dtype"]].itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{file}: tensor {name} of {entry['dtype']} {list(shape)} needs {expected} bytes, but its header gives"
            f" {end - begin}; {DOWNLOAD_AGAIN}"
        )
    return TensorHeader(name, file, entry["dtype"], shape, start + begin, end - begin)


def _check_coverage(file: Path, tensors: dict[str, TensorHeader], start: int, size: int) -> None:
    position = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            raise CheckpointError(
                f"{file}: tensor {tensor.name} begins at byte {tensor.offset}, not {position}; {DOWNLOAD_AGAIN}"
            )
        position += tensor.nbytes
    if position != size:
        kind = "truncated" if size < position else "followed by bytes of no tensor"
        raise CheckpointError(
            f"{file}: {kind}: its header needs {position} bytes, the file has {size}; {DOWNLOAD_AGAIN}"
        )


def header_bytes(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the beginning of a file, up to its tensors; they follow in the order given as name, dtype and shape.

    Raises ValueError for a dtype that the format has no name for.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"tensor {name} has dtype {dtype}; supported are {', '.join(map(str, DTYPE_NAMES))}")
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as the safetensors library aligns them
    return len(text).to_bytes(8, "little") + text


def read_tensor(tensor: TensorHeader) -> torch.Tensor:
    """Read one tensor into memory of its own; raise CheckpointError if the file has become shorter meanwhile."""
    data = bytearray(tensor.nbytes)
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.offset)
        view, filled = memoryview(data), 0
        while filled < tensor.nbytes and (count := stream.readinto(view[filled:])):
            filled += count
    if filled != tensor.nbytes:
        raise CheckpointError(f"{tensor.file}: ended inside tensor {tensor.name}; {DOWNLOAD_AGAIN}")
    if not data:
        return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    return torch.frombuffer(data, dtype=DTYPES[tensor.dtype]).view(tensor.shape)
