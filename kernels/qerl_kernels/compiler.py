"""Compile CUDA C++ with NVRTC at first use, and keep the machine code on disk; ``driver.py`` loads and launches it.

The machine needs no compiler: NVRTC comes with torch. The cache is the folder ``$QERL_CACHE``, or ``qerl`` in
``$XDG_CACHE_HOME`` or ``~/.cache``. A user without a home gets ``qerl-UID`` in the folder of temporary files. A file's
name is the hash of the source, the options and the NVRTC version. Since its content runs on the GPU, a damaged file is
compiled again, and a folder that others may write to is not used.
"""

import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import torch

from qerl_kernels import nvrtc
from qerl_kernels.nvrtc import CompileError

Defines: TypeAlias = tuple[tuple[str, int], ...]
MOST_PROCESSES = 16  # processes that compile at one time


def cache_folder() -> Path:
    """Return the folder that machine code is kept in; an empty variable counts as unset."""
    if configured := os.environ.get("QERL_CACHE"):
        return Path(configured)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "qerl"
    if folder.parts[0] != "~":
        return folder
    # The user has no home, as in a container under an arbitrary user id: do not create a folder named ~ here.
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


def read_source(file: Path) -> str:
    """Return a source in which each ``#include "part"`` is replaced by that part.

    Parts lie beside the file and are included once. ``#line`` directives keep the compiler's line numbers right.
    """
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


def compile_source(source: str, defines: Defines = ()) -> bytes:
    """Compile CUDA C++ to machine code, or return what the cache holds.

    ``defines`` are pairs of a macro and its number. Raises CompileError with NVRTC's log, or where NVRTC is missing.
    """
    options = _options(defines)
    name = _cache_file(source, options).name
    code = kept(name)
    if code is None:
        code = nvrtc.compile_source(_nvrtc(), source, options)
        keep(name, code)
    return code


def kept(name: str) -> bytes | None:
    """Return the content of a file of the cache, or None where there is no usable one.

    Warns where the folder is not trusted or cannot be read, or the file is damaged.
    """
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
    """Write a whole file into the cache if its folder is trusted; warn once if it cannot be written."""
    file = cache_folder() / name
    if untrusted(file.parent) is not None:
        return
    try:
        nvrtc.keep(file, content)
    except OSError as error:
        _warn_once(f"{file.parent} cannot be written ({error.strerror})")


def untrusted(folder: Path) -> str | None:
    """Return why another user may have written what lies in ``folder``.

    Returns None if only this user may write there, or the folder does not exist yet.
    """
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error)
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & 0o022:
        return f"others may write to it (mode {status.st_mode & 0o777:o}; chmod go-w ends that)"
    return None


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        f"{problem}: kernels are compiled again in each process; set QERL_CACHE to a folder of your own", stacklevel=3
    )


def compile_ahead(jobs: Iterable[tuple[str, Defines]]) -> None:
    """Fill the cache with several sources at once, in up to one process a core; a lone one compiles at its first use.

    ``jobs`` are pairs of a source and its defines, as ``compile_source`` takes them. Where a process fails this warns,
    and its kernels compile at their first use. Raises CompileError where NVRTC is missing.
    """
    if untrusted(cache_folder()) is not None:
        return
    missing = {}
    for source, defines in jobs:
        options = _options(defines)
        file = _cache_file(source, options)
        if not os.path.exists(file):  # Path.exists() would raise if the folder cannot be searched
            missing[file] = json.dumps({"source": source, "options": options, "file": str(file)})
    processes = min(len(missing), os.cpu_count() or 1, MOST_PROCESSES)
    if processes < 2:
        return
    library = _path_of(_nvrtc())
    line = [sys.executable, nvrtc.__file__, library]
    # NVRTC loads its builtins library by name and does not look beside itself: its folder must be in the search path.
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


def _options(defines: Defines) -> list[str]:
    return ["--gpu-architecture=sm_90a", "--std=c++17", *(f"-D{name}={value}" for name, value in defines)]


def _cache_file(source: str, options: list[str]) -> Path:
    key = hashlib.sha256("\0".join([source, *options, nvrtc.version(_nvrtc())]).encode()).hexdigest()
    return cache_folder() / f"{key}.kernel"


def _path_of(library: ctypes.CDLL) -> str:
    """Return the path of a loaded library, or its bare name, which the loader looks for, where the path is unknown."""
    name = Path(library._name).name
    mapped = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    return next((path for path in mapped if Path(path).name.startswith(name)), library._name)
