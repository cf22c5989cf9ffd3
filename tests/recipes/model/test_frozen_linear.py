import peft
import pytest
import torch
from qerl_kernels import nvfp4, tiles
from qerl_kernels.marlin_layout import MarlinWeight, repack, store_scales

from qerl_recipes.model.frozen_linear import FrozenMarlinLinear, FrozenNVFP4Linear, FrozenTiledLinear
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError


def layer(N=48, K=64, bias=True, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    packed = nvfp4.quantize(torch.randn(N, K, generator=generator).bfloat16())
    b = torch.randn(N, generator=generator) if bias else None
    return FrozenNVFP4Linear(packed.codes, packed.block_scales, packed.divisor, b, dtype)


def dense(frozen):
    return nvfp4.dequantize(frozen.weight_packed, frozen.weight_scale).double() / frozen.weight_global_scale.double()


@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradient_are_those_of_the_dense_weight(bias):
    frozen = layer(bias=bias)
    x = torch.randn(3, 5, 64, requires_grad=True)
    y = frozen(x)
    y.square().sum().backward()
    reference = x.detach().double().requires_grad_()
    expected = torch.nn.functional.linear(reference, dense(frozen), frozen.bias.double() if bias else None)
    expected.square().sum().backward()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), reference.grad, rtol=1e-4, atol=1e-3)
    assert not frozen(x.detach()).requires_grad, "the bias is frozen too"


def test_the_backward_keeps_the_packed_weight_alone():
    frozen, saved = layer(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        frozen(torch.randn(4, 64, requires_grad=True))
    assert {t.dtype for t in saved} == {torch.uint8, torch.float8_e4m3fn, torch.float32}
    assert sum(t.numel() * t.element_size() for t in saved) == 48 * 32 + 48 * 4 + 4


def test_moving_to_another_dtype_leaves_the_packed_weight_alone():
    frozen = layer().to(torch.bfloat16)
    assert frozen.weight_packed.dtype == torch.uint8
    assert frozen.weight_scale.dtype == torch.float8_e4m3fn
    assert frozen.weight_global_scale.dtype == frozen.row_scale.dtype == torch.float32
    assert frozen.bias.dtype == frozen.weight.dtype == torch.bfloat16


def test_a_bias_of_another_dtype_becomes_one_of_the_activations():
    """LoRA takes its own dtype from the placeholder, and that follows the bias when the layer is moved."""
    frozen = layer(dtype=torch.bfloat16).to("cpu")
    assert frozen.bias.dtype == frozen.weight.dtype == frozen(torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("exponent", [0, 3])
def test_marlins_block_scales_are_read_with_their_exponent(exponent):
    """vLLM stores those of a layer without large ones times a power of two."""
    packed = nvfp4.quantize(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    block_scales = (packed.block_scales.float() / 8).to(torch.float8_e4m3fn)
    own = FrozenNVFP4Linear(packed.codes, block_scales, packed.divisor, None, torch.float32)
    tensors = repack(packed.codes), store_scales(block_scales, exponent), own.row_scale
    of_marlin = FrozenMarlinLinear(MarlinWeight(*tensors, exponent, 64, 64), None, torch.float32)
    x = torch.randn(3, 64)
    assert torch.equal(of_marlin(x), own(x))
    (w, factor), (expected, same) = of_marlin.operand(torch.float32, 8), own.operand(torch.float32, 8)
    assert torch.equal(w[:, :64], expected[:, :64]) and w.shape == expected.shape == (64, 72) and factor == same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_tiled_weight_is_expanded_in_the_dtype_that_is_asked_for(dtype):
    packed = nvfp4.quantize(torch.randn(64, 64).bfloat16())
    weight = tiles.tile_weight(packed.codes, packed.block_scales, 1 / packed.divisor, torch.bfloat16)
    w, factor = FrozenTiledLinear(weight, None, dtype).operand(dtype, 8)
    assert (w.dtype, w.shape) == (dtype, (64, 72))
    assert torch.equal(w[:, :64].double() * factor, nvfp4.dequantize(packed.codes, packed.block_scales).double())


def test_autocast_sets_the_dtype_of_the_output():
    with torch.autocast("cpu", torch.bfloat16):
        assert layer()(torch.randn(2, 64)).dtype == torch.bfloat16


def test_the_placeholder_weight_takes_no_memory():
    weight = layer(4096, 4096).weight
    assert weight.shape == (4096, 4096)
    assert weight.untyped_storage().nbytes() == 4


def test_lora_finds_the_layer_and_merging_fails_loudly():
    model = torch.nn.Sequential(layer())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))
    x = torch.randn(2, 64)
    lora = wrapped.base_model.model[0]
    delta = lora.lora_B["default"](lora.lora_A["default"](x)) * lora.scaling["default"]
    torch.testing.assert_close(wrapped(x), lora.base_layer(x) + delta)
    with pytest.raises(RuntimeError):
        wrapped.merge_adapter()
    with pytest.raises(ValueError, match="NaNs"):
        wrapped.merge_and_unload(safe_merge=True)


def test_the_state_of_a_layer_has_the_names_and_shapes_of_a_checkpoint():
    packed = nvfp4.quantize(torch.randn(16, 32).bfloat16())
    frozen = FrozenNVFP4Linear(packed.codes, packed.block_scales, packed.divisor.reshape(()), None, torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in frozen.state_dict().items()}
    assert shapes == {"weight_packed": (16, 16), "weight_scale": (16, 2), "weight_global_scale": (1,)}


def test_a_printed_model_names_the_layer_with_its_shape_and_whether_it_has_a_bias():
    assert repr(layer()) == "FrozenNVFP4Linear(in_features=64, out_features=48, bias=True, NVFP4)"
    assert "bias=False" in repr(layer(bias=False))


def test_unusable_values_are_refused():
    packed = nvfp4.quantize(torch.randn(16, 32).bfloat16())
    with pytest.raises(CheckpointError, match="tensor scale"):
        FrozenNVFP4Linear(packed.codes, packed.block_scales, torch.zeros(1), None, torch.float32)
