"""Hand tensors on a GPU to workers in other processes: one block of memory, and a small JSON text that describes it.

    {"gpu": "<uuid>", "handle": "<128 hexadecimal digits>", "bytes": 1234, "tensors": "<text>"}

The text of ``tensors`` is JSON, too, ``[["name", "F32", [32, 64]], ...]``, so that a worker can recognize a list that
it has parsed before. The tensors lie one behind the other in that order, wider dtypes first, so that there are no holes
and each is aligned. A worker sees them as tensors on the meta device, slices its shard out of them as out of any
tensors, and copies that alone.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from qerl_vllm_plugin.wire import cuda_ipc, spans
from qerl_vllm_plugin.wire.cuda_ipc import Copy
from qerl_vllm_plugin.wire.safetensors_file import DTYPE_NAMES, DTYPES
from qerl_vllm_plugin.wire.spans import Copied

MAX_TEXT = 4 << 20  # the names of a 32B model's adapter take 0.1 MB
MEDIA_TYPE = "application/vnd.qerl.gpu-tensors+json"  # content type of a request that describes tensors
KEYS = ("gpu", "handle", "bytes", "tensors")


@dataclass(frozen=True)
class Layout:
    """Tensors by name on the meta device, in the order of memory, and their total ``size`` in bytes."""

    tensors: dict[str, torch.Tensor]
    size: int


@dataclass(frozen=True)
class Description:
    """A parsed description: the GPU's UUID, the IPC handle, and the layout of the memory."""

    gpu: str
    handle: bytes
    layout: Layout


class GpuTensors:
    """``tensors`` by name, on the meta device; their memory is another process's, mapped at ``address``."""

    def __init__(self, layout: Layout, address: int) -> None:
        self.tensors, self._size, self._address = layout.tensors, layout.size, address

    def fetch(self, pieces: Sequence[torch.Tensor], device: torch.device) -> Copied:
        """Copy these tensors, or rows or columns of them, to ``device``, and wait for the copies to finish."""
        planned = spans.plan(pieces, self._size)
        room = torch.empty(planned.size, dtype=torch.uint8, device=device)
        to, source = room.data_ptr(), self._address
        cuda_ipc.copy([Copy(to + span.target, source + span.source, span.size) for span in planned.spans], device)
        return Copied(pieces, planned.starts, room)


def why_not(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return why these tensors cannot be sent from GPU to GPU, or None if they can."""
    devices = {tensor.device for tensor in tensors.values()}
    if {device.type for device in devices} != {"cuda"}:
        return f"the tensors lie on {', '.join(sorted(map(str, devices))) or 'no device'}, not on one NVIDIA GPU"
    if len(devices) > 1:
        return f"the tensors lie on several GPUs: {', '.join(sorted(map(str, devices)))}"
    if torch.version.hip is not None:
        return "the GPU is not of NVIDIA"
    if not sum(tensor.numel() for tensor in tensors.values()):
        return "the tensors hold no values"
    return None


@contextmanager
def described(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy ``tensors`` into shared GPU memory for the ``with`` block; yield the describing text, and that memory.

    Call ``why_not`` first. Raises CudaIPCError, and ValueError for a dtype that the format has no name for.
    """
    table = _table(tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()))
    device = next(iter(tensors.values())).device
    with cuda_ipc.exported(table.size, device) as (memory, handle), torch.no_grad():
        for part in table.parts:
            if part.begin == part.end:
                continue
            out = memory[part.begin : part.end].view(part.dtype).view(-1, *part.row)
            torch.cat([tensors[name] if tensors[name].dim() else tensors[name].view(1) for name in part.names], out=out)
        cuda_ipc.finish(device)
        head = {"gpu": cuda_ipc.uuid(device), "handle": handle.hex(), "bytes": table.size}
        yield f'{json.dumps(head)[:-1]}, "tensors": {table.text}}}', memory


class _Part(NamedTuple):
    """Hold tensors that lie from byte ``begin`` to ``end``; all their axes but the first have the shape ``row``."""

    dtype: torch.dtype
    row: tuple[int, ...]
    names: list[str]
    begin: int
    end: int


class _Table(NamedTuple):
    """Describe where tensors lie in ``size`` bytes; ``text`` says so as a JSON string that holds JSON."""

    parts: list[_Part]
    size: int
    text: str


