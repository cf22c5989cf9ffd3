"""Test tensors from GPU to GPU: the description, what is refused, and which bytes are copied. Memory of this process
plays the GPU; tests/gpu/test_ipc.py has real ones."""

import ctypes
import errno
import json
import os
from contextlib import contextmanager

import pytest
import torch

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.policy import Policy
from qerl_vllm_plugin.wire import body, cuda_ipc, gpu_memory, shared_file, spans
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.wire.sender import Sender
from qerl_vllm_plugin.wire.shared_segment import NoRoomError
from qerl_vllm_plugin.worker.received import received

CPU = torch.device("cpu")
GPU = "5d1c0b2e-0000-4444-8888-0123456789ab"
A = torch.arange(24.0).reshape(4, 6)
TENSORS = {
    "half": A.bfloat16(),
    "plain": A,
    "the_same_memory": A,
    "a_view": A.t(),
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "no_columns": torch.empty(3, 0),
    "double": A.double() / 3,
}


class FakeGpu:
    """Hold memory of this process under handles, and record what was copied out of it."""

    def __init__(self):
        self.memory: dict[bytes, torch.Tensor] = {}
        self.copied: list[cuda_ipc.Copy] = []

    @contextmanager
    def exported(self, size, device):
        handle = len(self.memory).to_bytes(64, "little")
        self.memory[handle] = torch.full((size,), 0xFF, dtype=torch.uint8)
        yield self.memory[handle], handle
        del self.memory[handle]

    @contextmanager
    def opened(self, handle, size, device):
        if handle not in self.memory:
            raise CudaIPCError("mapping GPU memory of another process (does it still run?): CUDA error 1")
        if len(self.memory[handle]) < size:
            raise CudaIPCError(f"{size} bytes of GPU memory were announced, and there are less")
        yield self.memory[handle].data_ptr()

    def copy(self, copies, device):
        for one in copies:
            self.copied.append(one)
            ctypes.memmove(one.target, one.source, one.size)


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    for name in ("exported", "opened", "copy"):
        monkeypatch.setattr(cuda_ipc, name, getattr(fake, name))
    monkeypatch.setattr(cuda_ipc, "finish", lambda device: None)
    monkeypatch.setattr(cuda_ipc, "uuid", lambda device: GPU)
    monkeypatch.setattr(cuda_ipc, "check_reachable", lambda name, device: None)
    monkeypatch.setattr(gpu_memory, "why_not", lambda tensors: None)
    return fake


def test_a_worker_copies_the_bits_in_one_piece(gpu):
    with gpu_memory.described(TENSORS) as (text, _), gpu_memory.mapped(text, CPU) as found:
        assert found.tensors.keys() == TENSORS.keys()
        assert all(tensor.is_meta for tensor in found.tensors.values())
        fetched = dict(zip(found.tensors, found.fetch(list(found.tensors.values()), CPU).tensors(), strict=True))
    for name, tensor in TENSORS.items():
        assert fetched[name].dtype == tensor.dtype and torch.equal(fetched[name], tensor)
    assert len(gpu.copied) == 1
    assert gpu.memory == {}


def test_neighbours_are_copied_together(gpu, monkeypatch):
    monkeypatch.setattr(spans, "GAP", 0)
    with gpu_memory.described(TENSORS) as (text, _), gpu_memory.mapped(text, CPU) as found:
        names = [name for name in found.tensors if name not in ("plain", "double")]
        fetched = found.fetch([found.tensors[name] for name in names], CPU).tensors()
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in zip(names, fetched, strict=True))
    assert len(gpu.copied) == 1, "of whatever types they are"


def test_a_worker_copies_its_share_and_no_more(gpu, monkeypatch):
    monkeypatch.setattr(spans, "GAP", 0)
    with gpu_memory.described(TENSORS) as (text, _), gpu_memory.mapped(text, CPU) as found:
        given = found.tensors
        pieces = [given["plain"][:, 2:4], given["double"][1:3], given["a_view"][5:], given["half"][:, :1]]
        fetched = found.fetch(pieces, CPU).tensors()
    for piece, wanted in zip(fetched, (A[:, 2:4], A.double()[1:3] / 3, A.t()[5:], A.bfloat16()[:, :1]), strict=True):
        assert torch.equal(piece, wanted)
    # columns come with the values between their first and their last
    between = 2 * (6 - 2) * 4 * 1 + (6 - 2) * 4 + 3 * (6 - 1) * 2
    assert sum(one.size for one in gpu.copied) <= sum(piece.nbytes for piece in fetched) + between + 16 * 4


