"""Test frozen NVFP4 linears and experts against dense weights, and what is refused while experts load."""

import json
import shutil

import peft
import pytest
import torch
from marlin_packing import repack, store_scales
from qerl_kernels import nvfp4, tiles
from qerl_kernels.marlin_layout import MarlinWeight
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from qerl_recipes.model import loading
from qerl_recipes.model.frozen import (
    FrozenMarlinLinear,
    FrozenNVFP4Experts,
    FrozenNVFP4Linear,
    FrozenTiledLinear,
    PackedExperts,
    UnroundedRouter,
    dense_experts,
    replace_routers,
)
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
    """Check the placeholder weight, from which LoRA takes its dtype.

    The placeholder follows the bias when the layer is moved.
    """
    frozen = layer(dtype=torch.bfloat16).to("cpu")
    assert frozen.bias.dtype == frozen.weight.dtype == frozen(torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("exponent", [0, 3])
def test_marlins_block_scales_are_read_with_their_exponent(exponent):
    """Check a layer without large block scales, which vLLM stores multiplied by a power of two."""
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
def test_a_tiled_weight_is_expanded_in_the_requested_dtype(dtype):
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


def test_a_layers_state_has_the_checkpoints_names_and_shapes():
    packed = nvfp4.quantize(torch.randn(16, 32).bfloat16())
    frozen = FrozenNVFP4Linear(packed.codes, packed.block_scales, packed.divisor.reshape(()), None, torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in frozen.state_dict().items()}
    assert shapes == {"weight_packed": (16, 16), "weight_scale": (16, 2), "weight_global_scale": (1,)}


def test_a_printed_layer_has_its_shape_and_bias():
    assert repr(layer()) == "FrozenNVFP4Linear(in_features=64, out_features=48, bias=True, NVFP4)"
    assert "bias=False" in repr(layer(bias=False))


def test_unusable_values_are_refused():
    packed = nvfp4.quantize(torch.randn(16, 32).bfloat16())
    with pytest.raises(CheckpointError, match="tensor scale"):
        FrozenNVFP4Linear(packed.codes, packed.block_scales, torch.zeros(1), None, torch.float32)


E, K, H, I, T = 6, 2, 32, 48, 9  # noqa: E741
SIZES = {"hidden_size": H, "moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": K}
IDS = torch.tensor([[2, 9, 4, 17, 30]])


def pack(weights: list[torch.Tensor], parts: int) -> tuple[PackedExperts, torch.Tensor]:
    """Pack each part of each expert with its own tensor scale, and return also the equivalent dense weights."""
    packed = [[nvfp4.quantize(part) for part in w.chunk(parts)] for w in weights]
    dense = [
        torch.cat([nvfp4.dequantize(p.codes, p.block_scales).float() / p.divisor for p in parts]) for parts in packed
    ]
    stacked = (
        torch.stack([torch.cat([getattr(p, name) for p in parts]) for parts in packed])
        for name in ("codes", "block_scales")
    )
    divisors = torch.stack([torch.stack([p.divisor for p in parts]) for parts in packed])
    return PackedExperts(*stacked, divisors), torch.stack(dense)


@pytest.fixture
def both() -> tuple[FrozenNVFP4Experts, torch.nn.Module]:
    generator = torch.Generator().manual_seed(0)
    # Magnitudes differ between experts and between gate and up, so that a wrong scale would show.
    sizes = (1 + torch.arange(E)).tolist()
    gate_up = [
        torch.cat([s * torch.randn(I, H, generator=generator), torch.randn(I, H, generator=generator) / s])
        for s in sizes
    ]
    down = [torch.randn(H, I, generator=generator) / s for s in sizes]
    (packed_gate_up, dense_gate_up), (packed_down, dense_down) = pack(gate_up, 2), pack(down, 1)
    theirs = Qwen3MoeExperts(Qwen3MoeConfig(**SIZES))
    theirs.config._experts_implementation = "eager"
    theirs.load_state_dict({"gate_up_proj": dense_gate_up, "down_proj": dense_down})
    return FrozenNVFP4Experts(packed_gate_up, packed_down), theirs


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, H, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(T)])  # none for the last
    return x, chosen, torch.rand(T, K, generator=generator), torch.randn(T, H, generator=generator).to(dtype)


