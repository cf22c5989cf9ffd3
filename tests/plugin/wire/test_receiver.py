"""Test which file a worker has mapped, and which of its bytes it copies to a GPU. Memory of this process plays the
GPU."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save

from qerl_vllm_plugin.wire import cuda_ipc, receiver, shared_file, spans
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.wire.receiver import MappedFile
from qerl_vllm_plugin.wire.shared_segment import Segments

CPU = torch.device("cpu")
A = torch.arange(24.0).reshape(4, 6)
TENSORS = {"plain": A, "a_view": A.t(), "half": A.bfloat16(), "none": torch.empty(0, 4), "one": torch.tensor(2.5)}


def opened(content, file):
    sent, path = shared_file.create()
    with sent:
        sent.write(content)
        return file.open(path, CPU)


def test_a_rewritten_file_is_read_again_and_mapped_once():
    segments, file = Segments(ValueError), MappedFile()
    with segments.filled(TENSORS) as path:
        first = file.open(path, CPU)
        assert all(first[name].dtype == tensor.dtype and first[name].equal(tensor) for name, tensor in TENSORS.items())
        address = first["plain"].data_ptr()
    with segments.filled({name: tensor + 1 for name, tensor in TENSORS.items()}) as path:
        second = file.open(path, CPU)
        assert all(second[name].equal(tensor + 1) for name, tensor in TENSORS.items())
    assert second["plain"].data_ptr() == address


def test_other_names_in_a_file_of_the_same_size_are_seen():
    segments, file = Segments(ValueError), MappedFile()
    with segments.filled({"a": A, "b": A + 1}) as path:
        assert file.open(path, CPU)["a"].equal(A)
    with segments.filled({"b": A, "c": A + 1}) as path:
        found = file.open(path, CPU)
        assert found.keys() == {"b", "c"} and found["b"].equal(A) and found["c"].equal(A + 1)
    with segments.filled({"b": A.t(), "c": A + 1}) as path:
        assert file.open(path, CPU)["b"].equal(A.t())


def test_another_file_takes_its_place():
    file = MappedFile()
    for given in (A, A[:2], A + 1, A[:2] - 1):
        with Segments(ValueError).filled({"a": given}) as path:
            assert file.open(path, CPU)["a"].equal(given)


def test_a_damaged_file_is_refused_though_it_was_good():
    segments, file = Segments(ValueError), MappedFile()
    for content in (b"", b"x", b"\xff" * 64, save({"a": A})[:-1], save({"a": A}) + b"x"):
        with pytest.raises((SafetensorError, OSError, ValueError)):
            opened(content, file)
    good = save({"a": A})
    with segments.of(len(good)) as segment:
        segment.write(good, 0)
        assert file.open(segment.path, CPU)["a"].equal(A)
    with segments.of(len(good)) as segment:
        segment.write(good.replace(b'"shape":[4,6]', b'"shape":[4,7]'), 0)
        for _ in range(2):
            with pytest.raises(SafetensorError):
                file.open(segment.path, CPU)
    with segments.of(len(good)) as segment:
        segment.write(good, 0)
        assert file.open(segment.path, CPU)["a"].equal(A)


def test_tensors_that_lie_across_words_are_copied_each_time():
    """Another writer's header may leave tensors unaligned. A copy of them must not stand for the bytes of the next
    swap."""
    segments, file = Segments(ValueError), MappedFile()
    text = json.dumps({"a": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}}).encode()
    text += b" " * (-len(text) % 8 + 3)
    for given in (A, A + 1, A + 2):
        content = len(text).to_bytes(8, "little") + text + given.numpy().tobytes()
        with segments.of(len(content)) as segment:
            segment.write(content, 0)
            found = file.open(segment.path, CPU)["a"]
            assert found.equal(given)
            assert not file.is_whole, "what is copied from the file's memory would not be its tensors"


@pytest.mark.parametrize("gap", [0, 40, 1 << 20])
def test_fetched_pieces_have_the_bits_and_are_copies(gap, monkeypatch):
    monkeypatch.setattr(spans, "GAP", gap)
    segments, file = Segments(ValueError), MappedFile()
    many = {str(i): A.to(dtype) + i for i, dtype in enumerate([torch.float32, torch.bfloat16, torch.float32] * 4)}
    with segments.filled(many) as path:
        found = file.open(path, CPU)
        pieces, wanted = [], []
        for i, name in enumerate(reversed(found)):
            for source, into in ((found, pieces), (many, wanted)):
                into.append([source[name], source[name][1:3], source[name][:, 2:4], source[name][:0]][i % 4])
        fetched = file.fetch(pieces, CPU).tensors()
        whole = file.fetch(list(found.values()), CPU).tensors()
    with segments.filled({name: tensor.zero_() for name, tensor in {k: v.clone() for k, v in many.items()}.items()}):
        pass
    for piece, expected in zip([*fetched, *whole], [*wanted, *many.values()], strict=True):
        assert piece.dtype == expected.dtype and piece.equal(expected)


def test_a_rank_of_two_takes_few_copies_of_its_share():
    """Take rows of one tensor and columns of the next, as a rank does for 8 layers."""
    whole, at, pieces = 0, 0, []
    memory = torch.empty(64 << 20, dtype=torch.uint8).view(torch.float32)
    for _ in range(8):
        for rows, columns, cut in ((32, 5120, "all"), (5120, 32, "rows"), (32, 5120, "columns"), (5120, 32, "all")):
            tensor = memory[at : at + rows * columns].view(rows, columns)
            at, whole = at + tensor.numel(), whole + tensor.nbytes
            cuts = {"all": tensor, "rows": tensor[: rows // 2], "columns": tensor[:, : columns // 2]}
            pieces.append(cuts[cut])
    planned = spans.plan(pieces, memory.nbytes)
    assert len(planned.spans) <= 9
    assert sum(span.size for span in planned.spans) < 0.9 * whole


def test_a_file_is_registered_from_its_second_use_on(monkeypatch):
    known, cuda = [], torch.device("cuda")
    monkeypatch.setattr(cuda_ipc, "register", lambda memory, device: known.append(memory.data_ptr()))
    monkeypatch.setattr(cuda_ipc, "unregister", lambda memory, device: known.remove(memory.data_ptr()))
    segments, file, counts = Segments(ValueError), MappedFile(), []
    for _ in range(3):
        with segments.filled({"a": A}) as path:
            file.open(path, cuda)
        counts.append(len(known))
    with segments.filled({"a": A[:2]}) as path:
        file.open(path, cuda)
    assert (counts, known) == ([0, 1, 1], [])


def test_memory_that_cannot_be_registered_is_warned_of_once(monkeypatch):
    tried, said = [], []

    def refuse(memory, device):
        tried.append(device)
        raise CudaIPCError("registering shared memory: CUDA error 801")

    monkeypatch.setattr(cuda_ipc, "register", refuse)
    monkeypatch.setattr(receiver.logger, "warning_once", lambda text, *given: said.append(text % given))
    segments, file = Segments(ValueError), MappedFile()
    for i in range(4):
        with segments.filled({"a": A + i}) as path:
            assert file.open(path, torch.device("cuda"))["a"].equal(A + i)
    file.close()
    assert len(tried) == 1 and len(said) == 1 and "slower: registering shared memory: CUDA error 801" in said[0]


def resident_bytes(path):
    """Return how many bytes of the file under ``path`` are resident in this process."""
    name, found, is_it = os.readlink(path), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_it = line.endswith(name)
        elif is_it and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_a_worker_reads_its_share_of_it_and_no_more():
    file, whole = MappedFile(), torch.zeros(4 << 20, dtype=torch.uint8)
    sent, path = shared_file.create()  # the sender does not map the file, so only the worker's reads count as resident
    with sent:
        sent.write(save({str(i): whole.clone() for i in range(4)}))
        tensors = file.open(path, CPU)
        assert resident_bytes(path) < 1 << 20
        share = {name: tensor[: 1 << 20].clone() for name, tensor in tensors.items()}
        assert 4 << 20 <= resident_bytes(path) < 6 << 20, "a quarter of 16 MiB, and what the kernel maps around it"
        assert sum(tensor.nbytes for tensor in share.values()) == 4 << 20
