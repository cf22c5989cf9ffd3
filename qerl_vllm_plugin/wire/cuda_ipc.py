"""Share GPU memory with other processes of this machine through the CUDA driver's inter-process (IPC) handles.

torch.multiprocessing shares GPU memory, too. But there a handle is for one receiver, and its references are counted in
a file that a killed process leaves wrong. A part of torch's pool cannot be shared at all if the pool is made of
expandable segments. Here the memory is an allocation of its own. The sender keeps it until every receiver has answered,
and a receiver keeps it mapped only while it copies. A handle says nothing of its sender, and works on one machine
alone.

Source: CUDA driver API, "Memory Management", cuIpcGetMemHandle and cuIpcOpenMemHandle.
"""

import ctypes
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

HANDLE_BYTES = 64
PAGE = 2 << 20  # the driver maps no less: a smaller allocation would share its page with others
_LAZY_PEER_ACCESS, _PORTABLE, _OUT_OF_MEMORY = 1, 1, 2


class CudaIPCError(RuntimeError):
    """Report that GPU memory cannot be shared, mapped or copied; the message says why."""


class Copy(NamedTuple):
    """Copy ``size`` bytes from the address ``source`` to the address ``target``."""

    target: int
    source: int
    size: int


def uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which names it in every process of the machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible() -> list[str]:
    """Return the UUIDs of the GPUs that this process can see, in the order of their numbers here."""
    return [uuid(torch.device("cuda", number)) for number in range(torch.cuda.device_count())]


def check_reachable(name: str, device: torch.device) -> None:
    """Raise CudaIPCError if ``device`` cannot read the memory of the GPU whose UUID is ``name``."""
    if device.type != "cuda":
        raise CudaIPCError(f"the tensors lie on GPU {name[:40]}, and this worker computes on a {device.type}")
    present = visible()
    if name not in present:
        raise CudaIPCError(f"the tensors lie on GPU {name[:40]}, which this process does not see; it sees {present}")
    other = present.index(name)
    if other != device.index and not torch.cuda.can_device_access_peer(device, other):
        raise CudaIPCError(f"GPU {device.index} cannot read the memory of GPU {other}, where the tensors lie")


@contextmanager
def exported(size: int, device: torch.device) -> Iterator[tuple[torch.Tensor, bytes]]:
    """Yield ``size`` new bytes on a GPU as a uint8 tensor, with their IPC handle; raise CudaIPCError."""
    address, handle = ctypes.c_uint64(), _Handle()
    wanted = ctypes.c_size_t(-(-size // PAGE) * PAGE)
    with _context(device):
        code = _driver().cuMemAlloc_v2(ctypes.byref(address), wanted)
    if code == _OUT_OF_MEMORY:
        torch.cuda.empty_cache()  # torch's allocator keeps memory that tensors have freed
        with _context(device):
            code = _driver().cuMemAlloc_v2(ctypes.byref(address), wanted)
    _check(code, f"{size / 1e6:.1f} MB of GPU memory for what is sent")
    try:
        with _context(device):
            _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), address), "a handle of GPU memory")
        yield torch.as_tensor(_Memory(address.value, size), device=device), bytes(handle.content)
    finally:
        with _context(device):
            _driver().cuMemFree_v2(address)  # waits for work that still runs on the device


@contextmanager
def opened(handle: bytes, size: int, device: torch.device) -> Iterator[int]:
    """Map another process's GPU memory for the ``with`` block; yield the address at which ``device`` can read it.

    Raises CudaIPCError for an invalid handle, for one whose sender has gone, and for less than ``size`` bytes.
    """
    address, first, found = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
    content = _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*handle))
    with _context(device):
        code = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), content, ctypes.c_uint(_LAZY_PEER_ACCESS))
        _check(code, "mapping GPU memory of another process (does it still run?)")
    try:
        with _context(device):
            code = _driver().cuMemGetAddressRange_v2(ctypes.byref(first), ctypes.byref(found), address)
            _check(code, "the size of another process's GPU memory")
        if (there := first.value + found.value - address.value) < size:
            raise CudaIPCError(f"{size} bytes of GPU memory were announced, and there are {there}")
        yield address.value
    finally:
        with _context(device):
            _driver().cuIpcCloseMemHandle(address)


def copy(copies: Iterable[Copy], device: torch.device) -> None:
    """Copy between addresses that ``device`` can read, and wait for the copies to finish. Raises CudaIPCError."""
    with _context(device), torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        for one in copies:
            code = _driver().cuMemcpyDtoDAsync_v2(
                ctypes.c_uint64(one.target),
                ctypes.c_uint64(one.source),
                ctypes.c_size_t(one.size),
                ctypes.c_void_p(stream.cuda_stream),
            )
            _check(code, "copying from another process's GPU memory")
        stream.synchronize()


def register(memory: torch.Tensor, device: torch.device) -> None:
    """Register (pin) host memory until ``unregister``, so that a GPU reads it directly; raise CudaIPCError."""
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    with _context(device):
        _check(_driver().cuMemHostRegister_v2(address, size, ctypes.c_uint(_PORTABLE)), "registering shared memory")


def unregister(memory: torch.Tensor, device: torch.device) -> None:
    """Undo ``register``; call it before the memory is unmapped. Raises CudaIPCError."""
    with _context(device):
        _check(_driver().cuMemHostUnregister(ctypes.c_void_p(memory.data_ptr())), "letting go of shared memory")


def finish(device: torch.device) -> None:
    """Wait for the work on torch's current stream of ``device``, so that others may read its results."""
    torch.cuda.current_stream(device).synchronize()


class _Handle(ctypes.Structure):
    """Hold the driver's CUipcMemHandle."""

    _fields_ = (("content", ctypes.c_ubyte * HANDLE_BYTES),)


class _Memory:
    """Give GPU memory at an address the form that torch wraps as a tensor without owning it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaIPCError(f"there is no NVIDIA driver here: {error}") from error


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Enter torch's CUDA context on ``device`` for the ``with`` block, and then restore the thread's earlier one."""
    driver, number, context, before = _driver(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuInit(0), "starting the driver")
    _check(driver.cuDeviceGet(ctypes.byref(number), device.index), f"finding GPU {device.index}")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), f"the context of GPU {device.index}")
    try:
        _check(driver.cuCtxPushCurrent_v2(context), f"entering the context of GPU {device.index}")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(before))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(number)


def _check(code: int, doing: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaIPCError(f"{doing}: CUDA error {code} ({(text.value or b'unknown').decode()})")
