"""Test the kernels on a Hopper GPU: every variant of the rule passes the gate; operators, graphs and formats agree bit
for bit.
"""

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "bench"))


def weight(N, K):
    from qerl_kernels import nvfp4_triton

    packed = nvfp4_triton.quantize(torch.randn(N, K, device="cuda", dtype=torch.bfloat16))
    row_scale = (1 / packed.divisor) * (1 + torch.rand(N, device="cuda"))
    return packed, row_scale, tiles_of(packed, row_scale)


def tiles_of(packed, row_scale):
    from qerl_kernels import tiles

    return tiles.tile_weight(packed.codes, packed.block_scales, row_scale)


def test_every_variant_of_the_rule_passes_the_gate():
    import tune
    from qerl_kernels import rule

    variants = list(rule.rule().variants)
    passed, refused = tune.gate_in_processes(variants, 8)
    assert set(passed) == set(variants), refused


@pytest.mark.parametrize("operand", [torch.bfloat16, torch.float16], ids=str)
def test_every_variant_is_proven_and_a_later_start_reads_the_verdicts(operand, monkeypatch):
    from qerl_kernels import linear_tiles, proof, rule

    assert linear_tiles.machine(0, operand).refused == frozenset()
    assert proof.verdict_beside(0, operand) is None
    for function in (proof.verdict, proof.verdict_beside, linear_tiles.machine):
        function.cache_clear()
    for name in ("examine", "examine_beside"):
        monkeypatch.setattr(proof, name, lambda *_: pytest.fail("the verdict was not kept"))
    began = time.perf_counter()
    assert linear_tiles.machine(0, operand).refused == frozenset()
    assert proof.verdict_beside(0, operand) is None
    assert time.perf_counter() - began < 2
    monkeypatch.undo()
    began = time.perf_counter()
    for configuration in rule.rule().variants:
        assert proof.examine(configuration, proof.problem(0, operand)) is None
    assert proof.examine_beside(proof.problem(0, operand)) is None
    print(f"{len(rule.rule().variants)} variants examined in {time.perf_counter() - began:.2f} s")


@pytest.mark.parametrize("shape", [(640, 1536), (3072, 384), (5120, 3200), (4864, 896)], ids=str)
def test_layers_where_the_choice_changes(shape):
    import gate

    gate.check_layer(*shape)


@pytest.mark.parametrize("shape", [(1, 16, 8), (9, 208, 16), (40, 3584, 96), (333, 18944, 32), (600, 896, 48)], ids=str)
def test_the_adapters_first_product(shape):
    import gate

    gate.check_shrink(*shape)


def test_every_launch_of_the_small_kernel():
    import gate
    from qerl_kernels.adapter import VARIANTS, Shrink

    for variant in VARIANTS:
        for most in (1, 2, 7):
            gate.check_launch(Shrink(variant, most))
    gate.check_shrink(1500, 3584, 32, Shrink(VARIANTS[-1], 24))


def test_quantize_and_dequantize_give_the_bits_of_the_cpu():
    from qerl_kernels import nvfp4, nvfp4_triton

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        w = (torch.randn(515, 1040) * torch.rand(515, 1) ** 6).to(dtype)
        w[3, :32] = 0
        expected, actual = (
            nvfp4.quantize(w, torch.tensor(300.0)),
            nvfp4_triton.quantize(w.cuda(), torch.tensor(300.0).cuda()),
        )
        assert torch.equal(expected.codes, actual.codes.cpu())
        assert torch.equal(expected.block_scales.view(torch.uint8), actual.block_scales.view(torch.uint8).cpu())
        dense = nvfp4_triton.dequantize(actual.codes, actual.block_scales)
        assert torch.equal(nvfp4.dequantize(expected.codes, expected.block_scales), dense.cpu())


