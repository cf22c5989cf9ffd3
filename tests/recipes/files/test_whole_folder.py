"""Test that files and folders are written whole or not at all."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qerl_recipes.files import whole_folder as module
from qerl_recipes.files.whole_folder import whole_folder, write_text


def test_an_interrupted_write_keeps_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "evaluation.json"
    write_text(file, "old")
    mask = os.umask(0)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask, "a server of another user could not read it"

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match=r"evaluation\.json could not be written \(No space left on device\)") as refusal:
        write_text(file, "new")
    assert refusal.value.errno == 28
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]
    assert file.read_text() == "old"


def test_two_writers_of_one_folder_do_not_meet(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out") as first:
        (first / "config.json").write_text("1")
        with pytest.raises(BlockingIOError, match="another process is writing it"), whole_folder(tmp_path / "out"):
            pass
    assert (tmp_path / "out" / "config.json").read_text() == "1"


def test_without_an_exchange_of_names_two_renames_do_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with whole_folder(tmp_path / "out") as partial:
        (partial / "config.json").write_text("old")
    monkeypatch.setattr(module, "RENAME_EXCHANGE", 1 << 20)  # the kernel refuses this flag
    with (
        pytest.warns(UserWarning, match="cannot exchange folders"),
        whole_folder(tmp_path / "out", overwrite=True) as partial,
    ):
        (partial / "config.json").write_text("new")
    assert (tmp_path / "out" / "config.json").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal; from qerl_recipes.files.whole_folder import whole_folder\n"
        "with whole_folder(sys.argv[1]) as p: os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program, tmp_path / "out"]).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    handle = os.open(left, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
