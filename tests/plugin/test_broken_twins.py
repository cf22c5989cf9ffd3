"""Test damaged checkpoints of each format. One tensor or one key is wrong, and the refusal names it and the way out.

The fixtures were written by llmcompressor and modelopt. Most tests start no engine, since a server reads the headers
first.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_vllm_plugin.weights.checkpoint import inspect_folder
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMATS = {
    "w4a16": "llmcompressor_w4a4/qwen2-w4a16",
    "w4a4": "llmcompressor_w4a4/qwen2-w4a4",
    "mixed": "llmcompressor_w4a4/qwen3-mixed-kv",
    "modelopt": "modelopt/qwen2-nvfp4",
    "modelopt_mixed": "modelopt/qwen3-mixed",
    "experts": "llmcompressor_w4a4/qwen3_moe-w4a4",
    "modelopt_experts": "modelopt/qwen3_moe-nvfp4",
}
GATE, QUERY = "model.layers.1.mlp.gate_proj", "model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.0.mlp.experts.2.up_proj"
WAY_OUT = "; (download or quantize the checkpoint again|start from the BF16 checkpoint and run|write its )"


def twin(name: str, folder: Path, *, tensors=None, config=None) -> Path:
    """Copy a format's folder and apply ``tensors(dict)`` and ``config(quantization_config)`` to the copy."""
    shutil.copytree(FIXTURES / FORMATS[name], folder)
    if tensors is not None:
        stored = load_file(folder / "model.safetensors")
        tensors(stored)
        save_file(stored, folder / "model.safetensors")
    if config is not None:
        values = json.loads((folder / "config.json").read_text())
        config(values["quantization_config"])
        (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_the_sound_twin_is_accepted_whole(name):
    assert inspect_folder(FIXTURES / FORMATS[name], weight_only=True).complete


MISSING = {
    "w4a16": [f"{GATE}.weight_packed", f"{GATE}.weight_scale", f"{GATE}.weight_global_scale"],
    "w4a4": [f"{GATE}.weight_packed", f"{GATE}.weight_scale", f"{GATE}.weight_global_scale"],
    "mixed": [
        f"{GATE}.weight_global_scale",
        f"{QUERY}.weight",
        f"{QUERY}.weight_scale",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.self_attn.k_scale",
        "model.layers.0.self_attn.v_scale",
    ],
    "modelopt": [f"{GATE}.weight", f"{GATE}.weight_scale", f"{GATE}.weight_scale_2"],
    "modelopt_mixed": [
        f"{GATE}.weight_scale_2",
        f"{QUERY}.weight",
        f"{QUERY}.weight_scale",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.self_attn.k_proj.k_scale",
        "model.layers.0.self_attn.v_proj.v_scale",
    ],
    "experts": [f"{EXPERT}.weight_packed", f"{EXPERT}.weight_scale", f"{EXPERT}.weight_global_scale"],
    "modelopt_experts": [f"{EXPERT}.weight", f"{EXPERT}.weight_scale", f"{EXPERT}.weight_scale_2"],
}


@pytest.mark.parametrize(("name", "tensor"), [(name, tensor) for name, all_ in MISSING.items() for tensor in all_])
def test_a_missing_tensor_is_named(name, tensor, tmp_path):
    folder = twin(name, tmp_path / "twin", tensors=lambda t: t.pop(tensor))
    with pytest.raises(CheckpointError, match=rf"{tensor}\b.*{WAY_OUT}"):
        inspect_folder(folder, weight_only=True)


@pytest.mark.parametrize("name", ["experts", "modelopt_experts"])
def test_a_missing_expert_is_named(name, tmp_path):
    def remove(tensors):
        for key in [key for key in tensors if ".experts.3." in key]:
            del tensors[key]

    with pytest.raises(CheckpointError, match=rf"experts\.3\.gate_proj\.weight\w* .*is missing.*{WAY_OUT}"):
        inspect_folder(twin(name, tmp_path / "twin", tensors=remove), weight_only=True)


FP32 = torch.float32
WRONG = {
    "block scales in FP32": ("w4a4", f"{GATE}.weight_scale", lambda t: t.to(FP32)),
    "one block scale a row": ("w4a4", f"{GATE}.weight_scale", lambda t: t[:, :1].contiguous()),
    "a tensor scale a row": ("w4a4", f"{GATE}.weight_global_scale", lambda t: t.repeat(96)),
    "a tensor scale in BF16": ("w4a4", f"{GATE}.weight_global_scale", lambda t: t.bfloat16()),
    "an activation scale a row": ("w4a4", f"{GATE}.input_global_scale", lambda t: t.repeat(96)),
    "codes in INT8": ("w4a4", f"{GATE}.weight_packed", lambda t: t.view(torch.int8)),
    "modelopt: block scales in BF16": ("modelopt", f"{GATE}.weight_scale", lambda t: t.to(torch.bfloat16)),
    "modelopt: swizzled block scales": (
        "modelopt",
        f"{GATE}.weight_scale",
        lambda t: t.repeat(2, 1)[:128].contiguous(),
    ),
    "modelopt: a tensor scale a row": ("modelopt", f"{GATE}.weight_scale_2", lambda t: t.repeat(96)),
    "modelopt: a tensor scale in BF16": ("modelopt", f"{GATE}.weight_scale_2", lambda t: t.bfloat16()),
    "modelopt: a row less": ("modelopt", f"{GATE}.weight_scale", lambda t: t[:-1]),
    "FP8 with a scale a block": ("mixed", f"{QUERY}.weight_scale", lambda t: t[:2].repeat(1, 2)),
    "FP8 in the other form": ("mixed", f"{QUERY}.weight", lambda t: t.to(FP32).to(torch.float8_e5m2)),
    "modelopt: FP8 with a scale a row": ("modelopt_mixed", f"{QUERY}.weight_scale", lambda t: t.repeat(64, 1)),
    "a cache scale a head": ("mixed", "model.layers.1.self_attn.v_scale", lambda t: t.repeat(2)),
    "modelopt: a cache scale a head": (
        "modelopt_mixed",
        "model.layers.1.self_attn.v_proj.v_scale",
        lambda t: t.repeat(2),
    ),
    "an expert of another size": ("experts", f"{EXPERT}.weight_scale", lambda t: t[:16]),
}


@pytest.mark.parametrize(("name", "tensor", "change"), WRONG.values(), ids=WRONG)
def test_a_tensor_of_the_wrong_kind_is_named(name, tensor, change, tmp_path):
    folder = twin(name, tmp_path / "twin", tensors=lambda t: t.update({tensor: change(t[tensor])}))
    with pytest.raises(CheckpointError, match=rf"{tensor}\b.*{WAY_OUT}"):
        inspect_folder(folder, weight_only=True)


def exclude(config: dict, module: str) -> None:
    config["ignore"] = [*(config.get("ignore") or ()), module]


def put_in(module: str, algorithm: str):
    return lambda config: config["quantized_layers"].update({module: {"quant_algo": algorithm}})


def only_weights(config: dict) -> None:
    for group in config["config_groups"].values():
        group["input_activations"] = None


CONTRADICTIONS = {
    "excluded and packed": ("w4a4", lambda c: exclude(c, GATE), rf"{GATE}\.\w+ is quantized, but .* lists {GATE}"),
    "excluded and FP8": ("mixed", lambda c: exclude(c, QUERY), rf"{QUERY}\.\w+ is quantized, but .* lists {QUERY}"),
    "in an NVFP4 and an FP8 group": (
        "mixed",
        lambda c: c["config_groups"]["group_0"]["targets"].append("re:.*gate_proj"),
        r"gate_proj is among the targets of an NVFP4 and of an FP8 group",
    ),
    "named by no group": (
        "mixed",
        lambda c: c["config_groups"]["group_0"].update(targets=["re:.*[qk]_proj$"]),
        r"v_proj\.weight\w* is quantized, but config\.json names .*v_proj in no target",
    ),
    "activation scales and none declared": (
        "w4a4",
        only_weights,
        r"input_global_scale belongs to W4A4, but config\.json",
    ),
    "cache scales and none declared": (
        "mixed",
        lambda c: c.update(kv_cache_scheme=None),
        r"self_attn\.[kv]_scale belongs to an FP8 KV cache, which config\.json does not declare",
    ),
    "modelopt: excluded and packed": (
        "modelopt",
        lambda c: exclude(c, GATE),
        rf"{GATE}\.\w+ is quantized, but .* ignore",
    ),
    "modelopt: excluded by a wildcard": (
        "modelopt",
        lambda c: exclude(c, "model.layers.1*"),
        r"model\.layers\.1\.\S+ is quantized, but config\.json lists model\.layers\.1\.\S+ in ignore",
    ),
    "modelopt: the parent is excluded": (
        "modelopt",
        lambda c: exclude(c, "model.layers.1.mlp"),
        r"model\.layers\.1\.mlp\.\w+\.\w+ is quantized, but config\.json lists",
    ),
    "modelopt: NVFP4 declared, FP8 stored": ("modelopt_mixed", put_in(QUERY, "NVFP4"), rf"{QUERY}\.weight is F8_E4M3"),
    "modelopt: FP8 declared, NVFP4 stored": ("modelopt_mixed", put_in(GATE, "FP8"), rf"{GATE}\.weight is U8"),
    "modelopt: quantized and BF16 stored": (
        "modelopt_mixed",
        put_in("model.layers.0.mlp.down_proj", "NVFP4"),
        r"layers\.0\.mlp\.down_proj\.weight is BF16",
    ),
    "modelopt: unlisted and quantized": (
        "modelopt_mixed",
        lambda c: c["quantized_layers"].pop(QUERY),
        rf"{QUERY}\.\w+ is quantized, but config\.json names {QUERY} in no target",
    ),
    "modelopt: cache scales and none declared": (
        "modelopt_mixed",
        lambda c: c.pop("kv_cache_scheme"),
        r"k_proj\.k_scale belongs to an FP8 KV cache",
    ),
}


@pytest.mark.parametrize(("name", "change", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_config_that_contradicts_the_tensors(name, change, message, tmp_path):
    folder = twin(name, tmp_path / "twin", config=change)
    with pytest.raises(CheckpointError, match=rf"{message}.*{WAY_OUT}"):
        inspect_folder(folder, weight_only=True)


ALGORITHMS = {
    "MXFP4": ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
    "NF4": ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, "quant_method 'bitsandbytes'"),
    "FP8 block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quant_method 'fp8'"),
    "INT4": ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
    "modelopt MXFP8": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "quant_algo 'MXFP8'"),
    "modelopt INT4": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ'"),
    "modelopt SVDQuant": ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVDQUANT"}, "quant_algo 'NVFP4_SVDQUANT'"),
}


@pytest.mark.parametrize(("quantization", "message"), ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("name", ["w4a4", "modelopt"])
def test_another_algorithm_is_named(name, quantization, message, tmp_path):
    def change(config):
        config.clear()
        config.update(quantization)

    folder = twin(name, tmp_path / "twin", config=change)
    for weight_only in (False, True):
        with pytest.raises(CheckpointError, match=f"{message}.*{WAY_OUT}"):
            inspect_folder(folder, weight_only=weight_only)


@pytest.mark.parametrize("name", ["modelopt", "experts"])
def test_an_engine_refuses_a_broken_twin_at_once(boot, name, tmp_path):
    tensor = f"{EXPERT}.weight_scale" if name == "experts" else f"{GATE}.weight_scale_2"
    folder = twin(name, tmp_path / "twin", tensors=lambda t: t.pop(tensor))
    options = {"skip_tokenizer_init": True, "additional_config": {"qerl": {"weight_only": True}}}
    with pytest.raises(ValueError, match=rf"{tensor} .*is missing"):
        boot(folder, **options)
