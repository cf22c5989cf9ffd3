"""Test how kernel sources are assembled, compiled by NVRTC and kept in the cache folder."""

import os
import resource
import tempfile
from pathlib import Path

import pytest
from qerl_kernels import compiler, gemm, nvrtc


def test_parts_of_a_source_stand_in_their_places_once(tmp_path):
    (tmp_path / "a.cu").write_text('first\n#include "b.cuh"\n#include "c.cuh"\nlast\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "c.cuh"\nof b\n')
    (tmp_path / "c.cuh").write_text("of c\n")
    lines = compiler.read_source(tmp_path / "a.cu").splitlines()
    assert [line for line in lines if line and line[0] != "#"] == ["first", "of c", "of b", "last"]
    assert lines[lines.index("of b") - 1] == '#line 3 "b.cuh"' and lines[lines.index("last") - 1] == '#line 4 "a.cu"'


def test_every_part_belongs_to_a_kernel_and_is_short():
    folder = Path(gemm.__file__).parent
    whole = "".join(gemm.source(kernel) for kernel in ("nvfp4_tiles", "nvfp4_dequantize"))
    parts = {file.name for file in folder.glob("*.cuh")}
    assert len(parts) >= 6 and all(f'#line 1 "{part}"' in whole for part in parts)
    assert "#include" not in whole and "#pragma once" not in whole
    assert all(len(file.read_text().splitlines()) <= 200 for file in (*folder.glob("*.cuh"), *folder.glob("*.cu")))


def test_machine_code_is_kept_whole_or_not_at_all(tmp_path):
    file = tmp_path / "cache" / "x.kernel"
    nvrtc.keep(file, b"first")
    nvrtc.keep(file, b"second")
    assert nvrtc.kept(file) == b"second" and list(file.parent.iterdir()) == [file]
    assert file.parent.stat().st_mode & 0o777 == 0o700
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:10], b"", whole[:-1] + b"?", b"\0" * len(whole)):
        file.write_bytes(damaged)
        assert nvrtc.kept(file) is None