@functools.lru_cache(maxsize=2)
def _table(kinds: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> _Table:
    """Lay out tensors of these names, dtypes and shapes; cached, for a training policy sends the same each time.

    Tensors with equal row shapes lie one behind the other, so that one operation copies them all: all B of an adapter,
    and all A of equal input size.

    Raises ValueError for a dtype that the format has no name for.
    """
    if unknown := [(name, dtype) for name, dtype, _ in kinds if dtype not in DTYPE_NAMES]:
        name, dtype = unknown[0]
        raise ValueError(f"tensor {name} has dtype {dtype}; supported are {', '.join(map(str, DTYPE_NAMES))}")
    alike: dict[tuple[torch.dtype, tuple[int, ...]], list[tuple[str, torch.Size]]] = {}
    for name, dtype, shape in sorted(kinds, key=lambda kind: -kind[1].itemsize):
        alike.setdefault((dtype, tuple(shape[1:])), []).append((name, shape))
    parts: list[_Part] = []
    listed, end = [], 0
    for (dtype, row), members in sorted(alike.items(), key=lambda item: -item[0][0].itemsize):
        begin, end = end, end + sum(shape.numel() for _, shape in members) * dtype.itemsize
        parts.append(_Part(dtype, row, [name for name, _ in members], begin, end))
        listed += [[name, DTYPE_NAMES[dtype], list(shape)] for name, shape in members]
    return _Table(parts, end, json.dumps(json.dumps(listed, separators=(",", ":"))))


@contextmanager
def mapped(text: str, device: torch.device) -> Iterator[GpuTensors]:
    """Map the tensors that a text describes for the ``with`` block, for a worker on ``device``.

    Raises ValueError for a text that ``described`` has not written, and CudaIPCError for a handle that cannot be used.
    """
    description = parse(text)
    cuda_ipc.check_reachable(description.gpu, device)
    with cuda_ipc.opened(description.handle, description.layout.size, device) as address:
        yield GpuTensors(description.layout, address)


def parse(text: str) -> Description:
    """Parse a describing text. Raises ValueError for anything that ``described`` does not write."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"the description of tensors has {len(text)} characters; at most {MAX_TEXT} can be used")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the description of tensors is not valid JSON ({type(error).__name__})") from None
    if not isinstance(content, dict) or sorted(content) != sorted(KEYS):
        raise ValueError(f"a description of tensors is an object of {', '.join(KEYS)}")
    gpu, handle, size, listed = (content[key] for key in KEYS)
    if not isinstance(gpu, str):
        raise ValueError("the GPU of a description of tensors is a text, its UUID")
    layout = _layout(listed if isinstance(listed, str) else "")
    if not _is_whole(size) or size != layout.size or not size:
        raise ValueError(
            f"a description of tensors announces {str(size)[:40]} bytes, and its tensors have {layout.size}"
        )
    return Description(gpu, _handle(handle), layout)


@functools.lru_cache(maxsize=2)
def _layout(text: str) -> Layout:
    """Parse the list of tensors, cached, for a policy in training sends the same names each time; raise ValueError."""
    try:
        listed = json.loads(text or "[]")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the tensors of a description are not valid JSON ({type(error).__name__})") from None
    tensors = [_tensor(entry) for entry in listed] if isinstance(listed, list) else []
    size = sum(prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
    if not _is_whole(size):
        raise ValueError(f"the tensors of a description have {size} bytes, more than any GPU")
    if len({name for name, _, _ in tensors}) < len(tensors):
        raise ValueError("a description of tensors names one of them twice")
    widths = [dtype.itemsize for _, dtype, _ in tensors]
    if widths != sorted(widths, reverse=True):
        raise ValueError("a description of tensors has those of wider types first")
    whole, end = torch.empty(size, dtype=torch.uint8, device="meta"), 0
    typed = {dtype: spans.as_type(whole, dtype) for _, dtype, _ in tensors}
    found = {}
    for name, dtype, shape in tensors:
        strides = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * shape[i]
        found[name] = typed[dtype].as_strided(shape, strides, end // dtype.itemsize)
        end += prod(shape) * dtype.itemsize
    return Layout(found, size)


def _handle(text: Any) -> bytes:
    try:
        handle = bytes.fromhex(text)
    except (TypeError, ValueError):
        handle = b""
    if len(handle) != cuda_ipc.HANDLE_BYTES:
        raise ValueError(f"a handle of GPU memory has {2 * cuda_ipc.HANDLE_BYTES} hexadecimal digits")
    return handle


def _tensor(entry: Any) -> tuple[str, torch.dtype, tuple[int, ...]]:
    if not isinstance(entry, list) or len(entry) != 3:
        raise ValueError("each tensor of a description is a list of name, dtype and shape")
    name, dtype, shape = entry
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {str(name)[:80]!r} has dtype {str(dtype)[:40]!r}; supported are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 4 or not all(_is_whole(length) for length in shape):
        raise ValueError(f"tensor {name[:80]!r} has shape {str(shape)[:80]}; it is a list of at most 4 whole numbers")
    return name, DTYPES[dtype], tuple(shape)


def _is_whole(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 40
