"""The file in shared memory that carries tensors to workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl_vllm_plugin import shared_file

A = torch.arange(12.0).reshape(3, 4)
TENSORS = {
    "plain": A,
    "the_same_memory": A,
    "a_view": A.t(),
    "half": A.bfloat16(),
    "eight_bits": A.to(torch.float8_e4m3fn),
    "whole": torch.arange(5),
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "odd": torch.ones(3, dtype=torch.uint8),
}


def test_it_has_the_bits_of_the_tensors_and_another_process_reads_them():
    with shared_file.shared(TENSORS) as path:
        found = load_file(path)
        line = f"from safetensors.torch import load_file; print(load_file({path!r})['a_view'].tolist())"
        other = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
    assert other.stdout.strip() == str(A.t().tolist())
    assert not Path(path).exists()


def test_it_has_no_name_and_what_is_mapped_outlives_it():
    with shared_file.shared({"a": A}) as path:
        assert str(Path(path).readlink()).startswith(f"{shared_file.SHARED_MEMORY}/")
        assert os.stat(path).st_nlink == 0
        found = load_file(path)["a"]
    assert torch.equal(found, A)


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(ValueError, match="tensor a has dtype"), shared_file.shared({"a": A.cfloat()}):
        pass


def test_more_than_there_is_does_not_fit():
    assert shared_file.fits(1) and not shared_file.fits(1 << 60)
