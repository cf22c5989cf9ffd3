"""Compile CUDA C++ with NVRTC at first use, keep the machine code on disk, load and launch it.

Needs no compiler on the machine: NVRTC comes with torch. The cache is ``$QERL_CACHE``, or ``qerl`` in
``$XDG_CACHE_HOME`` or ``~/.cache``, or, without a home, ``qerl-UID`` where temporary files are; a file is named by the
hash of the source, the options and the NVRTC version. What is in it runs on the GPU: a file that is damaged is compiled
again, and a folder that others may write to is not used.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import torch

from qerl_kernels import nvrtc
from qerl_kernels.nvrtc import CompileError

Argument: TypeAlias = int | ctypes.Structure
Defines: TypeAlias = tuple[tuple[str, int], ...]
MOST_PROCESSES = 16  # that compile at one time
# of the driver's interface
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
PROGRAMMATIC_STREAM_SERIALIZATION = 6


def cache_folder() -> Path:
    """Where machine code is kept. A variable that is empty counts as one that is not set."""
    if own := os.environ.get("QERL_CACHE"):
        return Path(own)
    found = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "qerl"
    if found.parts[0] != "~":
        return found
    # a user without a home, as of a container that runs as any number: no folder that is named ~ where it was started
    return Path(tempfile.gettempdir()) / f"qerl-{os.geteuid()}"


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    beside_torch = Path(torch.__file__).parent.parent / "nvidia"
    candidates = [name, *map(str, sorted(beside_torch.glob(f"*/lib/{name}"))), f"/usr/local/cuda/lib64/{name}"]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CompileError(f"{name} is not among {candidates}; install nvidia-cuda-nvrtc for CUDA {torch.version.cuda}")


@functools.cache
def _driver() -> ctypes.CDLL:
    """The types of what is called for each product are given: without them ctypes looks for each anew."""
    library, address, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p, ctypes.c_uint
    library.cuCtxGetCurrent.argtypes = (address,)
    library.cuLaunchKernelEx.argtypes = (address,) * 4
    library.cuTensorMapEncodeTiled.argtypes = (address, number, number, *(address,) * 5, *(number,) * 4)
    return library


def _check(code: int, doing: str, error: type[RuntimeError] = RuntimeError) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise error(f"{doing}: CUDA error {code} ({(text.value or b'unknown').decode()})")


def read_source(file: Path) -> str:
    """A source with the parts that it includes, each once, in place of ``#include "part"``; parts lie beside it."""
    seen: set[Path] = set()

    def whole(part: Path) -> str:
        seen.add(part)
        lines = [f'#line 1 "{part.name}"']
        for number, line in enumerate(part.read_text().splitlines(), 1):
            if line.startswith('#include "'):
                included = part.with_name(line.split('"')[1])
                lines += [] if included in seen else [whole(included)]
                lines.append(f'#line {number + 1} "{part.name}"')
            elif line != "#pragma once":
                lines.append(line)
            else:
                lines.append("")
        return "\n".join(lines)

    return whole(file) + "\n"


def compile_source(source: str, defines: Defines = (), architecture: str = "sm_90a") -> bytes:
    """CUDA C++ -> machine code, from the cache where it is there whole. Raises CompileError with the log."""
    options = _options(defines, architecture)
    name = _cache_file(source, options).name
    code = kept(name)
    if code is None:
        code = nvrtc.compile_source(_nvrtc(), source, options)
        keep(name, code)
    return code


