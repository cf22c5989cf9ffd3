"""Compile CUDA C++ to machine code through NVRTC's C interface, in this process or as a program of its own.

As a program it takes the library's path as its argument. Each line of standard input is one job, a JSON object with
``source``, ``options`` and the ``file`` to write. Several processes compile at one time, because NVRTC compiles one
source at a time in each. It imports only the standard library, so that it starts at once.
"""

import ctypes
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

DIGEST = hashlib.sha256().digest_size  # bytes of the hash that a file of the cache starts with


class CompileError(RuntimeError):
    """Report that a kernel's source was refused, with the compiler's log, or that its machine code does not load."""


def version(nvrtc: ctypes.CDLL) -> str:
    """Return NVRTC's version, such as "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_source(nvrtc: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    """Compile CUDA C++ to machine code; raises CompileError with the log."""
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"qerl.cu", 0, None, None)
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CompileError(f"NVRTC {version(nvrtc)} {options}: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def keep(file: Path, code: bytes) -> None:
    """Write machine code to ``file`` under another name and rename it when whole.

    Other processes may compile the same code at the same time. Raises OSError where that fails, as on a full disk; no
    partial file is left.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as content:
            content.write(hashlib.sha256(code).digest() + code)
        os.replace(partial, file)
    except OSError:
        os.unlink(partial)
        raise


def kept(file: Path) -> bytes | None:
    """Return what ``keep`` has written, or None if it is damaged; raises OSError if it cannot be read."""
    content = file.read_bytes()
    code = content[DIGEST:]
    return code if hashlib.sha256(code).digest() == content[:DIGEST] else None


def main() -> None:
    """Compile the jobs of standard input; raises CompileError or OSError at the first that fails."""
    nvrtc = ctypes.CDLL(sys.argv[1])
    for line in sys.stdin:
        job = json.loads(line)
        keep(Path(job["file"]), compile_source(nvrtc, job["source"], job["options"]))


if __name__ == "__main__":
    main()