def test_promise_02_experts_and_their_gradients_are_those_of_the_dequantized_weights(both):
    results = []
    for experts in both:
        x, chosen, weights, dy = inputs()
        y = experts(x.requires_grad_(), chosen, weights.requires_grad_())
        y.backward(dy)
        results.append((y, x.grad, weights.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_in_bf16_they_differ_by_rounding_and_nothing_is_trained(both):
    ours, theirs = both
    x, chosen, weights, _ = inputs(torch.bfloat16)
    expected = theirs(x.float(), chosen, weights)
    for y in (ours(x, chosen, weights), autocast(ours, x.float(), chosen, weights)):
        assert y.dtype == torch.bfloat16
        assert (y.float() - expected).norm() < 0.01 * expected.norm()
    assert not list(ours.parameters())


def autocast(module, *arguments):
    with torch.autocast("cpu", torch.bfloat16):
        return module(*arguments)


def test_another_dtype_leaves_the_packed_weights_alone(both):
    ours, _ = both
    before = {name: buffer.clone() for name, buffer in ours.named_buffers()}
    ours.to(torch.bfloat16)
    for name, buffer in ours.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer.view(torch.uint8), before[name].view(torch.uint8))


@pytest.mark.parametrize("size", [0.01, 1.0])  # at 1.0 experts that are not chosen get almost no weight
@pytest.mark.parametrize("normalized", [True, False])
def test_a_routers_weights_lack_the_last_rounding(normalized, size):
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**SIZES, norm_topk_prob=normalized))
    torch.nn.init.normal_(router.weight, std=size, generator=torch.Generator().manual_seed(13))
    exact = UnroundedRouter("gate", router)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(2))
    for ours, theirs in zip(exact(x), router(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    exact.to(torch.bfloat16)
    _, weights, chosen = exact(x.bfloat16())
    _, rounded, same = router(x.bfloat16())
    assert torch.equal(chosen, same) and weights.dtype == torch.float32
    assert torch.equal(weights.bfloat16(), rounded) and not torch.equal(weights, rounded.float())


class Sigmoid(Qwen3MoeTopKRouter):
    def forward(self, x):
        logits, _, chosen = super().forward(x)
        return logits, logits.sigmoid().gather(1, chosen), chosen


def test_a_router_that_is_no_softmax_is_refused():
    router = Sigmoid(Qwen3MoeConfig(**SIZES))
    torch.nn.init.normal_(router.weight)
    with pytest.raises(ValueError, match=r"mlp\.gate \(Sigmoid\) cannot be trained: of MoE routers only a softmax"):
        UnroundedRouter("mlp.gate", router)


def test_experts_that_compute_something_else_are_refused(both):
    _, theirs = both
    theirs.is_concatenated = False
    with pytest.raises(ValueError, match=r"experts \(Qwen3MoeExperts\) is not down\(silu\(gate\) \* up\)"):
        dense_experts(torch.nn.ModuleDict({"experts": theirs}))


def test_a_packed_checkpoint_has_frozen_experts_and_routers(make_nvfp4):
    model = loading.load(make_nvfp4("qwen3_moe"), torch.float32)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(FrozenNVFP4Experts) == kinds.count(UnroundedRouter) == 2
    assert not dense_experts(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_bf16_arm_keeps_transformers_experts(make_bf16):
    folder = make_bf16("qwen3_moe")
    ours = loading.load(folder, torch.float32)
    assert len(dense_experts(ours)) == 2
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-4)
    assert replace_routers(theirs) == 2


def test_experts_that_a_checkpoint_keeps_in_bf16_stay_so(make_bf16, tmp_path):
    from qerl_recipes.convert.quantize import quantize_checkpoint

    source = make_bf16("qwen3_moe")
    quantize_checkpoint(source, tmp_path / "half", ignore=["lm_head", "re:.*experts.*"])
    model = loading.load(tmp_path / "half", torch.float32)
    experts = dict(dense_experts(model))
    dense = dict(dense_experts(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)))
    assert experts.keys() == dense.keys() and len(experts) == 2
    for name, module in experts.items():
        assert torch.equal(module.gate_up_proj, dense[name].gate_up_proj)
        assert torch.equal(module.down_proj, dense[name].down_proj)


def test_experts_are_not_quantized_while_loading(make_bf16):
    with pytest.raises(ValueError, match=r"experts in BF16 are not quantized .*qerl quantize"):
        loading.load(make_bf16("qwen3_moe"), quantization="qerl_nvfp4")


def test_packed_experts_are_not_trained_in_float16(make_nvfp4):
    with pytest.raises(ValueError, match="not trained in float16; use dtype: bfloat16"):
        loading.load(make_nvfp4("qwen3_moe"), torch.float16)


def broken(make_nvfp4, tmp_path, change):
    folder = shutil.copytree(make_nvfp4("qwen3_moe"), tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("leaf", ["weight_packed", "weight_scale", "weight_global_scale"])
def test_an_expert_that_lacks_a_tensor_is_refused_by_its_name(leaf, make_nvfp4, tmp_path):
    name = f"model.layers.1.mlp.experts.2.up_proj.{leaf}"
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        loading.load(broken(make_nvfp4, tmp_path, lambda tensors: tensors.pop(name)))


def test_an_expert_with_an_unusable_scale_is_refused_by_its_name(make_nvfp4, tmp_path):
    name = "model.layers.1.mlp.experts.3.down_proj"

    def change(tensors):
        tensors[f"{name}.weight_global_scale"].fill_(0)

    with pytest.raises(CheckpointError, match=rf"{name}.weight_global_scale: 0.0 is not a usable tensor scale"):
        loading.load(broken(make_nvfp4, tmp_path, change))


def test_experts_of_which_some_are_excluded_are_refused(make_nvfp4, tmp_path):
    folder = shutil.copytree(make_nvfp4("qwen3_moe"), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append("model.layers.0.mlp.experts.1.down_proj")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"experts"):
        loading.load(folder)
