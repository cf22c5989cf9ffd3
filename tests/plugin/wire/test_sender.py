"""Test which transports tensors may take, in which order, and what is reported when one is closed."""

import pytest
import torch

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.wire import cuda_ipc, gpu_memory
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.wire.sender import Sender, UnreachableError, Ways
from qerl_vllm_plugin.wire.shared_segment import NoRoomError

TENSORS = {"a": torch.ones(3)}


@pytest.fixture
def ways(monkeypatch):
    """ways(transport) returns the transports for tensors on a GPU. Its ``said`` collects their warnings."""
    monkeypatch.setattr(gpu_memory, "why_not", lambda tensors: None)
    monkeypatch.setattr(cuda_ipc, "uuid", lambda device: "a-gpu")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))

    def make(transport="auto"):
        said = []
        made = Ways(transport, ("auto", "ipc", "shared", "http"), AdapterError, said.append)
        made.said = said
        return made

    return make


@pytest.mark.parametrize(
    ("transport", "found"), [("auto", ["ipc", "shared"]), ("ipc", ["ipc"]), ("shared", ["shared"]), ("http", [])]
)
def test_the_gpu_comes_first_then_shared_memory(ways, transport, found):
    made = ways(transport)
    assert list(made.open(TENSORS)) == found and made.said == []
    made.gpus = ["another"]
    if transport == "ipc":
        with pytest.raises(AdapterError, match=r"transport is 'ipc', and .* does not see GPU a-gpu.*; leave it out"):
            list(made.open(TENSORS))
    else:
        assert list(made.open(TENSORS)) == found[-1:]
        assert len(made.said) == (transport == "auto")


def test_a_receiver_on_another_machine_gets_messages(ways):
    made = ways()
    made.far = "it is on another machine"
    assert list(made.open(TENSORS)) == list(made.open(TENSORS)) == []
    assert made.said == ["adapters travel through the CPU, which is slower: it is on another machine"]
    strict = ways("shared")
    strict.far = made.far
    with pytest.raises(AdapterError, match="transport is 'shared', and it is on another machine"):
        list(strict.open(TENSORS))


@pytest.mark.parametrize(("way", "how"), [("ipc", "through the CPU"), ("shared", "in messages")])
def test_an_unreadable_way_is_closed_for_good_with_one_warning(ways, way, how):
    made = ways()
    for own in (CudaIPCError("no memory"), NoRoomError("full")):  # the sender's own errors, which may be temporary
        made.close(way, own)
        assert way in list(made.open(TENSORS))
    made.close(way, UnreachableError("it cannot be read"))
    assert way not in list(made.open(TENSORS))
    assert made.said == [f"adapters travel {how}, which is slower: no memory"]
    with pytest.raises(AdapterError, match=f"transport is '{way}', and it cannot be read"):
        ways(way).close(way, UnreachableError("it cannot be read"))


def test_tensors_of_a_cpu_are_sent_on_without_a_warning():
    said = []
    made = Ways("auto", ("auto",), AdapterError, said.append)
    assert list(made.open(TENSORS)) == ["shared"] and said == []


def test_what_cannot_be_shared_goes_in_the_message(monkeypatch):
    """Check workers on other machines, and full shared memory. Two names may share a tensor's memory."""
    from safetensors.torch import load

    given = {"a": TENSORS["a"], "b": TENSORS["a"]}
    for is_near in (False, True):
        said = []
        sender = Sender("auto", is_here=False, is_near=is_near, refusal=AdapterError, warn=said.append)
        monkeypatch.setattr("qerl_vllm_plugin.wire.shared_file.fits", lambda size: False)
        sent = sender.deliver(given, bytes)
        assert load(sent)["b"].equal(TENSORS["a"]) and len(said) == is_near
    with pytest.raises(ValueError, match="transport is 'gpu'; it is one of auto, ipc, shared"):
        Sender("gpu", is_here=False, is_near=True, refusal=AdapterError, warn=print)
