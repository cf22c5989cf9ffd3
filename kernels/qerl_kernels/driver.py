"""Load kernels with CUDA's driver, launch them, and describe matrices to the copy engine.

A launch is prepared once as a ``Call``, whose arguments stay at fixed addresses; what changes between launches is
written there. The driver has copied the arguments when cuLaunchKernelEx returns, also into a CUDA graph ("from which
the actual parameter will be copied", CUDA Driver API, cuLaunchKernel). So the same thread may then write the next ones.
Two threads may not share a call.
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
    """Return the driver for calls that neither wait nor take long, which keep the interpreter's lock.

    A thread that releases the lock gets it back only when another thread, such as a server's that reads requests, lets
    it go.
    """
    return ctypes.PyDLL("libcuda.so.1")


def _check(code: int, doing: str, error: type[RuntimeError] = RuntimeError) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise error(f"{doing}: CUDA error {code} ({(text.value or b'unknown').decode()})")


def current_stream(device: int) -> int:
    """Return the handle of torch's current stream on a GPU, without making a Stream object, as Triton gets it."""
    return torch._C._cuda_getCurrentRawStream(device)


class _Within:
    """Make a CUDA context current, and afterwards restore the thread's own, or none.

    A thread that has not called CUDA yet has none, as a thread of autograd may not.
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
    """Hold one kernel that is loaded on one device."""

    def __init__(self, machine_code: bytes, name: str, threads: int, shared_memory: int = 0, cluster: int = 1):
        """Load the kernel ``name`` on the current device.

        ``threads`` are those of a block, ``shared_memory`` is its dynamic shared memory in bytes, and ``cluster`` the
        blocks of a cluster. Raises CompileError if the driver refuses the code, RuntimeError if the GPU has no context.
        """
        driver = _driver()
        module, self.function, self.context = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        device, self.device = ctypes.c_int(), torch.cuda.current_device()
        _check(driver.cuDeviceGet(ctypes.byref(device), self.device), f"finding GPU {self.device}")
        code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), device)
        _check(code, f"the context of GPU {self.device}")
        with _Within(self.context):
            _check(driver.cuModuleLoadData(ctypes.byref(module), machine_code), f"loading {name}", CompileError)
            code = driver.cuModuleGetFunction(ctypes.byref(self.function), module, name.encode())
            _check(code, f"finding {name}", CompileError)
            if shared_memory > 48 * 1024:
                code = driver.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_memory)
                _check(code, f"{name} with {shared_memory} bytes of shared memory", CompileError)
        self.name, self.threads, self.shared_memory, self.cluster = name, threads, shared_memory, cluster

    def clusters_at_once(self) -> int:
        """Return how many clusters the whole GPU holds at one time; raises RuntimeError if the driver cannot tell."""
        clusters = ctypes.c_int()
        one_cluster = _Launch.of(self, (self.cluster, 1, 1), overlap=False, clustered=True)
        with _Within(self.context):
            code = _driver().cuOccupancyMaxActiveClusters(
                ctypes.byref(clusters), self.function, ctypes.byref(one_cluster)
            )
        _check(code, f"the occupancy of {self.name}")
        return clusters.value

    def __call__(self, grid: tuple[int, int, int], *arguments: Argument, overlap: bool = False) -> None:
        """Launch on torch's current stream; with ``overlap`` it may begin before the kernel ahead of it has ended.

        Raises RuntimeError where the driver refuses the launch.
        """
        call = Call(self, grid, [ctypes.addressof(argument) for argument in arguments], overlap)
        launch(current_stream(self.device), call)


class _Attribute(ctypes.Structure):
    """Mirror CUlaunchAttribute: an id, and a value in a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Launch(ctypes.Structure):
    """Mirror CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )

    @classmethod
    def of(cls, kernel: Kernel, grid: tuple[int, int, int], overlap: bool, clustered: bool) -> "_Launch":
        """Return the configuration of a launch on the default stream; it keeps its attributes alive."""
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
    """Prepare a launch of ``kernel`` that lacks only the stream; only one thread may use it."""

    def __init__(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[int], overlap: bool = False):
        """Take the address of each argument; the caller keeps the arguments alive and writes what changes."""
        self.kernel, self.launch = kernel, _Launch.of(kernel, grid, overlap, kernel.cluster > 1)
        self.arguments = (ctypes.c_void_p * len(arguments))(*arguments)
        self.launch_arguments = (ctypes.byref(self.launch), kernel.function, self.arguments, None)


def launch(stream: int, *calls: Call) -> None:
    """Launch calls one after the other on a stream of the GPU that their kernels are loaded on.

    Raises RuntimeError where the driver refuses a launch.
    """
    run = _driver().cuLaunchKernelEx
    with _Within(calls[0].kernel.context):
        for call in calls:
            call.launch.stream = stream
            if code := run(*call.launch_arguments):
                _check(code, f"launching {call.kernel.name}")


def addresses(array: ctypes.Array) -> list[int]:
    """Return the address of each element of an array."""
    return [ctypes.addressof(array) + ctypes.sizeof(array._type_) * i for i in range(len(array))]


class TensorMap:
    """Describe ``x: (rows, columns)`` of 16-bit numbers to the copy engine (CUtensorMap), as an argument of a call.

    The copy engine reads boxes with a 128-byte swizzle and gives zeros outside of the matrix. ``address`` is where the
    128 bytes lie, at a multiple of 64.
    """

    def __init__(self, dtype: torch.dtype, rows: int, columns: int, box_rows: int, box_columns: int):
        self._memory = (ctypes.c_uint8 * (128 + 64))()
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        self._data, self._strides, self._shape = ctypes.c_void_p(), (ctypes.c_uint64 * 1)(), (rows, columns)
        self._encode_arguments = (
            ctypes.c_void_p(self.address),
            TYPES[dtype],
            2,
            self._data,
            (ctypes.c_uint64 * 2)(columns, rows),
            self._strides,
            (ctypes.c_uint32 * 2)(box_columns, box_rows),
            (ctypes.c_uint32 * 2)(1, 1),
            0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
            3,  # CU_TENSOR_MAP_SWIZZLE_128B
            3,  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
            0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: zeros outside of the matrix
        )

    def describe(self, data: int, row_stride: int) -> None:
        """Set the matrix's address and the numbers from one row to the next.

        Raises RuntimeError where the driver refuses them.
        """
        self._data.value, self._strides[0] = data, 2 * row_stride
        if code := _quick().cuTensorMapEncodeTiled(*self._encode_arguments):
            _check(code, f"a tensor map of {self._shape} with rows {row_stride} apart")
