"""The file in shared memory that carries tensors to workers."""

import hashlib
import os
import re
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


@pytest.mark.parametrize("most, group", [(1, 1 << 20), (2, 1 << 20), (64, 1), (64, 48), (64, 1 << 20)])
def test_tensors_that_are_written_together_or_in_parts_have_their_bits(monkeypatch, most, group):
    """The kernel writes at most 2 GiB at a time, here some bytes, and may end within a tensor or behind it."""
    monkeypatch.setattr(shared_file, "MOST", most)
    monkeypatch.setattr(shared_file, "GROUP", group)
    sizes, pwritev = iter([5, 1, 48, 7, 3] * 100), os.pwritev

    def some(number, buffers, start):
        return pwritev(number, [memoryview(b"".join(buffers))[: next(sizes)]], start)

    monkeypatch.setattr(os, "pwritev", some)
    with shared_file.shared(TENSORS) as path:
        found = load_file(path)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].flatten().view(torch.uint8).tolist() == tensor.flatten().view(torch.uint8).tolist()


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(ValueError, match="tensor a has dtype"), shared_file.shared({"a": A.cfloat()}):
        pass


def test_more_than_there_is_does_not_fit():
    assert shared_file.fits(1) and not shared_file.fits(1 << 60)


def resident_bytes(path: str) -> int:
    """How much of the file under ``path`` this process has looked at."""
    name, found, is_it = os.readlink(path), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_it = line.endswith(name)
        elif is_it and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_a_worker_reads_its_share_of_it_and_no_more():
    whole = torch.zeros(4 << 20, dtype=torch.uint8)
    with shared_file.shared({str(i): whole for i in range(4)}) as path:
        tensors = load_file(path)
        assert resident_bytes(path) < 1 << 20
        share = {name: tensor[: 1 << 20].clone() for name, tensor in tensors.items()}
        assert 4 << 20 <= resident_bytes(path) < 6 << 20, "a quarter of 16 MiB, and what the kernel maps around it"
        assert sum(tensor.nbytes for tensor in share.values()) == 4 << 20


def test_a_file_proves_its_owner(monkeypatch):
    with shared_file.proof(b"content") as path:
        assert shared_file.is_proof(path, b"content")
        assert not shared_file.is_proof(path, b"contents") and not shared_file.is_proof(path, b"conten")
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # a server of another user
        assert not shared_file.is_proof(path, b"content")
    assert not shared_file.is_proof(path, b"content")


def test_a_digest_is_of_every_segment_and_of_their_order(monkeypatch):
    monkeypatch.setattr(shared_file, "SEGMENT", 8)
    monkeypatch.setattr(shared_file, "READ", 3)

    def of(content):
        with shared_file.unnamed() as (file, _):
            shared_file.append(file, content)
            return shared_file.digest(file, len(content))

    halves = hashlib.sha256(b"12345678").digest() + hashlib.sha256(b"9").digest()
    assert of(b"123456789") == hashlib.sha256(halves).hexdigest()
    contents = [b"", b"1" * 8, b"1" * 16, b"1" * 8 + b"2" * 8, b"2" * 8 + b"1" * 8, b"1" * 15 + b"2"]
    assert len({of(content) for content in contents}) == len(contents)
