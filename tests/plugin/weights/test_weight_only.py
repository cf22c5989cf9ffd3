"""Test checkpoints with more than packed weights, served as weights only. llmcompressor and modelopt wrote the
files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from vllm.model_executor.models.paligemma import PaliGemmaForConditionalGeneration

from qerl_recipes.convert.quantize import quantize_checkpoint
from qerl_vllm_plugin import quantization as config
from qerl_vllm_plugin.quantization import CACHE_SCALES, QerlConfig
from qerl_vllm_plugin.weights.checkpoint import inspect_folder, weights_taken

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLMCOMPRESSOR, MODELOPT = FIXTURES / "llmcompressor_w4a4", FIXTURES / "modelopt"
ASKED = {"qerl": {"weight_only": True}}
TOLERANCE = 1e-4  # float32 engines against float32 transformers
needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's FP8 cache on a CPU needs AVX-512"
)


@pytest.fixture(scope="module")
def serve(boot):
    """serve(folder, **options) starts an engine in float32 with the option ``weight_only``."""

    def start(folder, **options):
        return boot(folder, **{"dtype": "float32", "skip_tokenizer_init": True, "additional_config": ASKED, **options})

    return start


def without_cache_scales(source: Path, folder: Path, own_file: bool = False) -> Path:
    """Copy a checkpoint without its FP8 KV cache. With ``own_file`` only hf_quant_config.json describes its
    quantization."""
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"].pop("kv_cache_scheme", None)
    if own_file:
        own = json.loads((folder / "hf_quant_config.json").read_text())
        own["quantization"]["kv_cache_quant_algo"] = None
        (folder / "hf_quant_config.json").write_text(json.dumps(own))
        del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {
        name: t for name, t in load_file(folder / "model.safetensors").items() if name[-7:-5] not in ("k_", "v_")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_w4a4_has_the_weights_and_the_answers_of_its_w4a16_twin(serve, measure, warnings_of):
    warnings = warnings_of(config.logger)  # `qerl serve` shows warnings and no lower level
    ours, twin = serve(LLMCOMPRESSOR / "qwen2-w4a4"), serve(LLMCOMPRESSOR / "qwen2-w4a16")
    mine, theirs = (dict(measure.model(llm).state_dict()) for llm in (ours, twin))
    assert mine.keys() == theirs.keys() and sum(name.endswith("weight_packed") for name in mine) == 8
    for name, tensor in theirs.items():
        assert torch.equal(mine[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert measure.difference(measure.engine(ours), measure.engine(twin)) == 0
    assert len(warnings) == 1, "the twin holds nothing but weights"
    assert "14 layers in NVFP4, 0 FP8 layers" in warnings[0] and "activation scales are dropped" in warnings[0]


@pytest.mark.parametrize(
    ("name", "own_file"), [("qwen2-nvfp4", True), ("qwen3-w4a16-kv", False), ("qwen3-mixed", False)], ids=str
)
def test_modelopt_answers_as_its_own_dequantized_weights(serve, measure, tmp_path, name, own_file):
    expected = json.loads((MODELOPT / name / "expected.json").read_text())
    assert expected["prompts"] == measure.prompts
    llm = serve(without_cache_scales(MODELOPT / name, tmp_path / "copy", own_file))
    assert measure.difference(measure.engine(llm), torch.tensor(expected["logprobs"])) < TOLERANCE
    stored = load_file(MODELOPT / name / "model.safetensors")
    gate_up = measure.model(llm).model.layers[1].mlp.gate_up_proj
    parts = [f"model.layers.1.mlp.{part}.weight" for part in ("gate_proj", "up_proj")]
    assert torch.equal(gate_up.weight_packed, torch.cat([stored[part] for part in parts]))
    scales = torch.cat([stored[f"{part}_scale"] for part in parts])
    assert torch.equal(gate_up.weight_scale.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(gate_up.weight_global_scale, 1 / torch.stack([stored[f"{part}_scale_2"] for part in parts]))


class Fp8Cache(DynamicCache):
    """Keys and values rounded as in vLLM's FP8 KV cache on a CPU, which cuts the mantissa to 3 bits."""

    def __init__(self, scales: list[list[torch.Tensor]]) -> None:
        super().__init__()
        self.scales = scales

    def update(self, keys, values, layer_idx, *args, **kwargs):
        stored = []
        for x, scale in zip((keys, values), self.scales[layer_idx], strict=True):
            mantissa, exponent = torch.frexp((x / scale).clamp(-448, 448))
            stored.append(torch.ldexp(torch.trunc(mantissa * 16) / 16, exponent) * scale)
        return super().update(*stored, layer_idx, *args, **kwargs)


