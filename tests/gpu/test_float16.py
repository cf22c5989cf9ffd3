"""Test float16 on a Hopper GPU: every variant is exact and as fast as bfloat16, and engine and trainer agree more
closely.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "bench"))

LAYERS = {"7B qkv": (4608, 3584), "7B o": (3584, 3584), "7B gate_up": (37888, 3584), "7B down": (3584, 18944)}
LAYERS |= {"32B down": (5120, 27648)}
PROMPTS = [[(13 * i + 7 * j) % 500 + 2 for j in range(60)] for i in range(4)]


def test_every_variant_of_the_rule_passes_the_gate():
    import tune
    from qerl_kernels import gemm, rule

    variants = list(rule.rule().variants)
    gemm.compile_all(variants, torch.float16)
    passed, refused = tune.gate_in_processes(variants, 8, "float16")
    assert set(passed) == set(variants), refused


def test_every_launch_of_the_adapters_small_kernel():
    import gate
    from qerl_kernels.adapter import VARIANTS, Shrink

    for variant in VARIANTS:
        for most in (1, 7):
            gate.check_launch(Shrink(variant, most), torch.float16)


@pytest.mark.parametrize("shape", [(640, 1536), (4864, 896)], ids=str)
def test_layers_where_the_choice_changes(shape):
    import gate

    gate.check_layer(*shape, tokens=(1, 8, 9, 255, 257, 513, 640, 2049), operand=torch.float16)


def test_the_gradient_agrees_with_fp64_and_another_type_is_refused():
    from qerl_kernels import linear_tiles, nvfp4, nvfp4_triton, tiles

    packed = nvfp4_triton.quantize(torch.randn(1040, 1360, device="cuda", dtype=torch.bfloat16))
    dense = nvfp4.dequantize(packed.codes, packed.block_scales).double() / packed.divisor.double()
    rows = (1 / packed.divisor) * (1 + torch.rand(1040, device="cuda"))
    for row_scale in (1 / packed.divisor, rows):
        tiled = tiles.tile_weight(packed.codes, packed.block_scales, row_scale, torch.float16)
        x = torch.randn(70, 1360, device="cuda").half().requires_grad_()
        dy = torch.randn(70, 1040, device="cuda").half()
        linear_tiles.linear(x, tiled).backward(dy)
        exact = (dy.double() * row_scale.double() * packed.divisor.double()) @ dense
        assert (x.grad.double() - exact).norm() < 1e-3 * exact.norm()
        with pytest.raises(ValueError, match=r"needs .* torch\.float16"):
            linear_tiles.linear(x.detach().bfloat16(), tiled)


@pytest.mark.parametrize("kernel", ["marlin", "dequantize"])
@pytest.mark.parametrize("smallest", [2.0**-9, 0.25], ids=["scales that Marlin flushes", "ordinary scales"])
def test_the_other_kernels_compute_in_float16(kernel, smallest):
    """Test the kernels used where our product does not run: vLLM's Marlin, or exact expansion where Marlin would lose a
    scale.
    """
    from qerl_kernels import nvfp4

    from qerl_vllm_plugin.weights import layouts

    layer = torch.nn.Module()
    codes = torch.randint(0, 256, (128, 128), dtype=torch.uint8, device="cuda")
    scales = torch.linspace(smallest, 448.0, 128 * 16, device="cuda").view(128, 16).to(torch.float8_e4m3fn)
    layer.weight_packed = torch.nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    layer.weight_global_scale = torch.nn.Parameter(torch.tensor([20000.0], device="cuda"), requires_grad=False)
    layer.logical_widths, layer.qerl_prefix, layer.params_dtype = [128], "layer", torch.float16
    layer.output_size_per_partition, layer.input_size_per_partition, layer.bias = 128, 256, None
    x = torch.randn(37, 256, device="cuda").half()
    exact = x.double() @ nvfp4.dequantize(codes, scales).double().t() / 20000
    layout = layouts.choose(torch.float16, kernel).prepare(layer)
    expected = layouts.Marlin if kernel == "marlin" and smallest > 0.1 else layouts.Canonical
    assert isinstance(layout, expected)
    y = layout.apply(layer, x, None)
    assert y.dtype == torch.float16 and (y.double() - exact).norm() < 2e-3 * exact.norm()


def test_the_product_is_as_fast_as_in_bfloat16(record):
    import timing
    from qerl_kernels import linear_tiles, tiles
    from qerl_kernels.adapter import Adapter, padded, spans

    worst = 0.0
    for name, (N, K) in LAYERS.items():
        linear_tiles.prepare(N, K, torch.device("cuda"))
        linear_tiles.prepare(N, K, torch.device("cuda"), torch.float16)
        codes = torch.randint(0, 256, (N, K // 2), device="cuda", dtype=torch.uint8)
        scales = torch.randint(40, 110, (N, K // 16), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
        calls: dict[int, dict[str, list[Callable[[], object]]]] = {M: {} for M in (8, 64, 256, 1024)}
        for operand in tiles.ORDERS:
            first = tiles.tile_weight(codes, scales, torch.full((), 1e-4, device="cuda"), operand)
            weights = [first] + [
                tiles.TiledWeight(first.tiles.clone(), first.row_scale, torch.zeros_like(first.counters), N, K,
                                  first.scale, operand)
                for _ in range(timing.copies(first.tiles.numel()) - 1)
            ]  # fmt: skip
            a = torch.randn(padded(32), K, device="cuda").to(operand) / K**0.5
            b = torch.randn(N, padded(32), device="cuda").to(operand)
            adapter = Adapter(a, b, spans([N], 32).cuda())
            for M in calls:
                x = torch.randn(M, K, device="cuda").to(operand)
                calls[M][str(operand)] = [partial(linear_tiles.linear, x, w, None, adapter) for w in weights]
        for M, variants in calls.items():
            took = timing.interleaved(variants, rounds=9)
            ratio = took["torch.float16"] / took["torch.bfloat16"]
            worst = max(worst, ratio)
            what = f"{name}, {M} tokens, adapter of rank 32: float16 us, over bfloat16"
            record(what, f"{took['torch.float16']:.1f}, {ratio:.3f}")
        del calls
        torch.cuda.empty_cache()
    record("float16 over bfloat16, the slowest of 20 points", f"{worst:.3f}")
    assert worst < 1.05  # the goal is 1.02, but a single run on a busy GPU scatters


@pytest.fixture
def mismatch(start_engine, off_by):
    """Return mismatch(folder), the mean |log p| difference between the engine and the trainer's model on PROMPTS."""
    from qerl_recipes.model import loading as models

    def measure(folder):
        trainer = models.load(folder, torch.float16).cuda()
        engine = start_engine(
            folder,
            dtype="float16",
            gpu_memory_utilization=0.15,
            # the size is fixed because the trainer's model takes part of the memory that vLLM would measure
            kv_cache_memory_bytes=1 << 30,
            max_model_len=256,
            max_num_seqs=8,
            additional_config={"qerl": {"policy_adapter": {"rank": 16}}},
        )
        found = off_by(engine, trainer, PROMPTS)
        return sum(found) / len(found)

    return measure


