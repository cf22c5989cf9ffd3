import copy

import pytest
import torch
from marlin_packing import repack, store_scales
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from qerl_kernels import nvfp4, tiles
from qerl_kernels.marlin_layout import MarlinWeight
from qerl_kernels.silu_mul import silu_mul

from qerl_recipes.model import loading as model
from qerl_recipes.model import lora
from qerl_recipes.model.frozen import FrozenMarlinLinear, FrozenNVFP4Linear, FrozenTiledLinear

N, K = 64, 128


@pytest.fixture
def adapted(make_nvfp4):
    loaded = model.load(make_nvfp4("qwen2"))
    result = get_peft_model(loaded, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    for name, weight in result.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return result


def layer_results(layer, x, dy, dtype):
    """Return output and gradients of x, A and B of one LoRA layer, under autocast where ``dtype`` is BF16."""
    x = x.detach().clone().to(dtype).requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = layer(x)
    y.backward(dy.to(y.dtype))
    return [t.detach().float() for t in (y, x.grad, layer.lora_A.default.weight.grad, layer.lora_B.default.weight.grad)]


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj"])
def test_it_is_peft_s_arithmetic_with_fewer_roundings(name, adapted):
    layer = adapted.get_base_model().model.layers[1].get_submodule(name)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 33, layer.in_features, generator=generator)
    dy = torch.randn(1, 33, layer.out_features, generator=generator).bfloat16().float()
    x = x.bfloat16().float()
    exact = layer_results(copy.deepcopy(layer).float(), x, dy, torch.float32)
    plain = layer_results(layer, x, dy, torch.bfloat16)
    assert lora.install(adapted, "default") == 14
    fused = layer_results(layer, x, dy, torch.bfloat16)
    for what, mine, theirs, true in zip(("y", "dx", "dA", "dB"), fused, plain, exact, strict=True):
        error, before = (float((values - true).abs().mean()) for values in (mine, theirs))
        assert error < 0.02 * float(true.abs().mean()), what
        assert error <= 1.1 * before, what


def frozen(kind):
    """Return a frozen linear with a bias, its dense weight in fp64, and its bias."""
    generator = torch.Generator().manual_seed(0)
    packed = nvfp4.quantize(torch.randn(N, K, generator=generator).bfloat16())
    parts, bias = (packed.codes, packed.block_scales), torch.randn(N, generator=generator).bfloat16()
    scale = 1 / packed.divisor.float()
    dense, scales = nvfp4.dequantize(*parts).double(), scale.expand(N).contiguous()
    if kind == "BF16":
        layer = torch.nn.Linear(K, N, dtype=torch.bfloat16).requires_grad_(False)
        layer.weight.data, layer.bias.data = dense.bfloat16(), bias
        return layer, dense, bias
    if kind == "checkpoint":
        layer = FrozenNVFP4Linear(*parts, packed.divisor, bias, torch.bfloat16)
    elif kind == "Marlin":
        words, stored = repack(packed.codes), store_scales(packed.block_scales, 0)
        layer = FrozenMarlinLinear(MarlinWeight(words, stored, scale, 0, N, K), bias, torch.bfloat16)
    else:
        if kind == "tiles, unequal scales":
            scales[3] *= 2
        layer = FrozenTiledLinear(tiles.tile_weight(*parts, scales), bias, torch.bfloat16)
    return layer, dense * scales.double()[:, None], bias


