"""Test that trainer and engine share one copy of the frozen weights on a GPU: what loading allocates and what it
computes.
"""

import gc

import pytest
import torch
from marlin_packing import repack, store_scales
from qerl_kernels.marlin_layout import MarlinWeight
from safetensors.torch import load_file

from qerl_recipes.model import loading as models
from qerl_recipes.model.frozen import FrozenMarlinLinear, FrozenNVFP4Linear, FrozenTiledLinear
from qerl_vllm_plugin.weights.frozen_weights import frozen_weights, marlin_part
from qerl_vllm_plugin.weights.layouts import Marlin, Tiled

pytestmark = pytest.mark.gpu

IDS = torch.randint(2, 500, (4, 200), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["auto", "marlin"])
def engine(request, start_engine, checkpoints):
    """Start an engine with this GPU's layout, and one with Marlin's."""
    gc.collect()  # free the previous engine: vLLM stops if memory becomes free while it measures its own
    torch.cuda.empty_cache()
    options = {"qerl": {"policy_adapter": {"rank": 16}, "kernel": request.param}}
    llm = start_engine(checkpoints[1], enforce_eager=True, additional_config=options)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def layers(engine):
    """Return the quantized layers of the engine."""
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    return [module for module in model.modules() if hasattr(module, "qerl_prefix")]


def logits_and_gradient(model):
    x = model.get_input_embeddings()(IDS.to(model.device)).detach().requires_grad_()
    logits = model(inputs_embeds=x).logits.float()
    logits.log_softmax(-1)[..., 3].sum().backward()
    return logits.detach(), x.grad.float()


def assert_same_bits(shared, own):
    """Assert that every frozen linear gives the same bits in forward and gradient."""
    theirs = dict(own.named_modules())
    for name, layer in shared.named_modules():
        if isinstance(layer, FrozenNVFP4Linear):
            x = torch.randn(200, layer.in_features, device="cuda", dtype=layer.dtype)
            dy = torch.randn(200, layer.out_features, device="cuda", dtype=layer.dtype)
            found = []
            for linear in (layer, theirs[name]):
                leaf = x.clone().requires_grad_()
                y = linear(leaf)
                y.backward(dy)
                found.append((y.detach(), leaf.grad))
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), name


def test_marlins_tensors_are_the_closed_form_of_the_checkpoints(layers, checkpoints, record):
    on_marlin = [layer for layer in layers if isinstance(layer.quant_method.layout, Marlin)]
    if not on_marlin:
        pytest.skip("this engine has no layer in Marlin's layout")
    stored = load_file(checkpoints[1] / "model.safetensors", device="cuda")
    for layer in on_marlin:
        names, (part,) = layer.quant_method.parts, layer.marlin_parts
        codes, scales = (torch.cat([stored[f"{name}.weight_{kind}"] for name in names]) for kind in ("packed", "scale"))
        tensor_scale = 1.0 / stored[f"{names[0]}.weight_global_scale"][0]
        assert torch.equal(part.weight, repack(codes)), names
        assert part.scale_exponent is not None, names
        assert torch.equal(part.weight_scale.view(torch.uint8), store_scales(scales, part.scale_exponent)), names
        assert torch.equal(part.tensor_scale, tensor_scale), names
        assert torch.equal(part.weight_global_scale, tensor_scale * 2.0 ** (119 - part.scale_exponent)), names
        first = 0
        for number, (name, rows) in enumerate(zip(names, layer.logical_widths, strict=True)):
            weight = marlin_part(layer, number, first, rows)
            assert isinstance(weight, MarlinWeight), name
            ours = weight.canonical()
            assert torch.equal(ours[0], stored[f"{name}.weight_packed"]), name
            assert torch.equal(ours[1].view(torch.uint8), stored[f"{name}.weight_scale"].view(torch.uint8)), name
            first += rows
    record("Marlin's codes, block scales and tensor scales equal to their closed form, layers", len(on_marlin))


def test_the_trainer_allocates_no_second_copy_and_computes_the_same(engine, layers, checkpoints, record):
    """Compare the trainer on shared weights with one on its own weights in the checkpoint's layout.

    Tiles use another kernel, so results are equal up to the order of sums. Marlin's tensors use the same kernel, so
    every layer gives the same bits.
    """
    lent, before = frozen_weights(engine), torch.cuda.memory_allocated()
    shared = models.load(checkpoints[1], weights=lent)
    shared_bytes = torch.cuda.memory_allocated() - before
    own = models.load(checkpoints[1]).to("cuda")
    own_bytes = torch.cuda.memory_allocated() - before - shared_bytes
    kinds = {type(module) for module in shared.modules() if isinstance(module, FrozenNVFP4Linear)}
    layout = type(layers[0].quant_method.layout)
    assert kinds == {{Tiled: FrozenTiledLinear, Marlin: FrozenMarlinLinear}[layout]}
    name = layout.__name__
    record(f"memory of the trainer's model, shared ({name}) / own copy", f"{shared_bytes} / {own_bytes} bytes")
    assert shared_bytes < own_bytes / 20
    names = ("logits", "gradient")
    if layout is Marlin:
        assert_same_bits(shared, own)
    for what, ours, theirs in zip(names, logits_and_gradient(shared), logits_and_gradient(own), strict=True):
        distance = float((ours - theirs).norm() / theirs.norm())
        record(f"trainer on shared weights ({name}) to one on its own, {what}: relative distance", f"{distance:.5f}")
        assert distance < 0.02
