"""Quantizing that is stopped or runs out of room: what was there stays, and the next run finishes. Peak memory."""

import contextlib
import fcntl
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from qerl_recipes.convert import shards
from qerl_recipes.convert.quantize import quantize_checkpoint
from qerl_recipes.files import whole_folder as whole_folder_module
from qerl_recipes.files.whole_folder import whole_folder
from qerl_vllm_plugin.weights.checkpoint import inspect_folder
from qerl_vllm_plugin.weights.expected import expected_tensors

RUN = """
import sys
from qerl_recipes.convert.quantize import quantize_checkpoint
for source in sys.argv[1:-1]:
    quantize_checkpoint(source, sys.argv[-1], overwrite=True)
    print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def save_model(folder: Path, **sizes) -> Path:
    torch.manual_seed(0)
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Qwen2Config(num_attention_heads=2, num_key_value_heads=1, **(settings | sizes))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="20MB")
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("small") / "bf16")


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def previous(small, tmp_path) -> Path:
    """A finished destination from an earlier run."""
    quantize_checkpoint(small, tmp_path / "nvfp4", scales="mse")
    return tmp_path / "nvfp4"


def quantize_and_be_killed(source: Path, destination: Path, kind: signal.Signals) -> int:
    """Quantize in a copy of this process that sends itself the signal after three tensors -> how it has ended."""
    child = os.fork()
    if child == 0:
        written, write = itertools.count(1), shards.write_tensor

        def writes(stream: BinaryIO, entry: shards.Entry, tensor: torch.Tensor) -> None:
            write(stream, entry, tensor)
            if next(written) == 3:
                stream.flush()
                os.kill(os.getpid(), kind)

        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            shards.write_tensor = writes
            quantize_checkpoint(source, destination, overwrite=True)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_killed_run_leaves_the_old_folder_and_the_next_run_finishes(tmp_path, small):
    source = save_model(tmp_path / "bf16", vocab_size=128)
    destination = tmp_path / "nvfp4"
    quantize_checkpoint(small, destination)
    before = content(destination)
    seen: set[Path] = set()
    for kind in (signal.SIGTERM, signal.SIGKILL):
        assert quantize_and_be_killed(source, destination, kind) == -kind
        (partial,) = tmp_path.glob(".nvfp4.partial-*")  # its own is left, the one before is removed
        assert partial not in seen and sum(map(len, content(partial).values())) > 0
        seen.add(partial)
        assert content(destination) == before
    quantize_checkpoint(source, destination, overwrite=True)
    assert inspect_folder(destination).complete and not list(tmp_path.glob(".nvfp4*"))
    assert content(destination) != before


@pytest.mark.parametrize("limit", [2_000, 20_000], ids=["in the first shard", "later"])
def test_a_disk_that_fills_up_leaves_the_old_folder(small, previous, limit):
    before = content(previous)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # the write fails with EFBIG, as a full disk's with ENOSPC
    try:
        with pytest.raises(OSError, match=r"nvfp4 could not be written \(.*File too large.*\); nothing was changed"):
            quantize_checkpoint(small, previous, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert content(previous) == before and not list(previous.parent.glob(".nvfp4*"))


def test_too_little_space_is_refused_before_anything_is_written(small, previous, monkeypatch):
    before = content(previous)
    usage = whole_folder_module.shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"nvfp4 could not be written .*it needs 0\.00 GB; free some first; 0 MB free"):
        quantize_checkpoint(small, previous, overwrite=True)
    assert content(previous) == before and not list(previous.parent.glob(".nvfp4*"))


def test_an_existing_folder_is_replaced_only_when_asked(small, previous):
    before = content(previous)
    with pytest.raises(FileExistsError, match="exists and is not empty; name another destination, or pass --overwrite"):
        quantize_checkpoint(small, previous)
    assert content(previous) == before
    quantize_checkpoint(small, previous, overwrite=True)
    assert json.loads((previous / "quantize_report.json").read_text())["scales"] == "amax"


def test_a_folder_that_is_no_checkpoint_is_never_overwritten(small, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(FileExistsError, match=r"holds no config\.json, so it is not overwritten"):
        quantize_checkpoint(small, home, overwrite=True)
    assert content(home) == {"thesis.txt": b"irreplaceable"}


def test_two_writers_of_one_folder_do_not_meet(tmp_path):
    with whole_folder(tmp_path / "out") as first:
        (first / "config.json").write_text("1")
        with pytest.raises(BlockingIOError, match="another process is writing it"), whole_folder(tmp_path / "out"):
            pass
    assert content(tmp_path / "out") == {"config.json": b"1"}


def test_what_a_dead_process_left_is_removed(tmp_path):
    dead = tmp_path / ".out.partial-00000000"
    dead.mkdir()
    (dead / "half").write_text("x")
    with whole_folder(tmp_path / "out") as partial:
        assert not dead.exists()
        (partial / "config.json").write_text("1")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_an_exchange_of_names_two_renames_do_the_same(tmp_path, monkeypatch):
    with whole_folder(tmp_path / "out") as partial:
        (partial / "config.json").write_text("old")
    monkeypatch.setattr(whole_folder_module, "RENAME_EXCHANGE", 1 << 20)  # a flag that the kernel refuses
    with (
        pytest.warns(UserWarning, match="cannot exchange folders"),
        whole_folder(tmp_path / "out", overwrite=True) as partial,
    ):
        (partial / "config.json").write_text("new")
    assert content(tmp_path / "out") == {"config.json": b"new"} and len(list(tmp_path.iterdir())) == 1


def test_a_lock_ends_with_its_process(tmp_path):
    program = (
        "import sys, os, signal; from qerl_recipes.files.whole_folder import whole_folder\n"
        "with whole_folder(sys.argv[1]) as p: os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program, tmp_path / "out"]).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    handle = os.open(left, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


@pytest.mark.integration
def test_peak_memory_follows_the_largest_tensor_and_not_the_file(small, run_process, tmp_path):
    source = tmp_path / "bf16"
    config = Qwen2Config(
        vocab_size=2_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(source)
    expected = expected_tensors(json.loads((source / "config.json").read_text()))
    weights = {name: torch.full(tensor.shape, 0.5, dtype=torch.bfloat16) for name, tensor in expected.items()}
    save_file(weights, source / "model.safetensors")
    size, largest = (source / "model.safetensors").stat().st_size, max(w.nbytes for w in weights.values())
    del weights
    run_process([sys.executable, "-c", RUN, small, source, tmp_path / "nvfp4"], tmp_path / "log")
    output = (tmp_path / "log").read_text()
    before, peak = (int(part.split()[0]) * 1024 for part in output.split("VmHWM:")[1:])
    assert peak < 2 * largest + 2**30
    # the heap keeps what it was once given: 40 to 95 MiB were seen, on two processors; a whole file would be 400
    assert peak - before < 2 * largest + 150 * 2**20 < size / 2, f"{(peak - before) >> 20} MiB above {before >> 20} MiB"