@pytest.mark.parametrize("kind", ["BF16", "checkpoint", "tiles", "Marlin", "tiles, unequal scales"])
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_output_and_gradients_are_those_of_the_formula(kind, input_dtype):
    base, w, bias = frozen(kind)
    holder = get_peft_model(
        torch.nn.ModuleDict({"part": base}), LoraConfig(r=4, lora_alpha=12, target_modules=["part"])
    )
    layer = holder.base_model.model["part"]
    generator = torch.Generator().manual_seed(2)
    A, B = layer.lora_A.default.weight, layer.lora_B.default.weight
    for weight in (A, B):
        weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    assert lora.install(holder, "default") == 1
    assert (type(layer) is lora.AdaptedLinear) == (kind != "tiles, unequal scales")
    x = torch.randn(2, 17, K, generator=generator).bfloat16().to(input_dtype).requires_grad_()
    dy = torch.randn(2, 17, N, generator=generator).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    assert (x.grad.dtype, A.grad.dtype, B.grad.dtype) == (input_dtype, torch.float32, torch.float32)
    leaves = [t.detach().double().requires_grad_() for t in (x, A, B)]
    exact = leaves[0] @ w.t() + bias.double() + 3 * (leaves[0] @ leaves[1].t()) @ leaves[2].t()
    exact.backward(dy.double())
    for what, mine, true in zip(
        ("y", "dx", "dA", "dB"),
        (y.detach(), x.grad, A.grad, B.grad),
        (exact.detach(), *(leaf.grad for leaf in leaves)),
        strict=True,
    ):
        assert (mine.double() - true).norm() < 6e-3 * true.norm(), what


@pytest.mark.parametrize(
    ("kinds", "alphas", "together"),
    [
        (("checkpoint", "tiles"), (8, 8), True),
        (("BF16", "BF16"), (8, 8), True),
        (("checkpoint", "tiles"), (8, 12), False),
        (("checkpoint", "BF16"), (8, 8), False),
    ],
    ids=["4-bit", "dense", "two scalings", "4-bit and dense"],
)
def test_alike_layers_of_one_input_are_computed_together(kinds, alphas, together, monkeypatch):
    """Check that every gradient equals that of the layers run one by one, up to the order of sums."""
    parts = {name: frozen(kind)[0] for name, kind in zip(("first", "second"), kinds, strict=True)}
    ranks, alpha = {"first": 4, "second": 8}, {"first": alphas[0], "second": alphas[1] * 2}
    adapter = LoraConfig(target_modules=list(parts), rank_pattern=ranks, alpha_pattern=alpha)
    holder = get_peft_model(torch.nn.ModuleDict(parts), adapter)
    layers = [holder.base_model.model[name] for name in parts]
    generator = torch.Generator().manual_seed(2)
    for layer in layers:
        layer.lora_B.default.weight.data = torch.randn(N, layer.r["default"], generator=generator)
    lora.install(holder, "default")
    x, dys = torch.randn(9, K, generator=generator).bfloat16(), torch.randn(2, 9, N, generator=generator).bfloat16()
    sizes, results, inner = [], [], lora._adapted
    monkeypatch.setattr(lora, "_adapted", lambda x, layers: sizes.append(len(layers)) or inner(x, layers))
    for at_once in (True, False):
        holder.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            ys = lora.together(leaf, *layers) if at_once else tuple(layer(leaf) for layer in layers)
        torch.autograd.backward(ys, list(dys))
        gradients = [w.grad for layer in layers for w in (layer.lora_A.default.weight, layer.lora_B.default.weight)]
        results.append([*(y.detach() for y in ys), leaf.grad, *gradients])
    for mine, theirs in zip(*results, strict=True):
        assert (mine.double() - theirs.double()).norm() < 5e-3 * theirs.double().norm()
    assert sizes == ([2] if together else [1, 1]) + [1, 1]