def test_thirty_two_layers_agree_with_the_trainer(deep, mismatch, record):
    """Use the model of test_depth.py, for which bfloat16 has 0.016."""
    found = mismatch(deep[1])
    record("32 layers in float16, log-probability difference of engine and trainer: mean", f"{found:.5f}")
    assert found < 3e-3


def test_a_model_that_overflows_does_not_start(make_checkpoints, start_engine):
    from safetensors.torch import load_file, save_file

    _, folder = make_checkpoints(2, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight_global_scale"] /= 1e6
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: the engine computes an activation of \d+;"):
        start_engine(folder, dtype="float16", gpu_memory_utilization=0.1)


def test_three_grpo_steps(checkpoints, three_grpo_steps, record):
    keys = {"dtype": "float16", "fp16": "true", "bf16": "false", "noise_mode": "both"}
    found = three_grpo_steps("nvfp4_lora_aqn.yaml", model_name_or_path=checkpoints[1], **keys)
    record("three GRPO steps in float16, noise: mean |log p| mismatch of rollout and trainer", f"{found:.5f}")
    assert found < 0.004  # a quarter of bfloat16's mismatch


@pytest.mark.skipif("QERL_7B" not in os.environ, reason="minutes: set QERL_7B=1")
def test_random_7b_layers_agree_with_the_trainer(mismatch, record, tmp_path):
    from qerl_recipes.bench import random_model
    from qerl_recipes.recipe.shapes import config_json

    random_model.write(tmp_path, config_json("7B"), packed=True, seed=0, device="cuda")
    found = mismatch(tmp_path)
    record("7B random layers in float16, log-probability difference of engine and trainer: mean", f"{found:.5f}")
    assert found < 8e-3
