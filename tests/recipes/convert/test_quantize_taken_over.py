"""Test `qerl quantize` on a checkpoint whose NVFP4 weights have another form: no code and no scale changes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_recipes.convert.quantize import quantize_checkpoint
from qerl_vllm_plugin.weights.checkpoint import inspect_folder
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

FIXTURES = Path(__file__).parents[2] / "fixtures"
W4A4, W4A16 = (FIXTURES / "llmcompressor_w4a4" / name for name in ("qwen2-w4a4", "qwen2-w4a16"))
MIXED = FIXTURES / "llmcompressor_w4a4" / "qwen3-mixed-kv"
MODELOPT = FIXTURES / "modelopt"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_w4a4_becomes_the_very_bytes_of_its_w4a16_twin(tmp_path):
    report = quantize_checkpoint(W4A4, tmp_path / "weights")
    ours, twin = (load_file(folder / "model.safetensors") for folder in (tmp_path / "weights", W4A16))
    assert ours.keys() == twin.keys()
    assert all(ours[name].dtype == t.dtype and torch.equal(bits(ours[name]), bits(t)) for name, t in twin.items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "weights", W4A16)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    inspected = inspect_folder(tmp_path / "weights")
    assert inspected.complete and not inspected.scheme.extras
    assert report.method == "taken over" and report.layers == [] and report.ignore == ("lm_head",)


@pytest.mark.parametrize("name", ["qwen2-nvfp4", "qwen3-mixed", "qwen3-w4a16-kv", "qwen3_moe-nvfp4"])
def test_modelopt_keeps_its_codes_and_scales(name, tmp_path):
    source = shutil.copytree(MODELOPT / name, tmp_path / "source")
    if name == "qwen2-nvfp4":  # modelopt 0.29 and earlier put the quantization into a file of its own
        config = json.loads((source / "config.json").read_text())
        del config["quantization_config"]
        (source / "config.json").write_text(json.dumps(config))
    quantize_checkpoint(source, tmp_path / "weights")
    theirs, ours = load_file(source / "model.safetensors"), load_file(tmp_path / "weights" / "model.safetensors")
    seen = set()
    for key, tensor in theirs.items():
        module = key.removesuffix(".weight")
        if tensor.dtype == torch.uint8:
            new = {
                f"{module}.weight_packed": tensor,
                f"{module}.weight_scale": theirs[f"{key}_scale"],
                f"{module}.weight_global_scale": 1 / theirs[f"{key}_scale_2"].reshape(1),
            }
        elif tensor.dtype == torch.float8_e4m3fn and key.endswith(".weight"):
            new = {key: (tensor.float() * theirs[f"{key}_scale"]).bfloat16()}
        elif not key.endswith(("_scale", "_scale_2")):
            new = {key: tensor}
        else:
            continue
        for new_key, value in new.items():
            assert ours[new_key].dtype == value.dtype and torch.equal(bits(ours[new_key]), bits(value)), new_key
        seen |= new.keys()
    assert seen == ours.keys()
    inspected = inspect_folder(tmp_path / "weights")
    assert inspected.complete and not (tmp_path / "weights" / "hf_quant_config.json").exists()
    if name == "qwen3-mixed":
        assert inspected.scheme.is_ignored("model.layers.0.self_attn.q_proj")  # FP8 in the source, BF16 now
        assert inspected.scheme.is_ignored("model.layers.1.mlp.down_proj")


def test_fp8_rows_and_tensors_of_llmcompressor_become_bf16(tmp_path):
    quantize_checkpoint(MIXED, tmp_path / "weights")
    theirs, ours = load_file(MIXED / "model.safetensors"), load_file(tmp_path / "weights" / "model.safetensors")
    for part, shape in (("q_proj", (64, 1)), ("o_proj", (1,))):
        name = f"model.layers.1.self_attn.{part}.weight"
        assert theirs[f"{name}_scale"].shape == shape
        exact = theirs[name].double() * theirs[f"{name}_scale"].double()
        assert torch.equal(ours[name], exact.bfloat16())
    assert not any(name.endswith(("k_scale", "v_scale", "input_scale", "input_global_scale")) for name in ours)
    assert inspect_folder(tmp_path / "weights").complete


def test_shards_stay_apart_and_a_scale_may_lie_in_another_one(tmp_path):
    source = shutil.copytree(MODELOPT / "qwen3-mixed", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    shards = {
        "model-00001-of-00003.safetensors": [name for name in tensors if name.endswith("input_scale")],
        "model-00002-of-00003.safetensors": [name for name in tensors if name.endswith(("t_scale", "_scale_2"))],
    }
    rest = set(tensors) - {name for names in shards.values() for name in names}
    shards["model-00003-of-00003.safetensors"] = sorted(rest)
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, source / file)
    places = {name: file for file, names in shards.items() for name in names}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    quantize_checkpoint(source, tmp_path / "weights")
    quantize_checkpoint(MODELOPT / "qwen3-mixed", tmp_path / "whole")
    found = inspect_folder(tmp_path / "weights")
    assert [file.name for file in found.files] == sorted(shards)[1:]  # no tensor is left for the first file
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    ours = {name: t for file in found.files for name, t in load_file(file).items()}
    assert ours.keys() == whole.keys() and all(torch.equal(bits(ours[name]), bits(t)) for name, t in whole.items())


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (W4A4, {"scales": "mse"}, "^scales: .* has NVFP4 weights already.*leave it out"),
        (W4A4, {"ignore": ("lm_head", "re:.*down_proj")}, "^ignore: .* has NVFP4 weights already.*leave it out"),
        (W4A16, {}, "is an NVFP4 checkpoint already"),
    ],
    ids=["scales", "ignore", "plain"],
)
def test_what_would_change_the_weights_is_refused(source, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(source, tmp_path / "weights", **options)
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weight_scale_2", 0.0, r"up_proj\.weight_scale_2: \[0\.0\] is not a usable"),
        ("weight_scale_2", float("nan"), r"up_proj\.weight_scale_2: \[nan\] is not a usable"),
        ("weight_scale", float("nan"), r"up_proj\.weight_scale: 384 block scales are NaN"),
    ],
    ids=str,
)
def test_unusable_values_are_refused_and_leave_nothing(key, value, message, tmp_path):
    source = shutil.copytree(MODELOPT / "qwen2-nvfp4", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{key}"
    tensors[name] = torch.full(tensors[name].shape, value).to(tensors[name].dtype)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
