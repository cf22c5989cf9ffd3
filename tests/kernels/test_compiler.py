import pytest
from qerl_kernels import compiler


def test_machine_code_is_kept_whole_or_not_at_all(tmp_path):
    file = tmp_path / "cache" / "x.cubin"
    compiler._keep(file, b"first")
    compiler._keep(file, b"second")
    assert file.read_bytes() == b"second" and list(file.parent.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_is_an_os_error_that_the_compiler_survives(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(OSError):
        compiler._keep(blocked / "x.cubin", b"code")


def test_the_cache_folder_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "mine"))
    assert compiler.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("QERL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.cache_folder() == tmp_path / "qerl"
