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
    file = tmp_path / "cache" / "x.cubin"
    nvrtc.keep(file, b"first")
    nvrtc.keep(file, b"second")
    assert file.read_bytes() == b"second" and list(file.parent.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_is_an_os_error_that_the_compiler_survives(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(OSError):
        nvrtc.keep(blocked / "x.cubin", b"code")


def test_the_cache_folder_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "mine"))
    assert compiler.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("QERL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.cache_folder() == tmp_path / "qerl"


@pytest.fixture
def with_nvrtc(monkeypatch, tmp_path):
    """NVRTC and an empty cache; it comes with torch for CUDA only."""
    try:
        compiler._nvrtc()
    except compiler.CompileError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    return tmp_path


SOURCE = 'extern "C" __global__ void fill(float* x) { x[threadIdx.x] = VALUE; }'


def test_sources_compiled_ahead_are_those_compiled_when_needed(with_nvrtc, monkeypatch):
    compiler.compile_ahead([(SOURCE, (("VALUE", value),)) for value in (1, 2, 3, 3)])
    ahead = {file.name: file.read_bytes() for file in with_nvrtc.iterdir()}
    assert len(ahead) == 3
    monkeypatch.setenv("QERL_CACHE", str(with_nvrtc / "again"))
    assert {compiler.compile_source(SOURCE, (("VALUE", value),)) for value in (1, 2, 3)} == set(ahead.values())


def test_a_source_that_does_not_compile_ahead_warns_and_leaves_the_error_to_its_turn(with_nvrtc):
    jobs = [("no C++ at all", ()), ("nor this", ())]
    with pytest.warns(UserWarning, match="could not be compiled ahead"):
        compiler.compile_ahead(jobs)
    with pytest.raises(compiler.CompileError, match=r"qerl\.cu"):
        compiler.compile_source(*jobs[0])
