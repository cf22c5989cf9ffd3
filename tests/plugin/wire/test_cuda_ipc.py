"""Test the calls to the CUDA driver for memory that processes share. The driver is a fake that records them;
tests/gpu/test_ipc.py has a real one."""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from qerl_vllm_plugin.wire import cuda_ipc
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError

GPU = torch.device("cuda", 1)
MIB = 1 << 20
START = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"]
END = ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


def plain(given):
    """Return the value of an argument given to ctypes."""
    given = getattr(given, "_obj", given)
    return given if isinstance(given, int) else getattr(given, "value", given)


class Driver:
    """A fake driver whose functions succeed, except those in ``codes``, {name: [code of each call]}. ``calls`` records
    (name, values).

    ``fills`` says what a call writes into its arguments by reference, {name: [values]}.
    """

    def __init__(self) -> None:
        self.calls, self.codes = [], {}
        self.fills = {"cuMemAlloc_v2": [4096], "cuDeviceGet": [5], "cuDevicePrimaryCtxRetain": [66]}
        self.fills |= {"cuIpcOpenMemHandle_v2": [9000], "cuMemGetAddressRange_v2": [8000, 3000]}

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*given):
            if name == "cuGetErrorString":
                given[1]._obj.value = b"a reason"
                return 0
            code = self.codes[name].pop(0) if self.codes.get(name) else 0
            if code == 0:
                for reference, value in zip(given, self.fills.get(name, []), strict=False):
                    reference._obj.value = value
                if name == "cuIpcGetMemHandle":
                    given[0]._obj.content[:] = bytes(range(64))
            self.calls.append((name, [plain(value) for value in given]))
            return code

        return call

    def names(self):
        return [name for name, _ in self.calls]

    def values(self, name):
        return [values for called, values in self.calls if called == name]

    def is_left(self):
        """Return whether every context that was entered has been left and released."""
        entered, left = (self.names().count(f"cuCtx{what}Current_v2") for what in ("Push", "Pop"))
        taken, given = (self.names().count(f"cuDevicePrimaryCtx{what}") for what in ("Retain", "Release_v2"))
        return entered == left == taken == given > 0


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.calls.append(("empty_cache", [])))
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: (memory.__cuda_array_interface__, device))
    return made


@pytest.mark.parametrize(("size", "asked"), [(1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)])
def test_sent_memory_has_its_own_pages_and_is_freed(size, asked, driver):
    with pytest.raises(KeyError), cuda_ipc.exported(size, GPU) as ((memory, device), handle):
        assert memory["data"] == (4096, False) and memory["shape"] == (size,) and memory["typestr"] == "|u1"
        assert device == GPU and handle == bytes(range(64))
        assert driver.values("cuMemAlloc_v2") == [[4096, asked]]
        assert driver.values("cuIpcGetMemHandle")[0][1] == 4096
        assert "cuMemFree_v2" not in driver.names()
        raise KeyError("what becomes of the block is no matter")
    assert driver.values("cuMemFree_v2") == [[4096]] and driver.is_left()
    assert driver.names()[-len(END) - 1 :] == ["cuMemFree_v2", *END], "in the device's context"


def test_without_room_what_torch_has_freed_is_given_back_first(driver):
    driver.codes["cuMemAlloc_v2"] = [2]
    with cuda_ipc.exported(3 * MIB, GPU):
        names = driver.names()
        first = names.index("cuMemAlloc_v2")
        expected = ["cuMemAlloc_v2", *END, "empty_cache", *START, "cuMemAlloc_v2"]
        assert names[first : first + len(expected)] == expected


@pytest.mark.parametrize(
    ("function", "codes", "said", "is_retried", "is_freed"),
    [
        ("cuMemAlloc_v2", [2, 2], "3.1 MB of GPU memory for what is sent: CUDA error 2 (a reason)", True, False),
        ("cuMemAlloc_v2", [700], "3.1 MB of GPU memory for what is sent: CUDA error 700 (a reason)", False, False),
        ("cuIpcGetMemHandle", [801], "a handle of GPU memory: CUDA error 801 (a reason)", False, True),
    ],
)
def test_memory_that_cannot_be_sent_is_given_back(function, codes, said, is_retried, is_freed, driver):
    driver.codes[function] = codes
    with pytest.raises(CudaIPCError) as refused, cuda_ipc.exported(3 * MIB, GPU):
        raise AssertionError("nothing is sent")
    assert str(refused.value) == said and driver.is_left()
    assert ("empty_cache" in driver.names()) == is_retried
    assert driver.values("cuMemFree_v2") == [[4096]] * is_freed


