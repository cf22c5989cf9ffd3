"""Provide a fake GPU driver that records the launches it is asked for, with tensors on a CPU."""

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from qerl_kernels import adapter, counters, driver, gemm, linear_tiles, rule

POINTERS = ("tiles", "row_scale", "bias", "y", "partials", "counters", "s", "b", "spans")  # arguments of the product
SIZES = {"nvfp4_gemm": "128s9Q60s", "adapter_shrink": "3Q4i", "nvfp4_dequantize": "2Q5i", "fill": "i"}


class Launched(NamedTuple):
    """Record what cuLaunchKernelEx was given.

    ``code`` is what the kernel was compiled from; ``attributes`` are keyed by their id.
    """

    kernel: str
    code: str
    grid: tuple[int, ...]
    threads: int
    shared_memory: int
    stream: int
    attributes: dict[int, tuple[int, ...]]
    arguments: tuple

    @property
    def pointers(self) -> dict[str, int]:
        """Return a product's pointers by name."""
        return dict(zip(POINTERS, self.arguments[1:10], strict=True))

    @property
    def problem(self) -> gemm._Problem:
        """Return a product's problem."""
        return gemm._Problem.from_buffer_copy(self.arguments[10])

    @property
    def map(self) -> tuple[int, ...]:
        """Return what a product's description of x was made of; see ``cuTensorMapEncodeTiled`` below."""
        return struct.unpack_from("12Q", self.arguments[0])


class RecordingDriver:
    """Record driver calls.

    ``context`` is the thread's (torch's is 7), ``fails`` names the call that fails, and ``calls`` holds pairs of name
    and context.
    """

    def __init__(self) -> None:
        self.context, self.fails, self.stream, self.capturing = 7, None, 0, False
        self.calls, self.launched, self._codes, self._names = [], [], [], {}

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, self.context))
            if name == self.fails:
                return 209
            getattr(type(self), f"_{name}", lambda *_: None)(self, *arguments)
            return 0

        return call

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 7

    def _cuCtxGetCurrent(self, context):
        context._obj.value = self.context

    def _cuCtxSetCurrent(self, context):
        self.context = context.value

    def _cuModuleLoadData(self, module, code):
        self._codes.append(code.decode())
        module._obj.value = len(self._codes)

    def _cuModuleGetFunction(self, function, module, name):
        self._names[module.value], function._obj.value = name.decode(), module.value

    def _cuOccupancyMaxActiveClusters(self, count, function, launch):
        count._obj.value = 132 // launch._obj.attributes[0].value[0]

    def _cuTensorMapEncodeTiled(self, at, kind, rank, data, sizes, strides, box, steps, *modes):
        assert at.value % 64 == 0, "the copy engine reads it from there"
        numbers = (data.value, kind, rank, *sizes, *strides, *box, *steps, int("".join(map(str, modes))))
        ctypes.memmove(at.value, struct.pack(f"{len(numbers)}Q", *numbers), 8 * len(numbers))

    def _cuLaunchKernelEx(self, launch, function, arguments, extra):
        one, name = launch._obj, self._names[function.value]
        grid, attributes = (one.grid_x, one.grid_y, one.grid_z), one.attributes[: one.count]
        fields = _fields(SIZES[name])
        assert len(arguments) == len(fields) and extra is None and (one.block_y, one.block_z) == (1, 1)
        values = tuple(
            struct.unpack(field, ctypes.string_at(at, struct.calcsize(field)))[0]
            for at, field in zip(arguments, fields, strict=True)
        )
        found = {attribute.id: tuple(attribute.value)[:3] for attribute in attributes}
        code, stream = self._codes[function.value - 1], one.stream or 0
        self.launched.append(Launched(name, code, grid, one.block_x, one.shared, stream, found, values))


def _fields(sizes: str) -> list[str]:
    """Split a struct format into one field per argument: "3Q4i" gives Q, Q, Q, i, i, i, i, and "9s" stays one field."""
    found, number = [], ""
    for letter in sizes:
        if letter.isdigit():
            number += letter
            continue
        found += [f"{number}s"] if letter == "s" else [letter] * int(number or 1)
        number = ""
    return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingDriver]:
    """Fake the Hopper GPU of 132 multiprocessors that the rule was fitted on; it computes nothing."""
    recording, here = RecordingDriver(), rule.rule().machine
    for name in ("_driver", "_quick"):
        monkeypatch.setattr(driver, name, lambda: recording)
    for module in (gemm, adapter):
        monkeypatch.setattr(module, "compile_source", lambda source, defines: repr(dict(defines)).encode())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: recording.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording.capturing)
    monkeypatch.setattr(linear_tiles, "supported", lambda device: True)
    monkeypatch.setattr(linear_tiles, "machine", lambda device, operand: here)
    kept = (
        *(gemm._kernel, gemm._dequantize_kernel, gemm.machine_code, gemm.dequantize_code, gemm.plan),
        *(adapter._kernel, adapter.shrink_code, linear_tiles._planned, counters._of_stream),
    )
    for function in kept:
        function.cache_clear()
    yield recording
    for function in kept:
        function.cache_clear()
