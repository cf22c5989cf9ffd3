"""Compile CUDA C++ with NVRTC at first use, and keep the machine code on disk; ``driver.py`` loads and launches it.

Needs no compiler on the machine: NVRTC comes with torch. The cache is ``$QERL_CACHE``, or ``qerl`` in
``$XDG_CACHE_HOME`` or ``~/.cache``, or, without a home, ``qerl-UID`` where temporary files are; a file is named by the
hash of the source, the options and the NVRTC version. What is in it runs on the GPU: a file that is damaged is compiled
again, and a folder that others may write to is not used.
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
MOST_PROCESSES = 16  # that compile at one time


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