def test_norms_in_gpu_memory_are_read_and_an_adapter_later(gpu):
    half, norm = "base_model.model.a.lora_A.weight", torch.arange(4.0) + 7
    with gpu_memory.described({half: A, "model.norm.weight": norm}) as (text, _):
        with received(text, text, CPU, None) as (adapter, norms, fetch):
            assert list(adapter) == [half] and adapter[half].is_meta and list(norms) == ["model.norm.weight"]
            assert torch.equal(norms["model.norm.weight"], norm)
            assert torch.equal(fetch([adapter[half]], CPU).tensors()[0], A)
        with received(text, None, CPU, None) as (adapter, norms, _):
            assert len(adapter) == 2 and norms is None, "an adapter with a tensor too much is for others to refuse"
        with received(None, text, CPU, None) as (adapter, norms, _):
            assert adapter is None and torch.equal(norms[half], A) and torch.equal(norms["model.norm.weight"], norm)
        with gpu_memory.described({"model.norm.weight": norm}) as (other, _):
            with received(text, other, CPU, None) as (adapter, norms, fetch):
                assert len(adapter) == 2 and torch.equal(fetch([adapter[half]], CPU).tensors()[0], A)
                assert torch.equal(norms["model.norm.weight"], norm) and len(norms) == 1


def test_a_description_is_sent_whole_or_not_at_all(gpu, monkeypatch):
    with body.describing(TENSORS, {"r": 8}) as sent, shared_file.open_ticket(json.loads(sent)["file"]) as file:
        assert json.loads(file.read())["adapter_config"] == {"r": 8}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoomError, match="is full: No space left"), body.describing(TENSORS, {"r": 8}):
        pass


def spoiled(**changes):
    """Return a good description with these keys changed."""
    good = {"gpu": GPU, "handle": "00" * 64, "bytes": 96, "tensors": [["a", "F32", [4, 6]]]}
    given = {**good, **changes}
    return json.dumps({**given, "tensors": json.dumps(given["tensors"])})


HOSTILE = {
    "no_json": "{",
    "deep": '{"gpu":' * 100_000,
    "no_text": 7,
    "a_list": "[]",
    "cut_handle": spoiled(handle="00" * 63),
    "no_handle": spoiled(handle=None),
    "words_for_a_handle": spoiled(handle="zz" * 64),
    "too_small": spoiled(bytes=95),
    "tensors_a_word": spoiled(tensors="a"),
    "negative": spoiled(tensors=[["a", "F32", [-4, -6]]]),
    "fraction": spoiled(tensors=[["a", "F32", [4.0, 6]]]),
    "beyond_words": spoiled(tensors=[["a", "F32", [1 << 70]]]),
    "beyond_memory": spoiled(tensors=[["a", "F32", [1 << 39] * 4]]),
    "no_dtype": spoiled(tensors=[["a", "complex64", [4, 6]]]),
    "dtype_a_list": spoiled(tensors=[["a", [], [4, 6]]]),
    "tensors_that_are_no_json": spoiled().replace("]]]", "]]"),
    "tensors_that_are_no_text": json.dumps({**json.loads(spoiled()), "tensors": []}),
    "holes": spoiled(bytes=6, tensors=[["a", "BF16", [1]], ["b", "F32", [1]]]),
    "short_entry": spoiled(tensors=[["a", "F32"]]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_description_that_is_none_is_refused(case):
    with pytest.raises(ValueError, match=r"describes no tensors|in a description of tensors"):
        gpu_memory.parse(HOSTILE[case])
    gpu_memory.parse(spoiled())


def test_only_tensors_of_one_gpu_go_this_way():
    assert "lie on cpu" in gpu_memory.why_not(TENSORS)
    assert "no device" in gpu_memory.why_not({})
    with pytest.raises(CudaIPCError, match=f"lie on GPU {GPU}, and this worker computes on a cpu"):
        cuda_ipc.check_reachable(GPU, CPU)


def test_a_gpu_that_is_not_seen_or_not_reached_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "visible", lambda: ["first", GPU])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: False)
    cuda_ipc.check_reachable(GPU, torch.device("cuda", 1))
    with pytest.raises(CudaIPCError, match="GPU 0 cannot read the memory of GPU 1"):
        cuda_ipc.check_reachable(GPU, torch.device("cuda", 0))
    with pytest.raises(CudaIPCError, match="GPU another, which this process does not see"):
        cuda_ipc.check_reachable("another", torch.device("cuda", 0))


