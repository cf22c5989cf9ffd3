"""Test loading and launching kernels and describing matrices, with a driver that records what it is asked."""

import ctypes

import pytest
import torch
from qerl_kernels import compiler, driver


@pytest.mark.parametrize("callers", [None, 7, 9])
def test_a_launch_runs_in_torchs_context_and_leaves_the_caller_its_own(callers, recorded):
    recorded.context = callers
    kernel = driver.Kernel(b"code", "fill", 32, shared_memory=64 * 1024)
    kernel((1, 1, 1), ctypes.c_int(1))
    assert recorded.context == callers
    needs = {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx"}
    assert {name: context for name, context in recorded.calls if name in needs} == dict.fromkeys(needs, 7)


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_code_that_the_driver_refuses_is_a_compile_error_for_which_another_kernel_stands_in(call, recorded):
    recorded.context, recorded.fails = 9, call
    with pytest.raises(compiler.CompileError, match="CUDA error 209"):
        driver.Kernel(b"code", "fill", 32, shared_memory=64 * 1024)
    assert recorded.context == 9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("cuLaunchKernelEx", "launching fill: CUDA error 209"),
        ("cuCtxGetCurrent", "asking for the current context: CUDA error 209"),
        ("cuCtxSetCurrent", "making torch's context current: CUDA error 209"),
    ],
)
def test_a_launch_that_fails_says_at_what_and_leaves_the_caller_its_context(call, message, recorded):
    kernel = driver.Kernel(b"code", "fill", 32)
    recorded.context, recorded.fails = 9, call
    with pytest.raises(RuntimeError, match=message):
        kernel((1, 1, 1), ctypes.c_int(1))
    assert recorded.context == 9 and not recorded.launched


class Problem(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int), ("share", ctypes.c_double))


@pytest.mark.parametrize(("overlap", "cluster"), [(False, 1), (True, 1), (False, 4), (True, 4)])
def test_the_driver_gets_each_argument_the_sizes_and_what_the_launch_asks_for(overlap, cluster, recorded):
    """Read the arguments as cuLaunchKernelEx does: by CUDA's manual, kernelParams[i] points to the i-th argument."""
    found = []

    def launch_kernel(launch, function, places, extra):
        place = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))
        numbers = [
            ctypes.cast(place[i], ctypes.POINTER(kind))[0] for i, kind in enumerate((ctypes.c_uint64, ctypes.c_int))
        ]
        problem = ctypes.cast(place[2], ctypes.POINTER(Problem))[0]
        asked = launch._obj
        attributes = {asked.attributes[i].id: list(asked.attributes[i].value)[:3] for i in range(asked.count)}
        sizes = asked.grid_x, asked.grid_y, asked.grid_z, asked.block_x, asked.block_y, asked.block_z
        found.append((numbers, (problem.rows, problem.share), sizes, asked.shared, asked.stream, attributes, extra))
        return 0

    recorded.cuLaunchKernelEx, recorded.stream = launch_kernel, 2**40
    kernel = driver.Kernel(b"code", "fill", 96, shared_memory=1024, cluster=cluster)
    arguments = ctypes.c_uint64(2**47 + 5), ctypes.c_int(2**31 - 1), Problem(6, 0.5)
    kernel((8, 3, 2), *arguments, overlap=overlap)
    programmatic, dimension = 6, 4  # CUlaunchAttributeID: PROGRAMMATIC_STREAM_SERIALIZATION, CLUSTER_DIMENSION
    asked = ({programmatic: [1, 0, 0]} if overlap else {}) | ({dimension: [4, 1, 1]} if cluster == 4 else {})
    assert found == [([2**47 + 5, 2**31 - 1], (6, 0.5), (8, 3, 2, 96, 1, 1), 1024, 2**40, asked, None)]


def test_a_call_is_launched_with_what_its_memory_holds_then_on_the_stream_of_then(recorded):
    number = ctypes.c_int(5)
    kernel = driver.Kernel(b"code", "fill", 96, shared_memory=1024, cluster=4)
    call = driver.Call(kernel, (8, 2, 1), [ctypes.addressof(number)], overlap=True)
    alone = driver.Call(driver.Kernel(b"other", "fill", 32), (1, 1, 1), [ctypes.addressof(number)])
    driver.launch(3, call)
    number.value = 6
    driver.launch(0, call, alone)
    first, second, third = recorded.launched
    assert (first.grid, first.threads, first.shared_memory) == ((8, 2, 1), 96, 1024)
    # CUlaunchAttributeID 6 lets a kernel begin before the one ahead has ended; 4 is the cluster.
    assert first.attributes == {6: (1, 0, 0), 4: (4, 1, 1)} and third.attributes == {}
    assert [(one.arguments, one.stream, one.code) for one in recorded.launched] == [
        ((5,), 3, "code"),
        ((6,), 0, "code"),
        ((6,), 0, "other"),
    ]
    assert second.attributes == first.attributes


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, 6), (torch.bfloat16, 9)], ids=str)
def test_a_matrix_is_described_anew_for_each_place_where_it_lies(dtype, kind, recorded):
    described = driver.TensorMap(dtype, 20, 128, 64, 32)
    for data, stride in ((4096, 128), (8192, 144)):
        described.describe(data, stride)
        words = (ctypes.c_uint64 * 11).from_address(described.address)
        # The description has two dimensions, the inner one first, a row stride in bytes, and boxes of 32 columns and 64
        # rows in steps of 1. Its modes are: not interleaved, a swizzle of 128 bytes, 256 bytes into L2, zeros outside.
        assert list(words) == [data, kind, 2, 128, 20, 2 * stride, 32, 64, 1, 1, 330]
    recorded.fails = "cuTensorMapEncodeTiled"
    with pytest.raises(RuntimeError, match=r"a tensor map of \(20, 128\) with rows 144 apart: CUDA error 209"):
        described.describe(8192, 144)
