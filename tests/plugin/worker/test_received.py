"""Test what a worker accepts as an adapter and as norms, in every form in which they may arrive."""

import contextlib

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file

from qerl_vllm_plugin.wire import shared_file
from qerl_vllm_plugin.wire.receiver import MappedFile
from qerl_vllm_plugin.worker.received import received

CPU = torch.device("cpu")
A, NORM = "base_model.model.a.lora_A.weight", "model.norm.weight"
BOTH = {A: torch.arange(6.0).reshape(2, 3), NORM: torch.arange(4.0)}
OTHERS = {"model.layers.0.input_layernorm.weight": torch.ones(4)}


def given(tensors, norms=None, device=CPU, file=None):
    with received(tensors, norms, device, file or MappedFile()) as (adapter, trained, fetch):
        return [None if part is None else {n: t.clone() for n, t in part.items()} for part in (adapter, trained)], fetch


def alike(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(params=["mapping", "bytes", "bytearray", "memoryview", "path", "shared file"])
def sent(request, tmp_path):
    """sent(tensors) returns them in one of the forms in which a worker receives tensors."""
    opened = []

    def send(tensors):
        if request.param == "mapping":
            return tensors
        if request.param == "path":
            save_file(tensors, tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors")
            return str(max(tmp_path.iterdir(), key=lambda file: int(file.stem)))
        if request.param == "shared file":
            file, path = shared_file.create()
            opened.append(file)
            file.write(save(tensors))
            return path
        return {"bytes": bytes, "bytearray": bytearray, "memoryview": memoryview}[request.param](save(tensors))

    yield send
    for file in opened:
        file.close()


def test_one_alone_is_what_it_is_whole(sent):
    """An adapter with a surplus tensor passes here; other code refuses it."""
    (adapter, norms), fetch = given(sent(BOTH))
    assert alike(adapter, BOTH) and norms is None and fetch is None
    (adapter, norms), fetch = given(None, sent(OTHERS))
    assert adapter is None and alike(norms, OTHERS) and fetch is None


def test_a_part_of_an_adapter_is_no_norm_however_it_is_named():
    both = {"model.a.lora_A.weight": torch.ones(2, 3), NORM: torch.ones(4)}  # as without PEFT's prefix
    (adapter, norms), _ = given(both, both)
    assert [*adapter] == ["model.a.lora_A.weight"] and [*norms] == [NORM]


def test_norms_are_split_off_an_adapter(sent):
    both = sent(BOTH)
    (adapter, norms), _ = given(both, both)
    assert alike(adapter, {A: BOTH[A]}) and alike(norms, {NORM: BOTH[NORM]})


def test_two_are_taken_as_they_are(sent):
    (adapter, norms), _ = given(sent(BOTH), sent(OTHERS))
    assert alike(adapter, BOTH) and alike(norms, OTHERS)


def test_norms_in_another_shared_file_leave_the_adapters_readable():
    with contextlib.ExitStack() as stack:
        paths, held = [], MappedFile()
        for tensors in (BOTH, OTHERS):
            file, path = shared_file.create()
            stack.enter_context(file)
            file.write(save(tensors))
            paths.append(path)
        adapter, norms, _ = stack.enter_context(received(*paths, CPU, held))
        (copied,) = held.fetch([adapter[A]], CPU).tensors()
        assert torch.equal(copied, BOTH[A]) and alike(norms, OTHERS)


def test_nothing_is_no_adapter_and_no_norms():
    assert given(None) == ([None, None], None)


def test_the_same_bytes_sent_twice_are_one():
    (adapter, norms), _ = given(save(BOTH), save(BOTH))
    assert alike(adapter, {A: BOTH[A]}) and alike(norms, {NORM: BOTH[NORM]})


@pytest.mark.parametrize("what", [b"no safetensors", "no-such-file.safetensors"])
def test_what_is_no_file_is_refused(what):
    with pytest.raises((SafetensorError, FileNotFoundError)):
        given(what)


@pytest.mark.parametrize(
    ("device", "is_whole", "is_read_later"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_a_mapped_file_is_copied_to_a_gpu_as_needed(device, is_whole, is_read_later):
    class File:
        fetch = "what copies rows and columns"

        def open(self, path, device):
            return BOTH

    File.is_whole = is_whole
    (adapter, norms), fetch = given("/proc/1/fd/2", "/proc/1/fd/2", torch.device(device), File())
    assert alike(adapter, {A: BOTH[A]}) and alike(norms, {NORM: BOTH[NORM]})
    assert fetch == (File.fetch if is_read_later else None)
    assert given(BOTH, None, torch.device(device), File())[1] is None, "of tensors that are there"
