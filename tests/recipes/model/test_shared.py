"""Test one shared copy of the frozen weights.

The trainer must compute the same on the engine's weights as on its own.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from marlin_packing import repack, store_scales
from qerl_kernels import nvfp4, tiles
from safetensors.torch import load_file
from transformers import TrainerCallback

from qerl_recipes.files import run_state as checkpoints
from qerl_recipes.model import loading as models
from qerl_recipes.model import shared
from qerl_recipes.model.frozen import FrozenMarlinLinear, FrozenNVFP4Linear, FrozenTiledLinear
from qerl_recipes.recipe.configs import GRPOConfig, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.train import run as train
from qerl_recipes.train.preflight import check, make
from qerl_vllm_plugin.weights.expected import fused_with
from qerl_vllm_plugin.weights.frozen_weights import FrozenWeight, FrozenWeights, frozen_weights, marlin_part, tiled_part
from qerl_vllm_plugin.worker.kv_cache import KVCacheError

IDS = torch.randint(2, 27, (3, 24), generator=torch.Generator().manual_seed(1))


def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenNVFP4Linear)}


def answer(model):
    """Return the logits, and the gradient with respect to the embedded input."""
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=x).logits
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return logits.detach(), x.grad


def same_answers(a, b):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(answer(a), answer(b), strict=True))


@pytest.fixture(scope="module")
def engine_on(engine_options):
    """Return engine_on(folder), which returns the lent weights and the engine's model."""
    from vllm import LLM

    engines = []

    def start(folder):
        options = {**engine_options, "quantization": "qerl_nvfp4", "num_gpu_blocks_override": 64}
        options["additional_config"] = {"qerl": {"policy_adapter": {"rank": 8}}}
        llm = LLM(model=str(folder), **options)
        engines.append(llm)
        return frozen_weights(llm), llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()

    yield start
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()


