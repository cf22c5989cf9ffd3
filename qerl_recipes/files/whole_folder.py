"""Write a folder, or a file, whole or not at all.

The content is written to a hidden sibling, flushed to disk, and renamed into place in one step. If anything stops the
writer (an error, a full disk, SIGKILL), the destination is untouched, and the next writer removes what is left. A live
one holds a lock on its folder. ``_move`` tells of a file system that cannot exchange folders.
"""

import ctypes
import fcntl
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextmanager
def whole_folder(destination: str | Path, *, overwrite: bool = False, proof: str = "config.json") -> Iterator[Path]:
    """Yield an empty folder to write into; it becomes ``destination`` when the block ends without an error.

    ``overwrite`` permits replacing a folder that is not empty, if it holds a file named ``proof``: a home folder named
    by mistake is not a checkpoint. Raises FileExistsError if it must not be replaced, and BlockingIOError while another
    process is writing the same destination.
    """
    destination = Path(destination).absolute()
    _check_replaceable(destination, overwrite, proof)
    destination.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{destination.name}.partial-"
    for leftover in destination.parent.glob(f"{prefix}*"):
        busy = BlockingIOError(f"{destination}: another process is writing it ({leftover}); wait for it")
        with suppress(FileNotFoundError), locked(leftover, busy):  # its writer may finish just now
            shutil.rmtree(leftover)
    partial = destination.parent / (prefix + secrets.token_hex(4))
    partial.mkdir()
    with locked(partial):
        try:
            yield partial
            # os.umask would change it, for other threads too
            mask = int(Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0], 8)
            for path in [*partial.rglob("*"), partial]:
                # safetensors makes its files readable by their owner alone
                path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
                _flush(path)
            _check_replaceable(destination, overwrite, proof)
            _move(partial, destination)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # a failed attempt, or the folder that was replaced
        _flush(destination.parent)


def write_text(file: str | Path, text: str) -> None:
    """Write a UTF-8 file whole or not at all, over an existing one; raise OSError, naming the file, on failure."""
    write_bytes(file, text.encode())


def write_bytes(file: str | Path, content: bytes) -> None:
    """Write a file whole or not at all, over an existing one; raise OSError, naming the file, on failure."""
    file = Path(file)
    partial = file.with_name(f".{file.name}.partial-{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except OSError as error:
        raise OSError(error.errno, f"{file} could not be written ({error.strerror}); what was there is kept") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, refusal: Exception | None = None) -> Iterator[None]:
    """Lock a folder during the block. While another has it, raise ``refusal``; without one, wait."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except BlockingIOError as error:
            raise refusal or error from error
        yield
    finally:
        os.close(handle)


def _check_replaceable(destination: Path, overwrite: bool, proof: str) -> None:
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise FileExistsError(f"{destination}: exists and is not a folder; name another destination")
    if not destination.exists() or not any(destination.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{destination}: exists and is not empty; name another destination, or pass --overwrite")
    if not (destination / proof).is_file():
        raise FileExistsError(f"{destination}: holds no {proof}, so it is not overwritten; name another destination")


def _move(partial: Path, destination: Path) -> None:
    """Rename ``partial`` to ``destination``, or exchange the two if the destination has content.

    After an exchange, ``partial`` holds the old content. Both leave no moment without a destination. A file system that
    cannot exchange gets two renames, with such a moment between them, and a warning.
    """
    if not destination.exists() or not any(destination.iterdir()):
        os.rename(partial, destination)
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.renameat2(AT_FDCWD, os.fsencode(partial), AT_FDCWD, os.fsencode(destination), RENAME_EXCHANGE) == 0:
        return
    reason = os.strerror(ctypes.get_errno())
    warnings.warn(
        f"{destination}: this file system cannot exchange folders ({reason}); using two renames", stacklevel=2
    )
    old = partial.with_name(partial.name + "-old")
    os.rename(destination, old)
    os.rename(partial, destination)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