@pytest.mark.parametrize("kind", ["BF16", "checkpoint", "tiles", "Marlin", "tiles, unequal scales"])
def test_gated_output_and_gradients_are_those_of_the_layer(kind, monkeypatch):
    """Where the weight is 4-bit in one function, to the bit but for the gradients' own roundings."""
    base, _, _ = frozen(kind)
    holder = get_peft_model(torch.nn.ModuleDict({"part": base}), LoraConfig(r=4, target_modules=["part"]))
    lora.install(holder, "default")
    layer, generator = holder.base_model.model["part"], torch.Generator().manual_seed(3)
    layer.lora_B.default.weight.data = torch.randn(N, 4, generator=generator)
    gate, up = torch.randn(2, 3, 17, K, generator=generator).bfloat16()
    dy = torch.randn(3, 17, N, generator=generator).bfloat16()
    calls, apply = [], lora._Gated.apply
    monkeypatch.setattr(lora._Gated, "apply", lambda *a: calls.append(1) or apply(*a))
    results = []
    for function in (lora.gated, lambda g, u, down: down(silu_mul(g, u))):
        holder.zero_grad()
        leaves = [t.clone().requires_grad_() for t in (gate, up)]
        with torch.autocast("cpu", torch.bfloat16):
            y = function(*leaves, layer)
        y.backward(dy)
        results.append(
            [y.detach(), *(t.grad for t in leaves), *(p.grad for p in layer.parameters() if p.requires_grad)]
        )
    assert len(calls) == (kind in ("checkpoint", "tiles", "Marlin"))
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_gated_leaves_other_dtypes_and_adapters_to_the_layer():
    base = frozen("checkpoint")[0]
    holder = get_peft_model(torch.nn.ModuleDict({"part": base}), LoraConfig(r=4, target_modules=["part"]))
    lora.install(holder, "default")
    layer = holder.base_model.model["part"]
    layer.lora_B.default.weight.data.normal_()
    gate, up = torch.randn(2, 5, K)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lora.gated(gate, up, layer), layer(silu_mul(gate, up)))
        gate, up = gate.bfloat16(), up.bfloat16()
        with holder.disable_adapter():
            assert torch.equal(lora.gated(gate, up, layer), base(silu_mul(gate, up)))
        assert torch.equal(lora.gated(gate, up, base), base(silu_mul(gate, up)))


def test_gated_without_a_gradient_still_trains_the_adapter():
    base = frozen("checkpoint")[0]
    holder = get_peft_model(torch.nn.ModuleDict({"part": base}), LoraConfig(r=4, target_modules=["part"]))
    lora.install(holder, "default")
    layer = holder.base_model.model["part"]
    gate, up = torch.randn(2, 5, K).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        lora.gated(gate, up.requires_grad_(), layer).sum().backward()
    assert up.grad is not None and layer.lora_B.default.weight.grad.abs().sum() > 0
    with torch.autocast("cpu", torch.bfloat16):
        lora.gated(gate.requires_grad_(), up.detach(), layer).sum().backward()
    assert gate.grad is not None and gate.grad.abs().sum() > 0


