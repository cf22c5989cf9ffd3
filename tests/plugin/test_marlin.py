"""Test Marlin's layout on a CPU. vLLM's own code prepares it, and a closed form replaces its one CUDA operator."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from marlin_packing import repack, store_scales
from qerl_kernels import nvfp4
from qerl_kernels.compiler import CompileError
from qerl_kernels.marlin_layout import MarlinWeight, load_scales, scale_exponent
from safetensors.torch import load_file
from vllm import logger as vllm_logger
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

from qerl_vllm_plugin.compat.engine import keep_compiled_by
from qerl_vllm_plugin.weights import layouts
from qerl_vllm_plugin.weights.frozen_weights import NotShareableError, frozen_weights, marlin_part

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def repack_on_a_cpu(monkeypatch):
    """Replace vLLM's operator, which takes and returns 32-bit words of the transposed weight."""

    def repacked(b_q_weight, size_k, size_n, num_bits, **_):
        assert (num_bits, b_q_weight.shape) == (4, (size_k // 8, size_n))
        return repack(b_q_weight.T.contiguous().view(torch.uint8))

    monkeypatch.setattr(marlin_utils_fp4.ops, "gptq_marlin_repack", repacked)


def by_vllm(scales, dtype):
    """Return what vLLM stores for ``scales: (N, K/16)``, as bytes, and the exponent of its factor."""
    N, groups = scales.shape
    permuted = marlin_utils.marlin_permute_scales(scales.T.contiguous().to(dtype), 16 * groups, N, 16)
    stored, factor = marlin_utils_fp4.nvfp4_marlin_process_scales(permuted, a_dtype=dtype)
    return stored.view(torch.uint8), int(math.log2(factor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_scale_is_stored_as_vllm_stores_it(dtype):
    for largest in range(1, 127):
        scales = torch.zeros(64, 2, dtype=torch.uint8)
        scales.view(-1)[: largest + 1] = torch.arange(largest + 1, dtype=torch.uint8)
        scales = scales.view(torch.float8_e4m3fn)
        stored, exponent = by_vllm(scales, dtype)
        assert torch.equal(store_scales(scales, exponent), stored), largest
        kept = torch.where(scales.float() * 2.0**exponent < 2.0**-6, 0, scales.view(torch.uint8))
        assert torch.equal(load_scales(stored, exponent).view(torch.uint8), kept), largest
        lost = int((kept == 0).sum() - (scales.view(torch.uint8) == 0).sum())
        assert layouts._flushed(scales, stored) == lost, "the smallest that is kept has but its highest bit"
        if kept.any():
            assert scale_exponent(kept.view(torch.float8_e4m3fn), stored) == exponent, largest


@given(st.integers(1, 3), st.integers(2, 6), st.integers(8, 126), st.integers(0, 2**31))
def test_vllm_puts_every_scale_where_the_closed_form_does(blocks, groups, largest, seed):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(0, largest + 1, (64 * blocks, groups), dtype=torch.uint8, generator=generator)
    for dtype in DTYPES:
        stored, exponent = by_vllm(scales.view(torch.float8_e4m3fn), dtype)
        assert torch.equal(store_scales(scales.view(torch.float8_e4m3fn), exponent), stored)


def bare_layer(widths, K, divisors, dtype=torch.bfloat16):
    """Return a layer in its state after loading. Its block scales lie between 2 and 400."""
    N, layer = sum(widths), torch.nn.Module()
    generator = torch.Generator().manual_seed(N + K)
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=generator)
    scales = (2 + 398 * torch.rand(N, K // 16, generator=generator)).to(torch.float8_e4m3fn)
    for name, tensor in (
        ("weight_packed", codes),
        ("weight_scale", scales),
        ("weight_global_scale", torch.tensor(divisors)),
        ("bias", torch.randn(N, generator=generator).to(dtype)),
    ):
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    layer.logical_widths, layer.qerl_prefix, layer.params_dtype = widths, "a.layer", dtype
    layer.input_size_per_partition, layer.output_size_per_partition = K, N
    return layer


def spans(tensor):
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("widths", "K", "divisors"),
    [
        ([128], 128, [50.0]),
        ([64, 64, 64], 64, [50.0] * 3),  # K is padded
        ([128, 64, 16], 96, [50.0] * 3),  # N is padded too
        ([96, 32], 128, [50.0, 400.0]),  # one Marlin weight for each part, each padded
    ],
)
def test_a_part_of_marlins_tensors_has_the_checkpoints_bits(widths, K, divisors, dtype):
    layer = bare_layer(widths, K, divisors, dtype)
    codes, scales, bias = (t.data.clone() for t in (layer.weight_packed, layer.weight_scale, layer.bias))
    assert isinstance(layouts.Marlin().prepare(layer), layouts.Marlin)
    assert not hasattr(layer, "weight_packed") and torch.equal(layer.bias, bias)
    assert layer.weight.device == bias.device, "vLLM's LoRA layers look there for it"
    theirs = {spans(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    first = 0
    for number, rows in enumerate(widths):
        part = marlin_part(layer, number, first, rows)
        assert isinstance(part, MarlinWeight) and (rows, K) == (part.N, part.K)
        assert all(spans(tensor) in theirs for tensor in (part.words, part.scales, part.scale))
        ours = part.canonical()
        assert torch.equal(ours[0], codes[first : first + rows])
        assert torch.equal(ours[1].view(torch.uint8), scales[first : first + rows].view(torch.uint8))
        assert torch.equal(part.scale, 1.0 / torch.tensor(divisors[number]))
        first += rows


def test_parts_with_their_own_scales_add_their_own_bias():
    layer = bare_layer([64, 32, 64], 128, [50.0, 60.0, 70.0])
    bias = layer.bias.data.clone()
    layouts.Marlin().prepare(layer)
    for part, expected in zip(layer.marlin_parts, bias.split([64, 32, 64]), strict=True):
        padded = torch.nn.functional.pad(expected, (0, -len(expected) % 64))
        assert torch.equal(part.bias, marlin_utils.marlin_permute_bias(padded))


@pytest.mark.parametrize("row", [5, 100])
def test_a_scale_that_marlin_lacks_keeps_the_layer_canonical(row):
    layer = bare_layer([64, 64], 128, [50.0, 60.0])
    layer.weight_scale.data[row, 3] = 2.0**-9
    assert isinstance(layouts.Marlin().prepare(layer), layouts.Canonical) and not hasattr(layer, "marlin_parts")


def test_rows_that_tiles_cannot_hold_run_on_marlin():
    assert isinstance(layouts.Tiled().prepare(bare_layer([72], 128, [50.0])), layouts.Marlin)
    with pytest.raises(ValueError, match=r"a\.layer has 72 rows on this rank; .* needs a multiple of 16"):
        layouts.Tiled(fixed_order=True).prepare(bare_layer([72], 128, [50.0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_marlins_tensor_scale_differs_by_a_power_of_two(dtype):
    layer = bare_layer([64], 128, [50.0], dtype)
    layer.weight_scale.data = (layer.weight_scale.float() / 16).to(torch.float8_e4m3fn)
    layouts.Marlin().prepare(layer)
    part = layer.marlin_parts[0]
    assert part.scale_exponent == (4 if dtype == torch.bfloat16 else 0)
    of_the_codes = 119 if dtype == torch.bfloat16 else 7
    assert torch.equal(part.weight_global_scale, part.tensor_scale * 2.0 ** (of_the_codes - part.scale_exponent))


@pytest.mark.parametrize(("widths", "part", "first"), [([32, 96], 0, 0), ([32, 96], 1, 32), ([64, 80, 48], 1, 64)])
def test_a_part_across_blocks_of_64_rows_is_refused(widths, part, first):
    layer = bare_layer(widths, 128, [50.0] * len(widths))
    layouts.Marlin().prepare(layer)
    reason = marlin_part(layer, part, first, widths[part])
    assert isinstance(reason, str) and f"its rows {first} to {first + widths[part]} of a fused layer" in reason


def test_scales_that_vllm_stores_in_another_form_are_not_read(monkeypatch):
    process = marlin_utils_fp4.nvfp4_marlin_process_scales

    def reversed_columns(scales, **options):
        stored, factor = process(scales, **options)
        return stored.view(torch.uint8).flip(1).view(stored.dtype), factor

    monkeypatch.setattr(marlin_utils_fp4, "nvfp4_marlin_process_scales", reversed_columns)
    layer = bare_layer([64], 128, [50.0])
    assert isinstance(layouts.Marlin().prepare(layer), layouts.Marlin)
    assert "in a form that is not known here" in marlin_part(layer, 0, 0, 64)


@pytest.mark.parametrize("scale", [2.0**-9, -3.0], ids=["too small", "negative"])
def test_promise_02_a_scale_that_marlin_lacks_is_named_once(scale, monkeypatch, warnings_of):
    """Negative scales do not get this far, since the check of the checkpoint refuses them. Marlin would flush them to
    zero."""
    later: list[str] = []
    warned = warnings_of(layouts.logger)
    monkeypatch.setattr(layouts.logger, "debug", lambda text, *values: later.append(text % values))
    # a process warns only once, and earlier tests of this process may have warned
    monkeypatch.setattr(layouts, "_warned_of", [])
    assert isinstance(layouts.Marlin().prepare(bare_layer([64], 128, [50.0])), layouts.Marlin) and not warned
    layer = bare_layer([64], 128, [50.0])
    layer.weight_scale.data[5, 3] = scale
    assert isinstance(layouts.Marlin().prepare(layer), layouts.Canonical)
    assert layer.weight_scale[5, 3] == scale and not hasattr(layer, "marlin_parts")
    assert len(warned) == 1 and warned[0].startswith("a.layer: Marlin would flush 1 block scales to zero")
    layouts._warn_of_flushed("another.layer", 5)
    assert len(warned) == len(later) == 1 and later[0].startswith("another.layer: Marlin would flush 5 block scales")


def test_without_our_kernel_marlin_takes_every_layer(monkeypatch):
    def prepare(*_):
        raise CompileError("none of 68 kernels can be used on this machine: does not load: CUDA error 209")

    said: list[str] = []
    vllm_logger._print_warning_once.cache_clear()
    monkeypatch.setattr(layouts.linear_tiles, "prepare", prepare)
    monkeypatch.setattr(layouts.logger, "warning", lambda text, *values, **_: said.append(text % values))
    for K in (128, 256, 128):
        layer = bare_layer([64, 64], K, [50.0, 60.0])
        assert isinstance(layouts.Tiled().prepare(layer), layouts.Marlin) and len(layer.marlin_parts) == 2
    assert len(said) == 1 and "Marlin runs in its place: none of 68 kernels" in said[0]
    with pytest.raises(CompileError):  # fixed_order promises bits that Marlin cannot deliver
        layouts.Tiled(fixed_order=True).prepare(bare_layer([64], 128, [50.0]))


@pytest.fixture
def engine_on_marlin(boot, measure):
    """engine_on_marlin(folder) starts an engine whose layers are laid out as on a GPU. It can lend its weights but
    cannot generate."""

    def start(folder):
        engine = boot(folder)
        lay_out_for_marlin(measure.model(engine))
        return engine

    return start


def lay_out_for_marlin(model):
    for module in model.modules():
        if hasattr(module, "qerl_prefix"):
            module.quant_method.layout = layouts.Marlin().prepare(module)


@pytest.mark.parametrize("shared", [True, False], ids=["one scale", "own scales"])
def test_an_engine_on_marlin_lends_every_linear_in_place(shared, make_bf16, write_packed, engine_on_marlin, measure):
    folder = write_packed(make_bf16("qwen2", intermediate_size=128), shared=shared)
    engine = engine_on_marlin(folder)
    theirs = {spans(t) for t in (*measure.model(engine).parameters(), *measure.model(engine).buffers())}
    lent, stored = frozen_weights(engine), load_file(folder / "model.safetensors")
    assert len(lent.linears) == 14 and not lent.apart and lent.device == torch.device("cpu")
    for name, frozen in lent.linears.items():
        weight = frozen.weight
        assert isinstance(weight, MarlinWeight)
        assert all(spans(tensor) in theirs for tensor in (weight.words, weight.scales, weight.scale)), name
        expected = nvfp4.dequantize(stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"])
        assert torch.equal(nvfp4.dequantize(*weight.canonical()), expected), name
        assert torch.equal(weight.scale, 1.0 / stored[f"{name}.weight_global_scale"][0]), name
        if frozen.bias is not None:
            assert spans(frozen.bias) in theirs and torch.equal(frozen.bias, stored[f"{name}.bias"]), name


def test_a_compiled_model_is_kept_by_its_layouts(make_bf16, write_packed, boot, measure):
    """Check vLLM's hash of the config: a compiled model of other layouts would look for tensors that are not there."""
    folder = write_packed(make_bf16("qwen2", intermediate_size=128), shared=False)
    engine = boot(folder)
    config, model = engine.llm_engine.vllm_config, measure.model(engine)
    canonical = config.additional_config.pop("qerl_layouts")
    assert canonical == layouts.digest(model)
    model.vllm_config = config.with_hf_config(config.model_config.hf_config)  # as a model inside another has its own
    hashes = {config.compute_hash()}
    keep_compiled_by(canonical, config, model)
    assert {one.additional_config.pop("qerl_layouts") for one in (config, model.vllm_config)} == {canonical}
    lay_out_for_marlin(model)
    digests = {canonical, layouts.digest(model)}
    assert len(digests) == 2
    next(layer for layer in model.modules() if hasattr(layer, "marlin_parts")).marlin_parts.append(torch.nn.Module())
    digests.add(layouts.digest(model))
    for found in digests:
        config.additional_config["qerl_layouts"] = found
        hashes.add(config.compute_hash())
    assert len(hashes) == 4


def test_an_engine_on_marlin_lends_what_it_can(make_nvfp4, engine_on_marlin, measure):
    engine = engine_on_marlin(make_nvfp4("qwen2"))
    lent = frozen_weights(engine)
    # gate and up have 96 rows
    assert len(lent.linears) == 10 and all("its rows" in reason for reason in lent.apart.values())
    for module in measure.model(engine).modules():
        for part in getattr(module, "marlin_parts", ()):
            part.scale_exponent = None
    with pytest.raises(NotShareableError, match="Marlin's block scales in a form that is not known here"):
        frozen_weights(engine)
