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
from typing import NamedTuple

import torch

from qerl_vllm_plugin.wire import cuda_ipc, spans
from qerl_vllm_plugin.wire.cuda_ipc import Copy
from qerl_vllm_plugin.wire.safetensors_file import DTYPE_NAMES, DTYPES
from qerl_vllm_plugin.wire.spans import Copied

MAX_TEXT = 4 << 20  # the names of a 32B model's adapter take 0.1 MB
MEDIA_TYPE = "application/vnd.qerl.gpu-tensors+json"  # content type of a request that describes tensors


@dataclass(frozen=True)
class Layout:
    """Hold tensors by name on the meta device, in the order of memory, and their total ``size`` in bytes."""

    tensors: dict[str, torch.Tensor]
    size: int


@dataclass(frozen=True)
class Description:
    """Hold a parsed description: the GPU's UUID, the IPC handle, and the layout of the memory."""

    gpu: str
    handle: bytes
    layout: Layout


class GpuTensors:
    """Hold ``tensors`` by name, on the meta device; their memory is another process's, mapped at ``address``."""

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
    try:
        content = json.loads(text)
        found = Description(content["gpu"], bytes.fromhex(content["handle"]), _layout(content["tensors"]))
    except (AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"this describes no tensors on a GPU ({type(error).__name__}: {str(error)[:80]})") from None
    if len(found.handle) != cuda_ipc.HANDLE_BYTES or content["bytes"] != found.layout.size:
        raise ValueError("the handle or the size in a description of tensors is not that of its tensors")
    return found


@functools.lru_cache(maxsize=2)
def _layout(text: str) -> Layout:
    """Parse the list of tensors; cached, for a policy in training sends the same names each time."""
    listed = [(name, DTYPES[dtype], shape) for name, dtype, shape in json.loads(text)]
    size = sum(prod(shape) * dtype.itemsize for _, dtype, shape in listed)
    whole, end, found = torch.empty(size, dtype=torch.uint8, device="meta"), 0, {}
    for name, dtype, shape in listed:
        begin, end = end, end + prod(shape) * dtype.itemsize
        found[name] = whole[begin:end].view(dtype).view(shape)
    return Layout(found, size)
