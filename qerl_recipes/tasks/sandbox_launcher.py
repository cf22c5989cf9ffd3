"""Shut this process in, run one program under limits, and exit as it does.

``sandbox.run`` starts this file with ``python -IS``. It needs only the standard library. Its argument is JSON; its last
lines, after the functions, say in which order things happen.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path

MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1  # of linux/mount.h and asm-generic/unistd.h
NO_SUID, NO_DEVICES, BIND = 2, 4, 0x1000 | 0x4000
NO_NEW_PRIVILEGES, SECURE_BITS, NO_POWERS_OF_ROOT = 38, 28, 0x2F  # of linux/prctl.h and linux/securebits.h
PAUSE = 0.25  # seconds between two looks at the time


def checked(result: int, what: str) -> None:
    """Raise OSError where a call of the C library has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def close_file_system(libc: ctypes.CDLL, settings: dict) -> None:
    """Hide the home folder but for ``visible``; make all read-only but ``folder``, a file system of ``disk`` bytes."""
    home, folder, owner = settings["home"], settings["folder"], settings["uid"] or 0
    if home != "/" and os.path.isdir(home):
        inside = {path: os.open(path, os.O_PATH) for path in settings["visible"] if path.startswith(f"{home}/")}
        checked(libc.mount(b"none", home.encode(), b"tmpfs", NO_SUID | NO_DEVICES, b"size=65536,mode=755"), home)
        for path, opened in inside.items():
            os.makedirs(path, exist_ok=True)
            checked(libc.mount(f"/proc/self/fd/{opened}".encode(), path.encode(), None, BIND, None), path)
            os.close(opened)
    attributes = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    result = libc.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, attributes, len(attributes))
    checked(result, "the file system cannot be made read-only")
    options = f"size={settings['disk']},nr_inodes=4096,mode=700,uid={owner}".encode()
    checked(libc.mount(b"none", folder.encode(), b"tmpfs", NO_SUID | NO_DEVICES, options), folder)


def start(libc: ctypes.CDLL, settings: dict) -> int:
    """Start the program in a child process under its limits -> its process id."""
    child = os.fork()
    if child:
        return child
    try:
        for name, (soft, hard) in settings["limits"].items():
            resource.setrlimit(getattr(resource, name), (soft, hard))
        if settings["uid"] is not None:
            os.setgroups([])
            os.setresgid(*[settings["uid"]] * 3)
            os.setresuid(*[settings["uid"]] * 3)
        elif settings["namespaces"]:
            checked(libc.prctl(SECURE_BITS, NO_POWERS_OF_ROOT, 0, 0, 0), "privileges cannot be dropped")
        checked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "new privileges cannot be refused")
        os.chdir(settings["folder"])
        os.write(settings["started"], b"1")
        os.execv(settings["command"][0], settings["command"])
    except BaseException as error:
        os.write(2, f"{settings['command'][0]} cannot be run: {type(error).__name__}: {error}".encode())
    os._exit(127)


def time_without_waiting(pid: int, started: float) -> float:
    """Return the seconds since ``started`` in which a process has not waited for a processor, as far as Linux says."""
    try:
        waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        waited = 0.0
    return time.monotonic() - started - waited


def cpu_seconds_of_group() -> float:
    """Return the CPU seconds of this process group and of the children that its processes have waited for."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == os.getpgrp():
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    os.set_inheritable(settings["started"], False)
    libc = ctypes.CDLL(None, use_errno=True)
    if settings["namespaces"]:
        close_file_system(libc, settings)
    started, is_out_of_time = time.monotonic(), False
    child = start(libc, settings)
    os.close(settings["started"])

    def end_in_time(*signal_and_frame: object) -> None:
        global is_out_of_time
        if (
            time.monotonic() - started > settings["longest"]  # whoever started this may have died
            or time_without_waiting(child, started) > settings["wall_seconds"]
            or cpu_seconds_of_group() > settings["cpu_seconds"]
        ):
            with contextlib.suppress(ProcessLookupError):  # it may just have ended
                os.kill(child, signal.SIGKILL)
                is_out_of_time = True

    signal.signal(signal.SIGALRM, end_in_time)
    signal.setitimer(signal.ITIMER_REAL, PAUSE, PAUSE)
    while True:  # the first process of a namespace gets all orphans
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(settings["out_of_time"] if is_out_of_time else code if code >= 0 else 128 - code)
