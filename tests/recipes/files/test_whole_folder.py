"""What is written whole or not at all."""

import os
from pathlib import Path

import pytest

from qerl_recipes.files import whole_folder


def test_an_interrupted_write_leaves_what_was_there_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "evaluation.json"
    whole_folder.write_text(file, "old")
    mask = os.umask(0)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask, "a server of another user could not read it"

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_folder.os, "fsync", full)
    with pytest.raises(OSError, match=r"evaluation\.json could not be written \(No space left on device\)") as refusal:
        whole_folder.write_text(file, "new")
    assert refusal.value.errno == 28
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]
    assert file.read_text() == "old"