def test_memory_of_another_process_is_mapped_for_the_block(driver):
    handle = bytes(range(100, 164))
    with pytest.raises(KeyError), cuda_ipc.opened(handle, 2000, GPU) as address:
        assert address == 9000
        ((_, given, flags),) = driver.values("cuIpcOpenMemHandle_v2")
        assert bytes(given.content) == handle and flags == 1, "peers are reached when they are first read"
        assert driver.values("cuMemGetAddressRange_v2") == [[8000, 3000, 9000]]
        assert "cuIpcCloseMemHandle" not in driver.names()
        raise KeyError
    assert driver.values("cuIpcCloseMemHandle") == [[9000]] and driver.is_left()
    entered = driver.names()[: len(START)]
    assert entered == START and driver.values("cuDeviceGet")[0] == [5, 1], "the context is that of the device"
    assert driver.values("cuDevicePrimaryCtxRetain")[0] == [66, 5]
    assert driver.values("cuCtxPushCurrent_v2")[0] == [66] and driver.values("cuDevicePrimaryCtxRelease_v2")[0] == [5]


CALLS = ("cuCtxPushCurrent_v2", "cuDevicePrimaryCtxRetain", "cuIpcOpenMemHandle_v2")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("cuIpcOpenMemHandle_v2", "mapping GPU memory of another process (does it still run?)"),
        ("cuMemGetAddressRange_v2", "the size of another process's GPU memory"),
        ("cuInit", "starting the driver"),
        ("cuDeviceGet", "finding GPU 1"),
        ("cuDevicePrimaryCtxRetain", "the context of GPU 1"),
        ("cuCtxPushCurrent_v2", "entering the context of GPU 1"),
        # the allocation ends at 8000 + 3000, 2000 bytes after 9000
        (None, "2001 bytes of GPU memory were announced, and there are 2000"),
    ],
)
def test_a_refusal_of_the_driver_is_named_and_undone(function, said, driver):
    driver.codes[function] = [7]
    with pytest.raises(CudaIPCError) as refused, cuda_ipc.opened(bytes(64), 2001, GPU):
        raise AssertionError("nothing is read")
    assert str(refused.value) == (f"{said}: CUDA error 7 (a reason)" if function else said)
    names = driver.names()
    undone = ("cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2", "cuIpcCloseMemHandle")
    for call, undo in zip(CALLS, undone, strict=True):
        assert names.count(undo) == names.count(call) - (function == call)


def test_copies_run_on_torchs_stream_and_are_waited_for(driver, monkeypatch):
    stream = SimpleNamespace(cuda_stream=77, synchronize=lambda: driver.calls.append(("synchronize", [])))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    cuda_ipc.copy([cuda_ipc.Copy(target=1, source=2, size=3), cuda_ipc.Copy(4, 5, 6)], GPU)
    assert driver.values("cuMemcpyDtoDAsync_v2") == [[1, 2, 3, 77], [4, 5, 6, 77]]
    assert driver.names()[-3:] == ["synchronize", *END]
    driver.calls.clear()
    cuda_ipc.finish(GPU)
    assert driver.names() == ["synchronize"]
    driver.codes["cuMemcpyDtoDAsync_v2"] = [1]
    with pytest.raises(CudaIPCError, match="copying from another process's GPU memory: CUDA error 1"):
        cuda_ipc.copy([cuda_ipc.Copy(1, 2, 3)], GPU)


def test_pages_are_made_known_whole_and_to_every_context(driver):
    memory = torch.zeros(3, 5)
    cuda_ipc.register(memory, GPU)
    cuda_ipc.unregister(memory, GPU)
    assert driver.values("cuMemHostRegister_v2") == [[memory.data_ptr(), 60, 1]]
    assert driver.values("cuMemHostUnregister") == [[memory.data_ptr()]] and driver.is_left()
    for function, call in (("cuMemHostRegister_v2", cuda_ipc.register), ("cuMemHostUnregister", cuda_ipc.unregister)):
        driver.codes[function] = [712]
        with pytest.raises(CudaIPCError, match="shared memory: CUDA error 712"):
            call(memory, GPU)


def test_gpus_have_one_name_in_every_process(monkeypatch):
    names = ["first", "second"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=names[device.index]))
    assert cuda_ipc.visible() == names and cuda_ipc.uuid(GPU) == "second"


def test_a_machine_without_a_driver_says_so(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    cuda_ipc._driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(CudaIPCError, match=r"there is no NVIDIA driver here: libcuda\.so\.1: cannot open"):
        cuda_ipc.register(torch.zeros(1), GPU)
    assert cuda_ipc._driver.cache_info().currsize == 0