def test_an_output_that_nobody_uses_adds_nothing():
    parts = {"first": frozen("checkpoint")[0], "second": frozen("tiles")[0]}
    holder = get_peft_model(torch.nn.ModuleDict(parts), LoraConfig(r=4, target_modules=list(parts)))
    lora.install(holder, "default")
    layers = [holder.base_model.model[name] for name in parts]
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(2)).bfloat16()
    gradients = []
    for at_once in (True, False):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            (lora.together(leaf, *layers)[0] if at_once else layers[0](leaf)).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_a_bias_far_above_the_product_keeps_its_last_bits():
    """Check a bias that goes through the product in two parts.

    On the keys of Qwen2 the bias is in the hundreds.
    """
    base, w, _ = frozen("checkpoint")
    base.bias.data = (1000 * torch.randn(N, generator=torch.Generator().manual_seed(5))).bfloat16()
    holder = get_peft_model(torch.nn.ModuleDict({"part": base}), LoraConfig(r=4, target_modules=["part"]))
    lora.install(holder, "default")
    x = torch.randn(50, K, generator=torch.Generator().manual_seed(6)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = holder.base_model.model["part"](x)
    exact = x.double() @ w.t() + base.bias.double()
    least = (exact.bfloat16().double() - exact).square().mean()
    assert (y.double() - exact).square().mean() < 1.5 * least


def test_what_needs_no_gradient_gets_none():
    base = frozen("checkpoint")[0]
    holder = get_peft_model(torch.nn.ModuleDict({"part": base}), LoraConfig(r=4, target_modules=["part"]))
    lora.install(holder, "default")
    layer, x = holder.base_model.model["part"], torch.randn(5, K).bfloat16()
    layer.lora_B.default.weight.data.normal_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.sum().backward()  # x wants no gradient, as in the first block without checkpointing
        assert x.grad is None and layer.lora_A.default.weight.grad is not None
        with holder.disable_adapter():
            assert torch.equal(layer(x), base(x)) and not torch.equal(layer(x), y)


def test_a_dropout_of_the_adapter_stays_with_peft():
    base = frozen("checkpoint")[0]
    adapter = LoraConfig(r=4, target_modules=["part"], lora_dropout=0.5)
    holder = get_peft_model(torch.nn.ModuleDict({"part": base}), adapter)
    assert lora.install(holder, "default") == 1
    assert type(holder.base_model.model["part"]) is not lora.AdaptedLinear


def test_no_copy_of_the_activations_in_fp32_is_made(adapted):
    layer = adapted.get_base_model().model.layers[0].mlp.down_proj
    lora.install(adapted, "default")
    kept = []
    x = torch.randn(1, 50, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
    assert not any(t.dtype == torch.float32 and t.numel() >= 50 * 16 for t in kept)


def test_without_autocast_the_adapters_dtype_is_used(adapted):
    ids = torch.arange(5)[None]
    with torch.no_grad():
        plain = adapted(input_ids=ids).logits
        lora.install(adapted, "default")
        torch.testing.assert_close(adapted(input_ids=ids).logits, plain, rtol=0.05, atol=0.2)


def test_other_variants_and_inactive_adapters_stay(adapted):
    lora.install(adapted, "default")
    assert lora.install(adapted, "default") == 0
    ids = torch.arange(5)[None]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with adapted.disable_adapter():
            off = adapted(input_ids=ids).logits
        assert not torch.equal(off, adapted(input_ids=ids).logits)
        assert torch.equal(off, adapted.unload()(input_ids=ids).logits)


def test_a_bf16_layer_merges_as_before(make_bf16):
    adapter = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    weights = []
    for install in (False, True):
        torch.manual_seed(0)
        adapted = get_peft_model(model.load(make_bf16("qwen2")), adapter)
        if install:
            assert lora.install(adapted, "default") == 2
        assert sum(isinstance(module, LoraLayer) for module in adapted.modules()) == 2
        weights.append(adapted.merge_and_unload().model.layers[0].self_attn.q_proj.weight)
    assert torch.equal(*weights)


def test_a_merged_adapter_is_not_added_twice():
    base, w, bias = frozen("BF16")
    holder = get_peft_model(torch.nn.ModuleDict({"part": base}), LoraConfig(r=4, target_modules=["part"]))
    lora.install(holder, "default")
    layer, x = holder.base_model.model["part"], torch.randn(5, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert type(layer) is lora.AdaptedLinear
    layer.lora_B.default.weight.data.normal_(std=500)
    delta = (layer.lora_B.default.weight @ layer.lora_A.default.weight).detach().double() * layer.scaling["default"]
    exact = x.double() @ (w + delta).t() + bias.double()
    assert delta.norm() > 0.1 * w.norm()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        apart = layer(x)
        layer.merge()
        merged = layer(x)
    for y in (apart, merged):
        assert (y.double() - exact).norm() < 1e-2 * exact.norm()


def test_an_adapter_with_a_bias_stays_with_peft():
    adapter = LoraConfig(r=4, target_modules=["part"], lora_bias=True)
    holder = get_peft_model(torch.nn.ModuleDict({"part": frozen("BF16")[0]}), adapter)
    assert lora.install(holder, "default") == 0
    assert type(holder.base_model.model["part"]) is not lora.AdaptedLinear
    plain = get_peft_model(torch.nn.ModuleDict({"part": frozen("BF16")[0]}), LoraConfig(r=4, target_modules=["part"]))
    assert lora.install(plain, "another") == 0 and lora.install(plain, "default") == 1
