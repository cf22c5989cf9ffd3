"""CUDA's driver: load a kernel, launch it, and describe a matrix to the copy engine.

A launch is made ready once (``Call``), its arguments in memory that stays: what changes from one launch to the next is
written there. The driver has copied the arguments when cuLaunchKernelEx returns ("from which the actual parameter will
be copied", CUDA Driver API, cuLaunchKernel), also into a CUDA graph, so the same thread may write the next ones. Two
threads may not share a call.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import TypeAlias

import torch

from qerl_kernels.nvrtc import CompileError

Argument: TypeAlias = ctypes._SimpleCData | ctypes.Structure
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
PROGRAMMATIC_STREAM_SERIALIZATION = 6
TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _quick() -> ctypes.PyDLL:
    """The same, for calls that neither wait nor take long: they keep the interpreter's lock.

    A thread that gives it up gets it back when another, as of a server that has requests to read, lets go of it.
    """
    return ctypes.PyDLL("libcuda.so.1")


def _check(code: int, doing: str, error: type[RuntimeError] = RuntimeError) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise error(f"{doing}: CUDA error {code} ({(text.value or b'unknown').decode()})")


def current_stream(device: int) -> int:
    """The handle of torch's current stream on a GPU, without the object around it, as Triton asks for it."""
    return torch._C._cuda_getCurrentRawStream(device)


class _Within:
    """In this context; afterwards the thread has again the one that it had, or none.

    A thread that has not called CUDA yet, as autograd's may not have, has none.
    """

    __slots__ = ("_before", "_context")

    def __init__(self, context: ctypes.c_void_p):
        self._context, self._before = context, ctypes.c_void_p()

    def __enter__(self) -> None:
        _check(_quick().cuCtxGetCurrent(ctypes.byref(self._before)), "asking for the current context")
        if self._before.value != self._context.value:
            _check(_driver().cuCtxSetCurrent(self._context), "making torch's context current")

    def __exit__(self, *error: object) -> None:
        if self._before.value != self._context.value:
            _check(_driver().cuCtxSetCurrent(self._before), "making the caller's context current again")


class Kernel:
    """One kernel of one device, ready to launch."""

    def __init__(self, machine_code: bytes, name: str, threads: int, shared_memory: int = 0, cluster: int = 1):
        """Load ``name`` on the current device. Raises CompileError if the driver refuses it.

        ``threads`` of a block, its dynamic ``shared_memory`` in bytes, and the blocks of a ``cluster``.
        """
        driver = _driver()
        module, self.function, self.context = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        device, self.device = ctypes.c_int(), torch.cuda.current_device()
        _check(driver.cuDeviceGet(ctypes.byref(device), self.device), f"finding GPU {self.device}")
        retained = driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), device)
        _check(retained, f"the context of GPU {self.device}")
        with _Within(self.context):
            _check(driver.cuModuleLoadData(ctypes.byref(module), machine_code), f"loading {name}", CompileError)
            found = driver.cuModuleGetFunction(ctypes.byref(self.function), module, name.encode())
            _check(found, f"finding {name}", CompileError)
            if shared_memory > 48 * 1024:
                code = driver.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_memory)
                _check(code, f"{name} with {shared_memory} bytes of shared memory", CompileError)
        self.name, self.threads, self.shared_memory, self.cluster = name, threads, shared_memory, cluster

    def clusters_at_once(self) -> int:
        """How many clusters the whole GPU holds at one time."""
        clusters = ctypes.c_int()
        one = _Launch.of(self, (self.cluster, 1, 1), overlap=False, clustered=True)
        with _Within(self.context):
            code = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(clusters), self.function, ctypes.byref(one))
        _check(code, f"the occupancy of {self.name}")
        return clusters.value

    def __call__(self, grid: tuple[int, int, int], *arguments: Argument, overlap: bool = False) -> None:
        """Launch on torch's current stream; with ``overlap`` it may begin before the kernel ahead of it has ended."""
        call = Call(self, grid, [ctypes.addressof(argument) for argument in arguments], overlap)
        launch(current_stream(self.device), call)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value in a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )

    @classmethod
    def of(cls, kernel: Kernel, grid: tuple[int, int, int], overlap: bool, clustered: bool) -> "_Launch":
        """On the default stream; it keeps its attributes alive."""
        attributes = (_Attribute * 2)()
        count = 0
        if overlap:
            attributes[count].id, attributes[count].value[0] = PROGRAMMATIC_STREAM_SERIALIZATION, 1
            count += 1
        if clustered:
            attributes[count].id = CLUSTER_DIMENSION
            attributes[count].value[:3] = (kernel.cluster, 1, 1)
            count += 1
        return cls(*grid, kernel.threads, 1, 1, kernel.shared_memory, 0, attributes, count)


class Call:
    """A launch of ``kernel`` with everything in place but the stream; of one thread."""

    def __init__(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[int], overlap: bool = False):
        """``arguments``: where each lies. The caller keeps them there, and writes what changes."""
        self.kernel, self.launch = kernel, _Launch.of(kernel, grid, overlap, kernel.cluster > 1)
        self.arguments = (ctypes.c_void_p * len(arguments))(*arguments)
        self.given = (ctypes.byref(self.launch), kernel.function, self.arguments, None)


def launch(stream: int, *calls: Call) -> None:
    """One after the other on one stream of the GPU that their kernels are loaded on."""
    run = _driver().cuLaunchKernelEx
    with _Within(calls[0].kernel.context):
        for call in calls:
            call.launch.stream = stream
            if code := run(*call.given):
                _check(code, f"launching {call.kernel.name}")


def addresses(array: ctypes.Array) -> list[int]:
    """Where each of its elements lies."""
    return [ctypes.addressof(array) + ctypes.sizeof(array._type_) * i for i in range(len(array))]


class TensorMap:
    """The copy engine's description of ``x: (rows, columns)`` of 16 bits (CUtensorMap), for a call's arguments.

    Read in boxes with a 128-byte swizzle; outside are zeros. ``address`` is where its 128 bytes lie, aligned to 64.
    """

    def __init__(self, dtype: torch.dtype, rows: int, columns: int, box_rows: int, box_columns: int):
        self._room = (ctypes.c_uint8 * (128 + 64))()
        self.address = -(-ctypes.addressof(self._room) // 64) * 64
        self._data, self._strides, self._shape = ctypes.c_void_p(), (ctypes.c_uint64 * 1)(), (rows, columns)
        self._given = (
            ctypes.c_void_p(self.address),
            TYPES[dtype],
            2,
            self._data,
            (ctypes.c_uint64 * 2)(columns, rows),
            self._strides,
            (ctypes.c_uint32 * 2)(box_columns, box_rows),
            (ctypes.c_uint32 * 2)(1, 1),
            0,  # no interleaving
            3,  # 128-byte swizzle
            3,  # fetch 256 bytes into L2
            0,  # zeros outside
        )

    def describe(self, data: int, row_stride: int) -> None:
        """Of the matrix at this address, ``row_stride`` numbers from one row to the next. Raises RuntimeError."""
        self._data.value, self._strides[0] = data, 2 * row_stride
        if code := _quick().cuTensorMapEncodeTiled(*self._given):
            _check(code, f"a tensor map of {self._shape} with rows {row_stride} apart")