@torch.no_grad()
def answers(model, prompts, scales) -> torch.Tensor:
    found = []
    for ids in prompts:
        logits = model(torch.tensor([ids]), past_key_values=Fp8Cache(scales), use_cache=True).logits[0]
        found.append(torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(found)


@needs_avx512
@pytest.mark.parametrize(
    ("folder", "key", "own_file"),
    [
        (LLMCOMPRESSOR / "qwen3-mixed-kv", "model.layers.{}.self_attn.{}_scale", False),
        (MODELOPT / "qwen3-w4a16-kv", "model.layers.{}.self_attn.{}_proj.{}_scale", False),
        (MODELOPT / "qwen3-w4a16-kv", "model.layers.{}.self_attn.{}_proj.{}_scale", True),
    ],
    ids=["llmcompressor", "modelopt", "modelopt, a file of its own"],
)
def test_scales_of_an_fp8_cache_are_used(serve, measure, reference, tmp_path, folder, key, own_file):
    if own_file:  # modelopt 0.29 and earlier write no quantization into config.json
        source, folder = folder, tmp_path / "own"
        shutil.copytree(source, folder)
        values = json.loads((folder / "config.json").read_text())
        del values["quantization_config"]
        (folder / "config.json").write_text(json.dumps(values))
        own = folder / "hf_quant_config.json"
        own.write_text(own.read_text().replace("W4A16_NVFP4", "NVFP4"))  # the only algorithm name at that time
    llm = serve(folder)
    stored = load_file(folder / "model.safetensors")
    scales = [[stored[key.format(layer, x, x)].float() for x in "kv"] for layer in (0, 1)]
    for layer, (k, v) in zip(measure.model(llm).model.layers, scales, strict=True):
        attention = layer.self_attn.attn
        assert attention.kv_cache_dtype.startswith("fp8")
        assert (attention._k_scale_float, attention._v_scale_float) == (float(k), float(v))
    quantize_checkpoint(folder, tmp_path / "weights")
    hf = reference(tmp_path / "weights")
    served, ones = measure.engine(llm), [[torch.ones(()), torch.ones(())]] * 2
    assert (served - answers(hf, measure.prompts, scales)).abs().mean() < 0.03
    assert (served - answers(hf, measure.prompts, ones)).abs().mean() > 0.06


@pytest.mark.parametrize(
    ("cache", "rank"),
    [pytest.param("fp8", 4, marks=needs_avx512), ("auto", 4), pytest.param("fp8", 0, marks=needs_avx512)],
)
def test_an_fp8_cache_under_a_policy_adapter_is_warned_of(make_nvfp4, boot, warnings_of, cache, rank):
    warnings = warnings_of(config.logger)
    options = {"policy_adapter": {"rank": rank}} if rank else {}
    boot(make_nvfp4("qwen2"), kv_cache_dtype=cache, additional_config={"qerl": options})
    assert any("--kv-cache-dtype fp8 under a policy adapter" in text for text in warnings) == (
        cache == "fp8" and rank > 0
    )


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", ["llmcompressor_w4a4/qwen2-w4a4", "modelopt/qwen3-mixed"])
def test_without_being_asked_nothing_is_dropped(boot, name, load_format):
    with pytest.raises(ValueError, match=r"not supported as it is: it has .*\{\"weight_only\": true\}"):
        boot(FIXTURES / name, skip_tokenizer_init=True, load_format=load_format)


@needs_avx512
def test_random_weights_of_the_same_layout_need_no_file(serve, measure):
    llm = serve(MODELOPT / "qwen3-mixed", load_format="dummy")
    assert measure.engine(llm).isfinite().all()
    assert measure.model(llm).model.layers[0].mlp.gate_up_proj.weight_packed.any()


def test_the_start_says_what_is_read_and_what_is_dropped():
    report = inspect_folder(MODELOPT / "qwen3-mixed", weight_only=True)
    text = weights_taken(report, CACHE_SCALES)
    assert "4 layers in NVFP4, 8 FP8 layers expanded to BF16, 3 matrices left in BF16" in text
    assert "model.layers.0.mlp.down_proj" in text
    assert "activation scales are dropped" in text and "the scales of the FP8 KV cache are used" in text
    plain = weights_taken(inspect_folder(LLMCOMPRESSOR / "qwen2-w4a4", weight_only=True), CACHE_SCALES)
    assert "14 layers in NVFP4, 0 FP8 layers" in plain and "KV cache" not in plain


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.language_model.layers.1.mlp.down_proj", "language_model.model.layers.1.mlp.down_proj"),
        ("model.vision_tower.encoder.layers.1.fc1", "vision_tower.encoder.layers.1.fc1"),
    ],
)
def test_checkpoint_names_in_a_model_that_renames_them(theirs, ours):
    """Ignore a layer by a pattern of the whole checkpoint name, and by the name itself. Another layer stays packed."""
    for pattern in (theirs, f"re:{theirs[:-2]}..$", ours):
        config = QerlConfig()
        config.ignore = (pattern,)
        config.apply_vllm_mapper(PaliGemmaForConditionalGeneration.hf_to_vllm_mapper)
        assert config.kind(ours) is None
        assert config.kind(ours.replace(".1.", ".2.")) == "nvfp4"


def test_a_fused_layer_of_unlike_parts_is_refused_by_name():
    config = QerlConfig()
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    config.ignore = ("re:.*q_proj", "re:.*0.*v_proj")
    with pytest.raises(ValueError, match=r"differently: a\.q_proj in bf16, a\.k_proj in nvfp4, a\.v_proj in nvfp4"):
        config.kind("a.qkv_proj")
    config.ignore = ("a.qkv_proj",)
    assert config.kind("a.qkv_proj") is None