@pytest.fixture
def policy(policy):
    """Return a policy that treats this process's worker as one of another process."""
    policy._sender.is_here = False
    return policy


NORMS = {"model.norm.weight": torch.linspace(0.5, 1.5, 64)}


def test_a_swap_through_gpu_memory_is_bit_equal(gpu, policy, engine, hf, make_adapter):
    tensors, config, _ = make_adapter(hf)
    inside = Policy(engine)
    inside.swap(tensors, config, norms=NORMS)
    expected = inside.state(digest=True)
    policy.swap(None)
    assert policy.state(digest=True).adapter != expected.adapter
    version = policy.swap(tensors, config, norms=NORMS)
    state = policy.state(digest=True)
    assert (state.version, state.adapter, state.norms) == (version, expected.adapter, expected.norms)
    assert gpu.copied and gpu.memory == {}
    policy.swap(None, norms=NORMS)
    assert policy.state(digest=True).norms == expected.norms
    with pytest.raises(AdapterError, match="NaN"):
        policy.swap({name: tensor * float("nan") for name, tensor in tensors.items()}, config)
    with pytest.raises(AdapterError, match=r"norm\.weight is a tensor of the adapter and a trained norm"):
        policy.swap({**tensors, **NORMS}, config, norms=NORMS)
    assert policy.state(digest=True).version == version + 1


@pytest.mark.parametrize("why", ["gone", "small", "foreign"])
def test_a_shared_file_takes_over_from_unreadable_memory(gpu, policy, engine, hf, make_adapter, monkeypatch, why):
    tensors, config, _ = make_adapter(hf)
    before, sent = policy.state(digest=True), []

    def unreachable(*_):
        raise CudaIPCError(f"GPU memory is {why}")

    if why == "gone":
        monkeypatch.setattr(gpu, "opened", unreachable)
        monkeypatch.setattr(cuda_ipc, "opened", unreachable)
    elif why == "small":
        opened = gpu.opened
        monkeypatch.setattr(cuda_ipc, "opened", lambda handle, size, device: opened(handle, size + 1, device))
    else:
        monkeypatch.setattr(cuda_ipc, "check_reachable", unreachable)
    with gpu_memory.described(tensors) as (text, _):
        (answer,) = engine.collective_rpc("qerl_swap", args=(text, config, None))
    assert answer["unreachable"] and "GPU memory" in answer["error"]
    assert policy.state(digest=True) == before

    rpc = policy._rpc
    monkeypatch.setattr(policy, "_rpc", lambda method, *args, **keywords: sent.append(args) or rpc(method, *args))
    warned = []
    monkeypatch.setattr(policy._sender.ways, "_warn", warned.append)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    policy.swap(tensors, config)
    policy.swap(tensors, config)
    assert [args[0][:6] for args in sent] == ['{"gpu"', "/proc/", "/proc/"], "it is tried once, not with every swap"
    assert len(warned) == 1 and "GPU memory" in warned[0]

    strict = Policy(engine)
    strict._sender.is_here, strict._sender.ways.transport = False, "ipc"
    with pytest.raises(AdapterError, match=r"transport is 'ipc', and .*GPU memory"):
        strict.swap(tensors, config)


def test_an_engine_in_this_process_has_no_transport(engine):
    with pytest.raises(ValueError, match="transport is 'pickle'; it is one of auto, ipc, shared"):
        Policy(engine, transport="pickle")
    with pytest.raises(ValueError, match="workers are in this process; leave it out"):
        Policy(engine, transport="ipc")
    with pytest.raises(ValueError, match="workers are on other machines, or Ray's; leave it out"):
        Sender("shared", is_here=False, is_near=False, refusal=AdapterError, warn=print)