def kept(name: str) -> bytes | None:
    """A file of the cache; None where there is none, or none that can be used: then it says why."""
    file = cache_folder() / name
    if (reason := untrusted(file.parent)) is not None:
        _warn_once(f"{file.parent} is not used as a cache: {reason}")
        return None
    try:
        content = nvrtc.kept(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(f"{file.parent} cannot be read ({error.strerror})")
        return None
    if content is None:
        warnings.warn(f"{file} is damaged and is made again", stacklevel=3)
    return content


def keep(name: str, content: bytes) -> None:
    """Put a file into the cache, whole, where that can be trusted and written."""
    file = cache_folder() / name
    if untrusted(file.parent) is not None:
        return
    try:
        nvrtc.keep(file, content)
    except OSError as error:
        _warn_once(f"{file.parent} cannot be written ({error.strerror})")


def untrusted(folder: Path) -> str | None:
    """Why what lies in ``folder`` may be another user's; None if it is this user's alone, or not there yet."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error)
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}"
    if found.st_mode & 0o022:
        return f"others may write to it (mode {found.st_mode & 0o777:o}; chmod go-w ends that)"
    return None


@functools.cache
def _warn_once(what: str) -> None:
    warnings.warn(
        f"{what}: kernels are compiled again in each process; set QERL_CACHE to a folder of your own", stacklevel=3
    )


def compile_ahead(jobs: Iterable[tuple[str, Defines]], architecture: str = "sm_90a") -> None:
    """Fill the cache with several sources at once, one process for each core; what is left over compiles when needed.

    ``jobs`` are the first two arguments of ``compile_source``.
    """
    if untrusted(cache_folder()) is not None:
        return
    missing = {}
    for source, defines in jobs:
        options = _options(defines, architecture)
        file = _cache_file(source, options)
        if not os.path.exists(file):  # no error where the folder cannot be looked into, as Path.exists() has
            missing[file] = json.dumps({"source": source, "options": options, "file": str(file)})
    processes = min(len(missing), os.cpu_count() or 1, MOST_PROCESSES)
    if processes < 2:
        return
    library = _path_of(_nvrtc())
    line = [sys.executable, nvrtc.__file__, library]
    # NVRTC looks for a library of its own beside itself, but not by itself
    paths = [str(Path(library).parent), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path)}
    lines = list(missing.values())

    def run(first: int) -> subprocess.CompletedProcess[str]:
        share = "\n".join(lines[first::processes])
        return subprocess.run(line, input=share, text=True, capture_output=True, env=environment)

    with ThreadPoolExecutor(processes) as pool:
        failed = [done for done in pool.map(run, range(processes)) if done.returncode]
    if failed:
        reason = failed[0].stderr.strip().rpartition("\n")[2]
        warnings.warn(f"kernels could not be compiled ahead, one by one takes longer: {reason}", stacklevel=2)


def _options(defines: Defines, architecture: str) -> list[str]:
    return [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines)]


def _cache_file(source: str, options: list[str]) -> Path:
    key = hashlib.sha256("\0".join([source, *options, nvrtc.version(_nvrtc())]).encode()).hexdigest()
    return cache_folder() / f"{key}.kernel"


def _path_of(library: ctypes.CDLL) -> str:
    """Where a loaded library lies; its name, for the loader to look for, where that cannot be told."""
    name = Path(library._name).name
    mapped = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    return next((path for path in mapped if Path(path).name.startswith(name)), library._name)


class Kernel:
    """One kernel of one device, ready to launch."""

    def __init__(self, machine_code: bytes, name: str, threads: int, shared_memory: int = 0, cluster: int = 1):
        """Load ``name`` on the current device. Raises CompileError if the driver refuses it.

        ``threads`` of a block, its dynamic ``shared_memory`` in bytes, and the blocks of a ``cluster``.
        """
        driver = _driver()
        module, self._function, self._context = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        device, number = ctypes.c_int(), torch.cuda.current_device()
        _check(driver.cuDeviceGet(ctypes.byref(device), number), f"finding GPU {number}")
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device), f"the context of GPU {number}")
        with self._in_its_context():
            _check(driver.cuModuleLoadData(ctypes.byref(module), machine_code), f"loading {name}", CompileError)
            found = driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode())
            _check(found, f"finding {name}", CompileError)
            if shared_memory > 48 * 1024:
                code = driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_memory)
                _check(code, f"{name} with {shared_memory} bytes of shared memory", CompileError)
        self.name, self.threads, self.shared_memory, self.cluster = name, threads, shared_memory, cluster

    @contextlib.contextmanager
    def _in_its_context(self) -> Iterator[None]:
        """In the context of torch on the kernel's GPU; afterwards the thread has again the one that it had, or none.

        A thread that has not called CUDA yet, as autograd's may not have, has none.
        """
        driver, before = _driver(), ctypes.c_void_p()
        _check(driver.cuCtxGetCurrent(ctypes.byref(before)), "asking for the current context")
        if before.value == self._context.value:
            yield
            return
        _check(driver.cuCtxSetCurrent(self._context), "making torch's context current")
        try:
            yield
        finally:
            _check(driver.cuCtxSetCurrent(before), "making the caller's context current again")

    def _launch(self, grid: tuple[int, int, int], stream: int, overlap: bool, clustered: bool) -> "_Launch":
        asked = _attributes(overlap, self.cluster if clustered else 0)
        return _Launch(*grid, self.threads, 1, 1, self.shared_memory, stream, asked, len(asked))

    def clusters_at_once(self) -> int:
        """How many clusters the whole GPU holds at one time."""
        clusters = ctypes.c_int()
        launch = self._launch((self.cluster, 1, 1), 0, overlap=False, clustered=True)
        with self._in_its_context():
            code = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(clusters), self._function, ctypes.byref(launch))
        _check(code, f"the occupancy of {self.name}")
        return clusters.value

    def __call__(self, grid: tuple[int, int, int], *arguments: Argument, stream: int, overlap: bool = False) -> None:
        """Launch on a ``stream`` of the kernel's GPU; with ``overlap`` it may begin before the one ahead has ended.

        ``arguments``: pointers and numbers, which are not negative and take at most 8 bytes, and structures. The driver
        copies them before it returns (CUDA's manual, cuLaunchKernelEx).
        """
        values = (ctypes.c_uint64 * len(arguments))(*(one if isinstance(one, int) else 0 for one in arguments))
        first = ctypes.addressof(values)
        where = [first + 8 * i if isinstance(one, int) else ctypes.addressof(one) for i, one in enumerate(arguments)]
        places = (ctypes.c_void_p * len(arguments))(*where)
        launch, driver, before = self._launch(grid, stream, overlap, self.cluster > 1), _driver(), ctypes.c_void_p()
        _check(driver.cuCtxGetCurrent(ctypes.byref(before)), "asking for the current context")
        given = ctypes.byref(launch), self._function, places, None
        if before.value == self._context.value:
            code = driver.cuLaunchKernelEx(*given)
        else:
            with self._in_its_context():
                code = driver.cuLaunchKernelEx(*given)
        _check(code, f"launching {self.name}")


def stream_of(device: torch.device) -> int:
    """The driver's handle of torch's current stream on a GPU."""
    return torch.cuda.current_stream(device).cuda_stream


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


@functools.cache
def _attributes(overlap: bool, cluster: int) -> "ctypes.Array[_Attribute]":
    """What a launch asks for beside its sizes, which the driver only reads; no ``cluster`` is 0 blocks."""
    asked = []
    if overlap:
        asked.append(_Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,)))
    if cluster:
        asked.append(_Attribute(CLUSTER_DIMENSION, 0, (cluster, 1, 1)))
    return (_Attribute * len(asked))(*asked)


class TensorMap(ctypes.Structure):
    """The copy engine's description of a matrix (CUtensorMap): 128 bytes, aligned to 64."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(x: torch.Tensor, box_rows: int, box_columns: int) -> TensorMap:
    """Describe ``x: (rows, columns)`` of 16 bits, read in boxes with a 128-byte swizzle; outside are zeros."""
    room = (ctypes.c_uint8 * (128 + 64))()
    here = ctypes.addressof(room)
    offset = -here % 64
    kind, *sizes = _map_sizes(x.dtype, *x.shape, x.stride(0), box_rows, box_columns)
    code = _driver().cuTensorMapEncodeTiled(
        here + offset,
        kind,
        2,
        x.data_ptr(),
        *sizes,
        0,  # no interleaving
        3,  # 128-byte swizzle
        3,  # fetch 256 bytes into L2
        0,  # zeros outside
    )
    _check(code, f"a tensor map of {tuple(x.shape)} with strides {x.stride()}")
    return TensorMap.from_buffer(room, offset)


@functools.lru_cache(maxsize=2**12)
def _map_sizes(
    dtype: torch.dtype, rows: int, columns: int, stride: int, box_rows: int, box_columns: int
) -> tuple[int, "ctypes.Array", "ctypes.Array", "ctypes.Array", "ctypes.Array"]:
    """The CUtensorMapDataType, and what the driver reads: sizes, strides in bytes, box, and steps between elements."""
    return (
        {torch.float16: 6, torch.bfloat16: 9}[dtype],
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(2 * stride),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
    )