def test_a_full_disk_is_an_error_that_leaves_no_part_of_a_file(tmp_path):
    nvrtc.keep(tmp_path / "x.kernel", b"first")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most[1]))
    try:
        with pytest.raises(OSError):
            nvrtc.keep(tmp_path / "x.kernel", b"second" * 10000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert nvrtc.kept(tmp_path / "x.kernel") == b"first" and len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Return the list of sources compiled, starting from an empty cache.

    A stand-in replaces NVRTC, which comes only with torch for CUDA.
    """
    calls = []
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_nvrtc", lambda: None)
    monkeypatch.setattr(nvrtc, "version", lambda library: "13.0")
    monkeypatch.setattr(
        nvrtc, "compile_source", lambda library, source, options: calls.append(source) or source.encode()
    )
    compiler._warn_once.cache_clear()
    return calls


def test_a_damaged_file_of_the_cache_is_compiled_again(compiled, recwarn):
    assert [compiler.compile_source("one") for _ in range(2)] == [b"one"] * 2 and compiled == ["one"]
    (file,) = compiler.cache_folder().iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert [compiler.compile_source("one") for _ in range(2)] == [b"one"] * 2 and compiled == ["one"] * 2
    (warning,) = [one for one in recwarn if "QERL_CACHE" in str(one.message) or "damaged" in str(one.message)]
    assert "is damaged" in str(warning.message) and "made again" in str(warning.message)


def test_what_another_compiler_or_other_options_make_has_a_file_of_its_own(compiled, monkeypatch):
    """Check that each compiler version and option set gets its own file, so that a variant is proven again.

    A verdict belongs to one machine code.
    """
    asked = [("one",), ("one", (("ROWS", 2),)), ("one", (("ROWS", 3),)), ("two",)]
    for version in ("13.0", "13.1", "13.0"):
        monkeypatch.setattr(nvrtc, "version", lambda library, version=version: version)
        for arguments in asked:
            compiler.compile_source(*arguments)
    assert len(compiled) == len(list(compiler.cache_folder().iterdir())) == 2 * len(asked)


@pytest.mark.parametrize("fault", ["another_user", "writable", "unreadable"])
def test_a_cache_that_may_be_another_users_is_not_used_and_says_so_once(compiled, fault, monkeypatch, recwarn):
    compiler.compile_source("one")
    folder, mine = compiler.cache_folder(), os.geteuid()
    if fault == "another_user":
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    elif fault == "writable":
        folder.chmod(0o777)
    else:  # Root may read every file, so a folder takes the file's place.
        (file,) = folder.iterdir()
        file.unlink()
        file.mkdir()
    assert [compiler.compile_source("one") for _ in range(3)] == [b"one"] * 3 and len(compiled) == 4
    said = " ".join(str(warning.message) for warning in recwarn)
    expected = {"another_user": "it belongs to user", "writable": "chmod go-w", "unreadable": "cannot be"}[fault]
    assert expected in said and said.count("set QERL_CACHE") <= 2
    if fault != "unreadable":  # the refused folder is not written to either
        monkeypatch.setattr(compiler.subprocess, "run", lambda *a, **k: pytest.fail("compiled into that folder"))
        compiler.compile_ahead([("two", ()), ("three", ())])
        assert len(list(folder.iterdir())) == 1


@pytest.fixture
def folder_of_no_root(monkeypatch):
    """Provide a cache that belongs to the user.

    Root may read everything, so for the test root becomes the user nobody.
    """
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("QERL_CACHE", folder)
        root = os.geteuid() == 0
        if root:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)


@pytest.mark.parametrize("locked", ["file", "folder"])
def test_what_may_not_be_read_is_compiled_again_and_is_no_error(compiled, folder_of_no_root, locked, recwarn):
    compiler.compile_source("one")
    (file,) = folder_of_no_root.iterdir()
    (file if locked == "file" else folder_of_no_root).chmod(0)
    assert compiler.compile_source("one") == b"one" and compiled == ["one"] * 2
    compiler.compile_ahead([("one", ())])
    said = {str(warning.message) for warning in recwarn if "QERL_CACHE" in str(warning.message)}
    assert any("cannot be read (Permission denied)" in text for text in said), said
    folder_of_no_root.chmod(0o700)


def test_the_cache_folder_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "mine"))
    assert compiler.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("QERL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.cache_folder() == tmp_path / "qerl"
    for name in ("QERL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compiler.cache_folder() == tmp_path / "home" / ".cache" / "qerl"


def test_a_user_without_a_home_has_a_folder_all_the_same(monkeypatch):
    """Check the folder of a user without a home, as in a container that runs under an arbitrary user id.

    No folder named ~ may appear in the working directory.
    """

    def unknown(user):
        raise KeyError(user)

    for name in ("QERL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    folder = compiler.cache_folder()
    assert folder.is_absolute() and folder.name == f"qerl-{os.geteuid()}" and "~" not in str(folder)


@pytest.fixture
def with_nvrtc(monkeypatch, tmp_path):
    """Provide NVRTC, which comes only with torch for CUDA, and an empty cache; skip without it."""
    try:
        compiler._nvrtc()
    except compiler.CompileError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    return tmp_path


SOURCE = 'extern "C" __global__ void fill(float* x) { x[threadIdx.x] = VALUE; }'


def test_sources_compiled_ahead_are_those_compiled_when_needed(with_nvrtc, monkeypatch):
    compiler.compile_ahead([(SOURCE, (("VALUE", value),)) for value in (1, 2, 3, 3)])
    ahead = {file.name: nvrtc.kept(file) for file in with_nvrtc.iterdir()}
    assert len(ahead) == 3
    monkeypatch.setenv("QERL_CACHE", str(with_nvrtc / "again"))
    assert {compiler.compile_source(SOURCE, (("VALUE", value),)) for value in (1, 2, 3)} == set(ahead.values())


def test_a_source_that_does_not_compile_ahead_warns_and_leaves_the_error_to_its_turn(with_nvrtc):
    jobs = [("no C++ at all", ()), ("nor this", ())]
    with pytest.warns(UserWarning, match="could not be compiled ahead"):
        compiler.compile_ahead(jobs)
    with pytest.raises(compiler.CompileError, match=r"qerl\.cu"):
        compiler.compile_source(*jobs[0])
