"""Test quantizing that is stopped or runs out of disk: earlier files stay and the next run finishes. Also test peak
memory.
"""

import contextlib
import itertools
import json
import os
import resource
import signal
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
    """Make a finished destination of an earlier run."""
    quantize_checkpoint(small, tmp_path / "nvfp4", scales="mse")
    return tmp_path / "nvfp4"


def quantize_and_be_killed(source: Path, destination: Path, kind: signal.Signals) -> int:
    """Quantize in a forked process that sends itself the signal after three tensors, and return how it ended."""
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


def test_a_killed_run_leaves_the_old_folder(tmp_path, small):
    source = save_model(tmp_path / "bf16", vocab_size=128)
    destination = tmp_path / "nvfp4"
    quantize_checkpoint(small, destination)
    before = content(destination)
    seen: set[Path] = set()
    for kind in (signal.SIGTERM, signal.SIGKILL):
        assert quantize_and_be_killed(source, destination, kind) == -kind
        (partial,) = tmp_path.glob(".nvfp4.partial-*")  # its own partial folder is left, the earlier one is removed
        assert partial not in seen and sum(map(len, content(partial).values())) > 0
        seen.add(partial)
        assert content(destination) == before
    quantize_checkpoint(source, destination, overwrite=True)
    assert inspect_folder(destination).complete and not list(tmp_path.glob(".nvfp4*"))
    assert content(destination) != before


@pytest.fixture
def kept(previous):
    """Return a context that expects an error and checks that the earlier destination is unchanged."""

    @contextlib.contextmanager
    def check(error: type[Exception], message: str):
        before = content(previous)
        with pytest.raises(error, match=message):
            yield
        assert content(previous) == before and not list(previous.parent.glob(".nvfp4*"))

    return check


@pytest.mark.parametrize("limit", [2_000, 20_000], ids=["in the first shard", "later"])
def test_a_disk_that_fills_up_leaves_the_old_folder(small, previous, kept, limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with kept(OSError, r"nvfp4 could not be written \(.*File too large.*\); nothing was changed"):
        # this fails with EFBIG, as a full disk fails with ENOSPC
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            quantize_checkpoint(small, previous, overwrite=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_too_little_space_is_refused_before_anything_is_written(small, previous, kept, monkeypatch):
    usage = whole_folder_module.shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr(shards, "write_tensor", None)
    with kept(OSError, r"nvfp4 could not be written .*it needs 0\.00 GB; free some first; 0 MB free"):
        quantize_checkpoint(small, previous, overwrite=True)


def test_only_a_checkpoint_is_replaced_when_asked(small, previous, kept):
    with kept(FileExistsError, "exists and is not empty; name another destination, or pass --overwrite"):
        quantize_checkpoint(small, previous)
    quantize_checkpoint(small, previous, overwrite=True)
    assert json.loads((previous / "quantize_report.json").read_text())["scales"] == "amax"
    (previous / "config.json").unlink()
    with kept(FileExistsError, r"holds no config\.json, so it is not overwritten"):
        quantize_checkpoint(small, previous, overwrite=True)


@pytest.mark.integration
def test_peak_memory_follows_the_largest_tensor(small, run_process, tmp_path):
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
    # The heap keeps memory that it once got: 40 to 95 MiB were seen on two processors. A whole file would be 400 MiB.
    assert peak - before < 2 * largest + 150 * 2**20 < size / 2, f"{(peak - before) >> 20} MiB above {before >> 20} MiB"