CASES = {
    "qwen2": ("qwen2", {}),
    "tied": ("qwen2", {"tie_word_embeddings": True, "vocab_size": 50}),
    "qwen3": ("qwen3", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_engines_tensors_are_read_in_place(case, make_nvfp4, engine_on):
    architecture, changes = CASES[case]
    folder = make_nvfp4(architecture, **changes)
    lent, engine = engine_on(folder)
    ours, own = models.load(folder, weights=lent), models.load(folder)
    theirs = {t.untyped_storage().data_ptr() for t in (*engine.parameters(), *engine.buffers())}
    tensors = dict((*ours.named_parameters(), *ours.named_buffers()))
    apart = {name: t for name, t in tensors.items() if t.untyped_storage().data_ptr() not in theirs}
    allowed = ("norm.weight", "layernorm.weight", "row_scale", "inv_freq")
    assert [name for name in apart if not name.endswith(allowed)] == []
    assert sum(t.numel() for name, t in apart.items() if name.endswith("row_scale")) == len(linears(own)) == 14
    stored = load_file(folder / "model.safetensors")
    for name, layer in linears(ours).items():
        weight = nvfp4.dequantize(layer.weight_packed, layer.weight_scale)
        expected = nvfp4.dequantize(stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"])
        assert torch.equal(weight, expected), name
        assert torch.equal(layer.row_scale, 1.0 / stored[f"{name}.weight_global_scale"][0]), name
    assert same_answers(ours, own)
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in ours.parameters())


def test_bf16_quantized_by_the_engine_is_not_quantized_again(make_bf16, make_nvfp4, engine_on, monkeypatch):
    lent, _ = engine_on(make_bf16("qwen2"))
    monkeypatch.setattr(nvfp4, "quantize", lambda *a: pytest.fail("quantized a second time"))
    ours = models.load(make_bf16("qwen2"), quantization="qerl_nvfp4", weights=lent)
    assert same_answers(ours, models.load(make_nvfp4("qwen2")))


def lend(own, prepare, cut):
    """Lend weights as an engine would: prepare fused layers as a whole and cut them into their parts.

    ``prepare(codes, block_scales, row_scale)`` makes the layer that ``cut(layer, part, first, rows)`` takes.
    """
    lent, left = FrozenWeights(), dict(linears(own))
    while left:
        parts = {name: left.pop(name) for name in fused_with(next(iter(left)), left)}
        codes = torch.cat([part.weight_packed for part in parts.values()])
        scales = torch.cat([part.weight_scale for part in parts.values()])
        row_scale = torch.cat([part.row_scale.expand(part.out_features) for part in parts.values()])
        whole, first = prepare(codes, scales, row_scale), 0
        for number, (name, part) in enumerate(parts.items()):
            weight = cut(whole, number, first, part.out_features)
            if isinstance(weight, str):
                lent.apart[name] = weight
            else:
                lent.linears[name] = FrozenWeight(weight, None if part.bias is None else part.bias.data)
            first += part.out_features
    return lent


def tile(own):
    """Lend the weights in tiles, as an engine on a Hopper GPU does."""
    return lend(own, tiles.tile_weight, lambda whole, _, first, rows: tiled_part(whole, first, rows))


def marlin_layer(codes, block_scales, row_scale):
    """Build a layer as ``layouts.Marlin`` leaves it, by the closed forms, with 64 columns of K filled up."""
    part, exponent, (N, half) = torch.nn.Module(), 0, codes.shape
    missing = -N % 64
    words = repack(torch.nn.functional.pad(codes, (0, 32, 0, missing)))
    padded = torch.nn.functional.pad(block_scales.view(torch.uint8), (0, 4, 0, missing)).view(torch.float8_e4m3fn)
    part.weight = torch.nn.Parameter(words, requires_grad=False)
    stored = store_scales(padded, exponent).view(torch.float8_e4m3fn)
    part.weight_scale = torch.nn.Parameter(stored, requires_grad=False)
    part.tensor_scale, part.scale_exponent = row_scale[0].clone(), exponent
    part.output_size_per_partition, part.input_size_per_partition = N, 2 * half
    return SimpleNamespace(marlin_parts=[part])


def test_weights_in_marlins_layout_give_the_same_bits(make_nvfp4):
    folder = make_nvfp4("qwen2", intermediate_size=128)
    own = models.load(folder)
    lent = lend(own, marlin_layer, marlin_part)
    assert not lent.apart
    ours = models.load(folder, weights=lent)
    assert {type(module) for module in linears(ours).values()} == {FrozenMarlinLinear}
    for name, layer in linears(ours).items():
        weight, theirs = lent.linears[name].weight, linears(own)[name]
        for held, of_the_engine in ((layer.words, weight.words), (layer.scales, weight.scales)):
            assert held.data_ptr() == of_the_engine.data_ptr() and held.stride() == of_the_engine.stride()
        assert layer.row_scale.data_ptr() == weight.scale.data_ptr()
        expected = nvfp4.dequantize(theirs.weight_packed, theirs.weight_scale)
        assert torch.equal(nvfp4.dequantize(*weight.canonical()), expected), name
    assert same_answers(ours, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_marlin_layer_is_the_checkpoints_layer(make_nvfp4, dtype):
    own = models.load(make_nvfp4("qwen2", intermediate_size=128))
    name = "model.layers.0.self_attn.k_proj"
    lent, reference = lend(own, marlin_layer, marlin_part).linears[name], linears(own)[name].to(dtype)
    layer, saved = FrozenMarlinLinear(lent.weight, lent.bias, torch.float32).to(dtype), []
    ours = torch.randn(4, 64, dtype=dtype, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(ours)
    expected = reference(theirs)
    for product in (y, expected):
        product.float().square().sum().backward()
    assert torch.equal(y, expected) and torch.equal(ours.grad, theirs.grad)
    weight = lent.weight
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (weight.words, weight.scales, weight.scale)]
    assert (layer.words.dtype, layer.scales.dtype, layer.row_scale.dtype) == (torch.int32, torch.uint8, torch.float32)
    assert layer.bias.dtype == layer.weight.dtype == dtype
    assert layer.weight.shape == (64, 64) and bool(layer.weight.isnan().all())


def test_tiled_weights_give_the_same_bits(make_nvfp4):
    folder = make_nvfp4("qwen2", intermediate_size=128)
    own = models.load(folder)
    lent = tile(own)
    assert not lent.apart
    ours = models.load(folder, weights=lent)
    assert {type(module) for module in linears(ours).values()} == {FrozenTiledLinear}
    for name, layer in linears(ours).items():
        assert layer.tiles.data_ptr() == lent.linears[name].weight.tiles.data_ptr()
    assert same_answers(ours, own)


def test_a_tiled_layer_keeps_its_packed_weight_alone(make_nvfp4):
    own = models.load(make_nvfp4("qwen2", intermediate_size=128))
    lent = tile(own).linears["model.layers.0.self_attn.q_proj"]
    layer, saved = FrozenTiledLinear(lent.weight, lent.bias, torch.float32).to(torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True))
    assert {t.dtype for t in saved} == {torch.uint8, torch.float32}
    assert (layer.tiles.dtype, layer.row_scale.dtype, layer.counters.dtype) == (torch.uint8, torch.float32, torch.int32)
    assert layer.bias.dtype == layer.weight.dtype == torch.bfloat16
    assert layer.weight.shape == (64, 64) and bool(layer.weight.isnan().all())


def test_a_tiled_layer_in_float16_is_the_checkpoints_layer():
    generator = torch.Generator().manual_seed(0)
    packed = nvfp4.quantize(torch.randn(64, 96, generator=generator).bfloat16())
    whole = tiles.tile_weight(packed.codes, packed.block_scales, 1 / packed.divisor, torch.float16)
    own = FrozenNVFP4Linear(packed.codes, packed.block_scales, packed.divisor, None, torch.float16)
    layer, x = FrozenTiledLinear(whole, None, torch.float16), torch.randn(5, 96, generator=generator).half()
    assert torch.equal(layer(x), own(x)) and layer(x).dtype == torch.float16
    (w, factor), (expected, same) = layer.operand(torch.float16), own.operand(torch.float16)
    assert w.dtype == torch.float16 and torch.equal(w, expected) and (factor, layer.factor) == (same, own.factor)
    assert torch.equal(w.double() * factor, nvfp4.dequantize(packed.codes, packed.block_scales).double())
    in_one_order = FrozenTiledLinear(dataclasses.replace(whole, fixed_order=True), None, torch.float16)
    assert in_one_order.factor is None, "no library multiplies by it"
    assert in_one_order._weight().fixed_order and torch.equal(in_one_order(x), own(x))


@pytest.mark.parametrize("layout", ["tiles", "Marlin"])
def test_parts_that_cannot_be_cut_are_copied_with_a_warning(layout, make_nvfp4):
    folder = make_nvfp4("qwen2")  # gate and up have 96 rows: one and a half tiles
    own = models.load(folder)
    with pytest.warns(UserWarning, match=r"4 of 15 linears.*gate_proj: its rows 0 to 96") as warned:
        ours = models.load(folder, weights=tile(own) if layout == "tiles" else lend(own, marlin_layer, marlin_part))
    assert len(warned) == 1
    kinds = {name.rsplit(".", 1)[-1]: type(module) for name, module in linears(ours).items()}
    assert {name for name, kind in kinds.items() if kind is FrozenNVFP4Linear} == {"gate_proj", "up_proj"}
    assert same_answers(ours, own)


def test_weights_of_another_model_are_refused(make_nvfp4):
    lent = tile(models.load(make_nvfp4("qwen2", intermediate_size=128)))
    with pytest.raises(ValueError, match=r"mlp\.gate_proj is .*not the same model"):
        models.load(make_nvfp4("qwen2"), weights=lent)


@pytest.fixture
def run(write_recipe, tmp_path):
    """Return run(name, **changes), which trains three steps with noise and returns the folder and the trainer.

    ``before(trainer)`` is called before it trains.
    """
    made = []

    def start(name, before=None, **changes):
        noise = {"noise_mode": "both", "sigma_start": 0.1, "sigma_end": 0.05, "num_stages": 2}
        reward = {"reward_funcs": ["digit_rewards.digits"]}
        recipe = write_recipe(output_dir=str(tmp_path / name), **{**noise, **reward, **changes})
        script, training, model_config = parse(["--config", recipe])
        while made:
            made.pop().vllm_generation.close()
        trainer = train.build(make(script, training, model_config))
        made.append(trainer)
        if before is not None:
            before(trainer)
        trainer.train()
        train.finish(trainer)
        return tmp_path / name, trainer

    yield start
    for trainer in made:
        trainer.vllm_generation.close()


def weights_in_the_engine(trainer):
    """Count the trainer's frozen linears whose weights lie in the engine."""
    llm = trainer.vllm_generation.llm
    engine = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    theirs = {t.untyped_storage().data_ptr() for t in (*engine.parameters(), *engine.buffers())}
    frozen = linears(trainer.model).values()
    return sum(layer.weight_packed.untyped_storage().data_ptr() in theirs for layer in frozen)


def test_three_steps_on_shared_weights_are_those_on_a_copy(run, read_metrics):
    one, trainer = run("one copy")
    assert weights_in_the_engine(trainer) == 14
    stored = load_file(f"{trainer.vllm_generation.llm.llm_engine.model_config.model}/model.safetensors")
    lent = trainer.vllm_generation.frozen_weights()
    assert all(torch.equal(w.weight.codes, stored[f"{name}.weight_packed"]) for name, w in lent.linears.items())
    two, trainer = run("two copies", share_weights=False)
    assert weights_in_the_engine(trainer) == 0
    assert read_metrics(one) == read_metrics(two)
    ours, theirs = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (one, two))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(bool(tensor.any()) for name, tensor in ours.items() if "lora_B" in name)


class FlipsABit(TrainerCallback):
    """Change a weight that the engine has lent, after the second step."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 2:
            linears(model)["base_model.model.model.layers.1.mlp.up_proj.base_layer"].weight_packed[7, 3] ^= 1


def test_a_changed_lent_weight_stops_the_trainer(run, kv_events, tmp_path):
    spoiled = []

    def prepare(trainer):
        spoiled.append(trainer)
        trainer.args.vllm_enable_sleep_mode = True
        trainer.add_callback(FlipsABit())

    with pytest.raises(KVCacheError, match=r"^model\.layers\.1\.mlp\.gate_up_proj\.weight_packed has changed"):
        run("spoiled", before=prepare, save_strategy="steps", save_steps=1)
    assert kv_events == ["release", "resume", "zero", "release"]
    assert [path.name for path in checkpoints.whole_checkpoints(tmp_path / "spoiled")] == ["checkpoint-1"]
    with pytest.raises(KVCacheError, match="has changed"):  # the same check as for a change in the last step
        train.finish(spoiled[0])
    assert not (tmp_path / "spoiled" / "adapter").exists()


CPU = {"output_dir": "unused", "use_cpu": True, "bf16": False}
OBSTACLES = [
    ({"quantization": "bf16"}, "only qerl_nvfp4 is shared"),
    ({"vllm_tensor_parallel_size": 2}, "a part of every weight"),
]


@pytest.mark.parametrize(("changes", "reason"), OBSTACLES)
def test_promise_09_sharing_that_was_asked_for_and_cannot_be_is_refused(changes, reason):
    flags = [part for key, value in changes.items() for part in (f"--{key}", str(value))]
    training = GRPOConfig(**CPU, **changes, share_weights=True)
    with pytest.raises(ValueError, match=f"share_weights: .*{reason}.*; use share_weights: false"):
        shared.is_wanted(training)
    with pytest.raises(ConfigError, match=f"share_weights: .*{reason}.*; use share_weights: false"):
        check(*parse(["--output_dir", "unused", "--use_cpu", "true", "--share_weights", "true", *flags]))


def test_sharing_that_was_left_open_and_cannot_be_is_said_once():
    with pytest.warns(UserWarning, match="keeps its own copy of the frozen weights: vllm_tensor_parallel_size: 2"):
        assert not shared.is_wanted(GRPOConfig(**CPU, vllm_tensor_parallel_size=2))


@pytest.mark.parametrize("asked", [None, True])
def test_an_engine_that_lends_nothing_is_named(asked):
    training = GRPOConfig(**CPU, share_weights=asked)
    if asked:
        with pytest.raises(ValueError, match="the rollout engine vllm lends no weights; or use share_weights: false"):
            shared.borrow(object(), training)
    else:
        with pytest.warns(UserWarning, match="own copy of the frozen weights: the rollout engine vllm lends no"):
            assert shared.borrow(object(), training) is None