@pytest.mark.parametrize("M", [1, 9, 33, 70, 300, 600])
@pytest.mark.parametrize("shape", [(16, 16), (144, 208), (1040, 1360)], ids=str)
def test_linear_and_its_gradient_agree_with_fp64_at_any_shape(shape, M):
    from qerl_kernels import linear_tiles, nvfp4, rule

    N, K = shape
    packed, row_scale, tiled = weight(N, K)
    dense = nvfp4.dequantize(packed.codes, packed.block_scales).double() * row_scale.double()[:, None]
    bias = torch.randn(N, device="cuda")
    x = torch.randn(M, K, device="cuda").bfloat16().requires_grad_()
    y = linear_tiles.linear(x, tiled, bias)
    exact = x.double() @ dense.t() + bias.double()
    # Allow one rounding to 8 bits, since one large output may decide the norm of 16.
    assert (y.double() - exact).norm() < 2**-8 * exact.norm(), rule.choose(N, K, M)
    dy = torch.randn(M, N, device="cuda").bfloat16()
    y.backward(dy)
    exact = dy.double() @ dense
    assert (x.grad.double() - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.parametrize("model", ["0.5B", "1.5B", "3B", "7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B"])
def test_every_layer_of_a_model_agrees_with_fp64_at_many_batches(model):
    import gate
    from qerl_kernels import linear_tiles, nvfp4, rule
    from qerl_kernels.adapter import shrink

    from qerl_recipes.recipe.shapes import BY_MODEL_ID, BY_SIZE

    config = BY_SIZE.get(model) or BY_MODEL_ID[model]
    hidden, inner, heads = (config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim = config.get("head_dim", hidden // heads)
    q, kv = heads * head_dim, 2 * config["num_key_value_heads"] * head_dim
    sizes = [(q + kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
    for N, K in sizes:
        packed, row_scale, tiled = weight(N, K)
        dense = nvfp4.dequantize(packed.codes, packed.block_scales).double() * row_scale.double()[:, None]
        adapter = gate.two_parts(N, K, 32)
        for M in (7, 40, 129, 257, 300, 511, 600):
            x = torch.randn(M, K, device="cuda").bfloat16()
            exact = x.double() @ dense.t() + shrink(x, adapter.a).double() @ adapter.b.double().t()
            y = linear_tiles.linear(x, tiled, None, adapter)
            assert (y.double() - exact).norm() < 2.5e-3 * exact.norm(), rule.choose(N, K, M)
            assert torch.equal(y, linear_tiles.linear(x, tiled, None, adapter)), rule.choose(N, K, M)


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_many_tokens_agree_with_fp64(biased):
    from qerl_kernels import linear_tiles, nvfp4, tiles

    packed, _, _ = weight(1040, 1360)
    tiled = tiles.tile_weight(packed.codes, packed.block_scales, 1 / packed.divisor)
    dense = nvfp4.dequantize(packed.codes, packed.block_scales).double() / packed.divisor.double()
    bias = torch.randn(1040, device="cuda").bfloat16().float() if biased else None
    x = torch.randn(4096, 1360, device="cuda").bfloat16()
    exact = x.double() @ dense.t() + (bias.double() if biased else 0)
    assert (linear_tiles.linear(x, tiled, bias).double() - exact).norm() < 2.5e-3 * exact.norm()


def test_a_thread_that_has_not_called_cuda_can_launch():
    from qerl_kernels import gemm, nvfp4

    packed, _, tiled = weight(192, 256)
    gemm.dequantize(tiled)
    results = []
    thread = threading.Thread(target=lambda: results.append(gemm.dequantize(tiled)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], nvfp4.dequantize(packed.codes, packed.block_scales))


def test_variants_proven_while_a_model_loads_run_while_it_sleeps(monkeypatch):
    """Prove variants while an engine loads, then run them while it sleeps.

    Sleeping frees the weights' memory pool, and what a proof allocated there would go with it.
    """
    from qerl_kernels import compiler, counters, linear_tiles, nvfp4, proof
    from vllm.device_allocator.cumem import CuMemAllocator

    packed, row_scale, tiled = weight(1024, 2048)
    x, kept = torch.randn(48, 2048, device="cuda").bfloat16(), compiler.kept
    exact = x.double() @ (nvfp4.dequantize(packed.codes, packed.block_scales).double() * row_scale[:, None]).t()
    linear_tiles.prepare(1024, 2048, x.device)
    for function in (
        proof.verdict,
        proof.verdict_beside,
        linear_tiles.machine,
        linear_tiles.prepare,
        counters._of_stream,
    ):
        function.cache_clear()
    monkeypatch.setattr(compiler, "kept", lambda name: None if name.endswith(".verdict") else kept(name))
    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        linear_tiles.prepare(1024, 2048, x.device)
        again = tiles_of(packed, row_scale)
    allocator.sleep(offload_tags=("weights",))
    try:
        own = tiles_of(packed, row_scale)
        assert torch.equal(own.tiles, tiled.tiles)
        y = linear_tiles.linear(x, own)
        torch.cuda.synchronize()
    finally:
        allocator.wake_up()
    assert (y.double() - exact).norm() < 2.5e-3 * exact.norm()
    assert torch.equal(again.tiles, tiled.tiles)


def test_a_launch_leaves_the_context_that_it_found():
    """Launch under another library's CUDA context, in which torch's kernels could not be launched."""
    from qerl_kernels import driver, gemm, nvfp4

    packed, _, tiled = weight(192, 256)
    kernel, w = gemm._dequantize_kernel(0, torch.bfloat16), torch.zeros(192, 256, dtype=torch.bfloat16, device="cuda")
    pointers = [ctypes.c_void_p(tiled.tiles.data_ptr()), ctypes.c_void_p(w.data_ptr())]
    numbers = [ctypes.c_int(number) for number in (192, 256, tiled.tiles.shape[1], 0, 256)]
    torch.cuda.synchronize()
    cuda, before, another, after = driver._driver(), *(ctypes.c_void_p() for _ in range(3))
    cuda.cuCtxGetCurrent(ctypes.byref(before))
    assert cuda.cuCtxCreate_v2(ctypes.byref(another), 0, 0) == 0 and another.value != before.value
    try:
        kernel((tiled.tiles.shape[1] // 2, 3, 1), *pointers, *numbers)
        cuda.cuCtxGetCurrent(ctypes.byref(after))
    finally:
        cuda.cuCtxSetCurrent(before)
        cuda.cuCtxDestroy_v2(another)
    torch.cuda.synchronize()
    assert after.value == another.value
    assert torch.equal(w, nvfp4.dequantize(packed.codes, packed.block_scales))


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize("M", [1, 48, 256, 300, 640])
def test_a_cuda_graph_follows_its_input(M, adapted):
    import gate
    from qerl_kernels import linear_tiles

    _, _, tiled = weight(3584, 3584)
    adapter = gate.two_parts(3584, 3584, 32) if adapted else None
    x = torch.randn(M, 3584, device="cuda").bfloat16()
    linear_tiles.linear(x, tiled, None, adapter)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = linear_tiles.linear(x, tiled, None, adapter)
        second = linear_tiles.linear(first, tiled, None, adapter)  # reads what the kernel before it writes
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        if adapter is not None:  # swap the adapter in place
            adapter.a.copy_(torch.randn_like(adapter.a) / 60)
        graph.replay()
        torch.cuda.synchronize()
        expected = linear_tiles.linear(x, tiled, None, adapter)
        assert torch.equal(first, expected)
        assert torch.equal(second, linear_tiles.linear(expected, tiled, None, adapter))


ABORTED = """
import sys
sys.path.insert(0, sys.argv[1])
import gate, sanitize, torch
from qerl_kernels import counters, driver, gemm, tiles
source = gemm.source
gemm.source = lambda kernel: source(kernel).replace("PATIENCE = 60000000000ull", "PATIENCE = 200000000ull")
configuration, N, tokens = sanitize.KINDS["runs"]
weight = tiles.tile_weight(*gate.every_product(N, 1024, "cuda"), torch.ones((), device="cuda"))
x = torch.randn(tokens, 1024, device="cuda").bfloat16()
gemm.product(x, weight, configuration)
torch.cuda.synchronize()
# as a launch that was stopped in its midst would leave them
counters.counters_for(weight.counters, driver.current_stream(0)).fill_(7)
for what in ("stopped", "lost"):
    try:
        gemm.product(x, weight, configuration)
        torch.cuda.synchronize()
        print("went on", flush=True)
    except RuntimeError as error:
        print(what, str(error).splitlines()[0], flush=True)
"""


def test_a_launch_whose_sums_do_not_come_is_stopped_and_its_program_gets_no_numbers_any_more(tmp_path):
    """Stop a launch whose sums never come.

    Another program on the same GPU is not affected.
    """
    import sanitize

    line = [sys.executable, "-c", ABORTED, str(Path(__file__).parents[2] / "kernels" / "bench")]
    environment = {**os.environ, "QERL_CACHE": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=240)
    words = [line.split()[0] for line in done.stdout.splitlines()]
    assert words == ["stopped", "lost"], done.stdout + done.stderr
    assert "unspecified launch failure" in done.stdout
    sanitize.product("runs", torch.bfloat16, adapted=True)


def test_one_weight_on_two_streams_at_one_time_gives_the_bits_of_one_stream():
    from qerl_kernels import linear_tiles, rule

    _, _, tiled = weight(3584, 18944)
    inputs = [torch.randn(M, 18944, device="cuda").bfloat16() for M in (8, 64, 200)]
    for x in inputs:
        assert rule.choose(3584, 18944, len(x), 0, False).configuration is not None
    expected = [linear_tiles.linear(x, tiled) for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(linear_tiles.linear(x, tiled))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))
    assert not tiled.counters.any()
