"""Test what a linear layer checks of its parts by itself, whatever has checked the checkpoint before."""

from types import SimpleNamespace

import pytest
import torch
from qerl_kernels import nvfp4

from qerl_vllm_plugin.weights import layouts, linear
from qerl_vllm_plugin.weights.formats import COMPRESSED, MODELOPT
from qerl_vllm_plugin.weights.linear import Arrivals, QerlLinearMethod, QerlOnlineLinearMethod
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError


@pytest.mark.parametrize(
    ("came", "is_complete"),
    [
        ([], False),
        ([(0,)], False),
        ([(0,), (0,)], False),
        ([(0,), (1,), (2,)], True),
        ([("q",), ("k",), ("v",)], True),
        ([((0, 1),)], False),
        ([((0, 1),), (2,)], True),  # one tensor of the checkpoint for two parts
        ([()], True),  # the whole tensor, without a part's number
        ([(None,)], True),
    ],
)
def test_a_layer_is_complete_when_all_its_parts_have_come(came, is_complete):
    arrivals = Arrivals(3, "model.layers.0.mlp.gate_up_proj.weight")
    for shard in came:
        arrivals.add(*shard)
    assert arrivals.complete == is_complete


@pytest.mark.parametrize("lacking", COMPRESSED.packed_names)
def test_a_packed_layer_of_which_a_part_has_not_come_is_refused(lacking):
    method = QerlLinearMethod("model.layers.0.mlp.gate_up_proj")
    method.is_dummy = False
    method.arrivals = {name: Arrivals(2, f"{method.prefix}.{name}") for name in COMPRESSED.packed_names}
    for name, arrivals in method.arrivals.items():
        arrivals.add(0)
        if name != lacking:
            arrivals.add(1)
    with pytest.raises(CheckpointError, match=rf"gate_up_proj\.{lacking} is missing from the checkpoint, or only"):
        method.process_weights_after_loading(torch.nn.Module())


@pytest.mark.parametrize("format", [COMPRESSED, MODELOPT], ids=lambda format: type(format).__name__)
def test_a_divisor_that_was_never_filled_is_refused(format, monkeypatch):
    """One tensor of the checkpoint holds both parts, but vLLM has filled only the first part's divisor."""
    monkeypatch.setattr(linear.layouts, "choose", lambda dtype, kernel: "a layout")
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    monkeypatch.setattr(linear, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 1)
    layer, method = torch.nn.Module(), QerlLinearMethod("model.layers.0.mlp.gate_up_proj", format=format)

    def load(param, loaded, *shard):
        param.data[: len(loaded)] = loaded

    method.create_weights(layer, 64, [16, 16], 64, 32, torch.bfloat16, weight_loader=load)
    for name in format.packed_names:
        param = getattr(layer, name)
        param.weight_loader(param, torch.ones_like(param.data)[: 1 if name == format.tensor_scale else None])
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*tensor scale|not a usable tensor scale"):
        method.process_weights_after_loading(layer)


def test_a_bf16_layer_of_which_a_part_has_not_come_is_refused():
    method = QerlOnlineLinearMethod("model.layers.0.mlp.gate_up_proj")
    method.is_dummy, method.arrived = False, Arrivals(2, f"{method.prefix}.weight")
    method.arrived.add(1)
    with pytest.raises(CheckpointError, match=r"gate_up_proj\.weight is missing from the checkpoint, or only a part"):
        method.process_weights_after_loading(torch.nn.Module())


@pytest.mark.parametrize(("K", "is_refused"), [(64, False), (72, True), (8, True)])
def test_columns_of_no_whole_blocks_are_refused(K, is_refused, monkeypatch):
    monkeypatch.setattr(linear.layouts, "choose", lambda dtype, kernel: "a layout")
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    monkeypatch.setattr(linear, "get_current_vllm_config", lambda: config)
    method, layer = QerlLinearMethod("model.layers.0.mlp.down_proj"), SimpleNamespace()
    monkeypatch.setattr(method, "_register_empty", lambda *_: None)
    sizes = (K, [32, 16], K, 48, torch.bfloat16)
    if is_refused:
        with pytest.raises(ValueError, match=rf"down_proj: {K} input columns on this rank; .* multiple of 16\. Use a"):
            method.create_weights(layer, *sizes, weight_loader=None)
        return
    method.create_weights(layer, *sizes, weight_loader=None)
    assert (layer.input_size_per_partition, layer.output_size_per_partition, layer.logical_widths) == (K, 48, [32, 16])


def test_random_weights_are_legal_and_of_a_real_size():
    N, K, layer = 64, 18944, torch.nn.Module()
    torch.set_default_dtype(torch.float16)  # as vLLM does while it builds a model
    for name, tensor in zip(COMPRESSED.packed_names, linear._empty(N, K, 2), strict=True):
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    torch.set_default_dtype(torch.float32)
    linear._fill_dummy(layer)
    codes, divisors = layer.weight_packed.data, layer.weight_global_scale.data
    assert divisors.dtype == torch.float32 and divisors.max() > torch.finfo(torch.float16).max
    assert set((codes & 15).unique().tolist()) == set((codes >> 4).unique().tolist()) == set(range(16))
    scales = layer.weight_scale.data.float()
    assert 60 <= float(scales.min()) < 80 and 300 < float(scales.max()) <= 320
    w = nvfp4.dequantize(codes, layer.weight_scale.data).double() / divisors[0].double()
    assert float(w.std()) == pytest.approx(K**-0.5, rel=0.25)
    again = codes.clone()
    linear._fill_dummy(layer)
    assert torch.equal(again, codes), "the same on every rank and in every start"


@pytest.mark.parametrize(
    ("gpu", "kernel", "dtype", "layout"),
    [
        (None, "auto", torch.bfloat16, layouts.Canonical),
        ("Hopper", "auto", torch.bfloat16, layouts.Tiled),
        ("Hopper", "auto", torch.float32, layouts.Marlin),
        ("Hopper", "tiled", torch.float16, layouts.Tiled),
        ("Hopper", "batch_invariant", torch.bfloat16, layouts.Tiled),
        ("Hopper", "marlin", torch.bfloat16, layouts.Marlin),
        ("Hopper", "dequantize", torch.bfloat16, layouts.Canonical),
        ("another", "auto", torch.bfloat16, layouts.Marlin),
        ("another", "dequantize", torch.bfloat16, layouts.Canonical),
    ],
)
def test_the_layout_of_each_gpu_and_kernel(monkeypatch, gpu, kernel, dtype, layout):
    platform = SimpleNamespace(is_cuda=lambda: gpu is not None, is_device_capability=lambda _: gpu == "Hopper")
    monkeypatch.setattr(layouts, "current_platform", platform)
    assert type(layouts.choose(dtype, kernel)) is layout
